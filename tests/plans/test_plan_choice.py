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

CARD = Device("cuda", 0, "Tesla V100", (7, 0), 16 << 30)


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
    for _ in range(2):
        chosen = plan_choice.choose_plan(source, "auto", CARD)
        assert dataclasses.replace(chosen, chosen="") == PLAN
    assert len(made) == 1
    assert files.find_cached_path(PLAN.fingerprint).parent == tmp_path / "plans"
    decisions = tuple(planned_loader.describe_calls(chosen, facts))
    assert decisions[0].reason.startswith(
        "fp16 with an automatic plan, because transformer is stored in bf16"
    )
    processor = Device("cpu", 0, "processor", None, 16 << 30)
    assert plan_choice.choose_plan(source, "auto", processor).is_bare
    for device in (CARD, processor):
        asked = plan_choice.choose_plan(source, "fp16", device)
        assert dataclasses.replace(asked, chosen="") == PLAN
        assert plan_choice.choose_plan(source, "fp16-plain", device).is_bare
        assert plan_choice.choose_plan(source, "transformer=fp32", device).is_bare
    assert len(made) == 1


def test_a_plan_that_another_device_made_suits_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines share a cache: what has no exponents ran in bf16 on a card without it, as on the other."""
    (entry,) = PLAN.components
    left = dataclasses.replace(entry, precision="bf16", scaling=None, reasons=("No rule.",))
    kept = files.seal_plan(dataclasses.replace(PLAN, components=(entry, left)))
    monkeypatch.setattr(plan_choice, "fingerprint", lambda source: PLAN.fingerprint)
    monkeypatch.setattr(plan_choice, "read_cached_plan", lambda fingerprint: kept)
    source, found = Source("owner/name", tmp_path, "folder"), list[Plan]()
    for support in (GOOD, MISSING):
        monkeypatch.setattr(plan_choice, "probe_formats", lambda device, x=support: {"bf16": x})
        found.append(plan_choice.find_or_certify(source, CARD))
    assert found[0] == kept
    assert [x.precision for x in found[1].components] == [entry.precision, "fp32"]
    assert found[1].components[1].reason.startswith("No rule. The weights are stored in bf16.")
    assert files.seal_plan(found[1]) == found[1]
