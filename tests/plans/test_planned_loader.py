"""Pipelines loaded in a precision for each call: the same at their borders as under a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import stopdown
from stopdown.plans.planned_loader import gather_facts
from stopdown.sources.sources import resolve_source


def ask(pipe: Any) -> torch.dtype:
    """What a pipeline's own code reads before it casts what an encoder returned."""
    found: torch.dtype = pipe.transformer.dtype
    return found


def test_values_of_a_wide_encoder_are_not_cast_between_components(
    save_tiny: Callable[..., Path],
) -> None:
    """Beside an encoder in fp32, a denoiser in plain fp16 reports fp32 to the pipeline, as under a plan."""
    given: dict[str, Any] = {"device": "cpu", "guard": False}
    folder = save_tiny("cogvideox", "fp32")
    mixed = stopdown.load(folder, precision="text_encoder=fp32,transformer=fp16-plain", **given)
    assert {x.dtype for x in mixed.transformer.parameters()} == {torch.float16}
    assert ask(mixed) == torch.float32
    assert ask(stopdown.load(folder, precision="fp16-plain", **given)) == torch.float16


def test_a_config_that_carries_a_plan_is_noticed(save_tiny: Callable[..., Path]) -> None:
    """Of a quantisation of another kind, or of none, nothing is said."""
    folder = save_tiny("cogvideox", "fp32")
    path = folder / "transformer" / "config.json"
    own, found = json.loads(path.read_text()), dict[str, bool]()
    for method in ("stopdown", "bitsandbytes"):
        path.write_text(json.dumps({**own, "quantization_config": {"quant_method": method}}))
        facts = gather_facts(resolve_source(folder))
        found[method] = next(x.carries_plan for x in facts if x.name == "transformer")
        assert not any(x.carries_plan for x in facts if x.name != "transformer")
    assert found == {"stopdown": True, "bitsandbytes": False}
