"""The fault matrix: found at the right module path, repaired, and one call run again.

With the detector off it is not so.
"""

from __future__ import annotations

import pytest

from models.fault_cases import (
    COMPONENTS,
    SCHEDULERS,
    Case,
    check,
    list_all,
    list_covering,
    list_repairing,
    run_case,
)

COVERING = list_covering()
ONE_OF_EACH = tuple({(case.kind, case.lasting): case for case in COVERING}.values())
"""A case of each kind, passing and lasting: there is one detector to switch off, whatever the component."""

QUICK = {*ONE_OF_EACH, *COVERING[::3]}
"""What the default run takes: every pipeline and kind, and a third of the schedulers and components."""

# KDPM2 schedulers take a square root of a tensor through NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    "case",
    [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in COVERING],
    ids=str,
)
def test_a_fault_is_found_and_repaired(case: Case) -> None:
    """At the right module path and step, with one call run again, and the right pixels at the end."""
    check(case, run_case(case))


def check_switched_off(case: Case) -> None:
    """With the detector off the very same check fails, and the fault is in the pixels."""
    outcome = run_case(case, watching=False)
    assert outcome.repairs == ()
    assert not outcome.is_equal
    with pytest.raises((AssertionError, ValueError)):
        check(case, outcome)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_switched_off_it_is_not(case: Case) -> None:
    """With the detector off a fault of each kind is neither found nor repaired."""
    check_switched_off(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [x for x in COVERING if x not in ONE_OF_EACH], ids=str)
def test_switched_off_no_other_is(case: Case) -> None:
    """The same for the rest."""
    check_switched_off(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", list_repairing(), ids=str)
def test_a_fault_of_range_is_repaired(case: Case) -> None:
    """Overflow and saturation are mended by exponents wherever they can happen."""
    check(case, run_case(case))


def test_the_covering_set_covers() -> None:
    """No kind, component, scheduler, pipeline or moment is left out."""
    parts = {"text_encoder", "transformer", "vae.encode", "vae.decode"}
    pairs = {(c.kind, c.component) for c in COVERING}
    kinds = {"nan", "inf", "row", "frame", "clamp"}
    assert {(kind, part) for kind in kinds for part in parts} <= pairs
    assert {c.scheduler for c in COVERING} >= {s for found in SCHEDULERS.values() for s in found}
    named = {(name, part) for name, found in COMPONENTS.items() for part in found}
    assert named <= {(c.pipeline, c.component) for c in COVERING}
    assert {c.moment for c in COVERING} == {"first", "middle", "last"}
    assert {c.kind for c in ONE_OF_EACH} == {c.kind for c in COVERING}
    assert {c.pipeline for c in QUICK} == {c.pipeline for c in COVERING}
    assert {c.moment for c in QUICK} == {c.moment for c in COVERING}
    assert parts <= {c.component for c in QUICK}
    repaired = {(c.kind, c.component) for c in list_repairing()}
    assert {(kind, part) for kind in ("range", "clamp") for part in parts} <= repaired
    assert len(list_all()) > 300
