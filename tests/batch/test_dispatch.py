"""Versions of a batch's plan: repairs of several workers merged, written and read again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from stopdown.batch.dispatch import PlanVersions, read_versions
from stopdown.plans.plan_files import read_class_versions, seal_plan
from stopdown.records import ComponentPlan, Plan

BASE = seal_plan(
    Plan(
        "shapes",
        "f" * 64,
        "Tiny",
        "fp16",
        read_class_versions(),
        (ComponentPlan("unet", precision="fp16"), ComponentPlan("vae", precision="fp16")),
        "cpu",
        0.0,
    )
)


def repair(plan: Plan, **precisions: str) -> Plan:
    """The plan with some components in another precision, as a repair leaves it."""
    entries = tuple(
        dataclasses.replace(x, precision=precisions.get(x.component, x.precision))
        for x in plan.components
    )
    return seal_plan(dataclasses.replace(plan, components=entries))


def name_precisions(plan: Plan | None) -> dict[str, str]:
    assert plan is not None
    return {x.component: x.precision for x in plan.components}


def test_repairs_of_two_workers_are_in_one_plan(tmp_path: Path) -> None:
    """Both were made with the first version; of one component the first repair stays."""
    versions = PlanVersions(tmp_path, BASE, [])
    assert versions.current == BASE
    assert versions.offer(BASE.seal, repair(BASE, unet="fp32"))
    assert versions.offer(BASE.seal, repair(BASE, vae="bf16"))
    assert name_precisions(versions.current) == {"unet": "fp32", "vae": "bf16"}
    assert not versions.offer(BASE.seal, repair(BASE, unet="bf16"))
    assert not versions.offer(BASE.seal, BASE)
    assert len({x.seal for x in versions.plans}) == len(versions.plans) == 3


def test_a_repair_of_a_plan_that_is_none_of_these_is_left(tmp_path: Path) -> None:
    """And a batch without a plan has no versions."""
    versions = PlanVersions(tmp_path, BASE, [])
    assert not versions.offer("0" * 64, repair(BASE, unet="fp32"))
    bare = PlanVersions(tmp_path / "none", None, [])
    assert bare.current is None
    assert not bare.offer(BASE.seal, repair(BASE, unet="fp32"))


def test_versions_are_read_in_their_order(tmp_path: Path) -> None:
    """Ten and more of them; a damaged file and one of another name are passed over."""
    versions = PlanVersions(tmp_path, BASE, [])
    for number in range(11):
        latest = versions.plans[-1]
        first, *rest = latest.components
        noted = dataclasses.replace(first, reasons=(f"Repair {number}.",))
        made = seal_plan(dataclasses.replace(latest, components=(noted, *rest)))
        assert versions.offer(latest.seal, made)
    names = {x.name for x in tmp_path.iterdir()}
    assert len(names) == 12
    (tmp_path / "plan-000000000000-0.json").write_text("{")
    (tmp_path / "plan.json").write_text("{}")
    (chain,) = read_versions(tmp_path, {x.name for x in tmp_path.iterdir()})
    assert [x.seal for x in chain] == [x.seal for x in versions.plans]


def test_a_batch_goes_on_with_the_latest_version(tmp_path: Path) -> None:
    """Where the first is its own plan; another plan begins a chain beside it."""
    before = PlanVersions(tmp_path, BASE, [])
    before.offer(BASE.seal, repair(BASE, unet="fp32"))
    known = read_versions(tmp_path, {x.name for x in tmp_path.iterdir()})
    again = PlanVersions(tmp_path, BASE, known)
    assert again.current is not None
    assert again.current.seal == before.plans[-1].seal
    other = PlanVersions(tmp_path, repair(BASE, vae="bf16"), known)
    assert name_precisions(other.current) == {"unet": "fp16", "vae": "bf16"}
    assert len(list(tmp_path.iterdir())) == 3
