"""The choice of a plan for a source: made once, kept, or made again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from models.bare_plans import GOOD, MISSING, PLAN
from stopdown.devices.device_choice import Device
from stopdown.plans import plan_choice, planned_loader
from stopdown.plans import plan_files as files
from stopdown.plans.precision import ComponentFacts
from stopdown.records import Plan
from stopdown.sources.source import Source


def test_auto_makes_a_plan_once_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run of a checkpoint reads the plan of the first; on a CPU there is none."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    made: list[Any] = []

    def make(source: Source, **_: Any) -> Plan:
        made.append(source)
        return PLAN

    monkeypatch.setattr(plan_choice, "certify_plan", make)
    monkeypatch.setattr(plan_choice, "fingerprint", lambda source: PLAN.fingerprint)
    source = Source("owner/name", tmp_path, "folder")
    facts = [ComponentFacts("transformer", ("transformer",), {"bf16": 10})]
    supports = {"bf16": MISSING, "fp16": GOOD, "fp32": GOOD}
    monkeypatch.setattr(plan_choice, "gather_facts", lambda source: facts)
    monkeypatch.setattr(plan_choice, "probe_formats", lambda device: supports)
    card = Device("cuda", 0, "Tesla V100", (7, 0), 16 << 30)
    for _ in range(2):
        chosen = plan_choice.choose_plan(source, "auto", card)
        assert dataclasses.replace(chosen, chosen="") == PLAN
    assert len(made) == 1
    assert files.find_cached_path(PLAN.fingerprint).parent == tmp_path / "plans"
    decisions = tuple(planned_loader.describe_calls(chosen, facts))
    assert decisions[0].reason.startswith(
        "fp16 with an automatic plan, because transformer is stored in bf16"
    )
    processor = Device("cpu", 0, "processor", None, 16 << 30)
    assert plan_choice.choose_plan(source, "auto", processor).is_bare
    for device in (card, processor):
        asked = plan_choice.choose_plan(source, "fp16", device)
        assert dataclasses.replace(asked, chosen="") == PLAN
        assert plan_choice.choose_plan(source, "fp16-plain", device).is_bare
        assert plan_choice.choose_plan(source, "transformer=fp32", device).is_bare
    assert len(made) == 1
