"""The program that certifies components beside another process: each plan is kept as it is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stopdown.plans import certified, certifier_process
from stopdown.plans.certified import Scope, certify_plan
from stopdown.plans.certifier_process import certify_components
from stopdown.sources.sources import resolve_source


@pytest.mark.thorough
def test_components_are_certified_and_kept(
    save_tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Progress is on standard output, line by line; the plan is read by whoever certifies next."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    monkeypatch.setattr(certifier_process, "_threads", [2])
    folder, before = save_tiny("sd"), torch.get_num_threads()
    source = resolve_source(folder)
    task: dict[str, Any] = {
        "source": str(folder), "revision": None, "variant": None, "cache_dir": None,
        "pipeline_class": source.pipeline_class, "scheduler": source.scheduler,
        "components": ["text_encoder", "safety_checker"],
        "residual": "native", "threads": 0, "downloads": False,
    }  # fmt: skip
    try:
        certify_components(task)
        assert torch.get_num_threads() == 2  # as the parent sent
    finally:
        torch.set_num_threads(before)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told
    assert all(len(line) == 4 for line in told)
    assert {what for _, what, _, _ in told} == {"text_encoder"}

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("It is certified again.")

    monkeypatch.setattr(certified, "_plan_component", refuse)
    kept = certify_plan(folder, scope=Scope(("text_encoder",), keeps=True))
    assert [x.component for x in kept.components] == ["text_encoder"]
    with pytest.raises(AssertionError, match="certified again"):
        certify_plan(folder, scope=Scope(("unet",), keeps=True))
