"""Plans as records: what a plan rests on, and what it shows of each component."""

from __future__ import annotations

import dataclasses

import pytest

from stopdown.records import ComponentPlan, Plan, Scaling, group_components

PLAN = Plan("model", components=(ComponentPlan("vae", precision="fp16"),))


@pytest.mark.parametrize(
    "changes",
    [
        {"seal": "0"},
        {"fingerprint": "0"},
        {"components": (ComponentPlan("vae", class_name="AutoencoderKL"),)},
    ],
)
def test_a_plan_that_rests_on_weights_is_not_bare(changes: dict[str, object]) -> None:
    """A seal, a fingerprint or a class is of one checkpoint; precisions alone apply to any."""
    assert PLAN.is_bare
    assert not dataclasses.replace(PLAN, **changes).is_bare  # type: ignore[arg-type]


def test_exponents_are_in_force_in_fp16_alone() -> None:
    """A component that runs in bf16 shows none, though its entry keeps them."""
    scaling = Scaling(exponents={"proj.weight": -3, "proj.bias": -3, "norm.weight[0:4]": 2})
    entry = ComponentPlan(
        "transformer", precision="fp16", scaling=scaling, reasons=("One.", "Two.")
    )
    plan = dataclasses.replace(PLAN, components=(entry,))
    assert plan.summarise().rows == (("transformer", "fp16", "3", "-3..2", "0", ""),)
    assert plan.summarise().notes == (("transformer", "One. Two."),)
    other = dataclasses.replace(entry, precision="bf16")
    assert other.in_force == Scaling()
    plan = dataclasses.replace(PLAN, components=(other,))
    assert plan.summarise().rows == (("transformer", "bf16", "0", "", "0", ""),)


def test_components_of_one_reason_are_named_together() -> None:
    """Each reason once, in the order of its first component."""
    named = [("vae", "a"), ("text_encoder", "b"), ("transformer", "a")]
    assert group_components(named) == [("vae, transformer", "a"), ("text_encoder", "b")]
