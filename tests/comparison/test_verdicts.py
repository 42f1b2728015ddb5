"""From measures and limits to a word, its reasons and a choice."""

from __future__ import annotations

from typing import Any

import pytest

from stopdown.comparison.records import Cell, Thresholds, Variant
from stopdown.comparison.verdicts import (
    choose_reference,
    is_sound,
    judge_cell,
    judge_variant,
    rank_precisions,
)
from stopdown.records import Finding


def make_cell(precision: str, **facts: Any) -> Cell:
    return Cell(precision, **facts)


def test_precisions_are_ranked_from_the_most_precise() -> None:
    """Plans and lists by component count as fp16; a model with a clamp of its own is best as it was."""
    names = ["clamp", "fp16-plain", "plan.json", "bf16", "fp32", "a=bf16"]
    assert rank_precisions(names, needs_clamp=False) == [
        "fp32", "plan.json", "a=bf16", "bf16", "fp16-plain", "clamp",
    ]  # fmt: skip
    assert rank_precisions(["fp32", "bf16", "fp16-plain"], needs_clamp=True)[0] == "fp16-plain"


def test_the_reference_is_the_most_precise_that_is_sound() -> None:
    """An error, a value that is not finite and a finding each make a run unsound."""
    good = make_cell("bf16")
    bad = [
        make_cell("fp32", error="it failed"),
        make_cell("fp32", non_finite=3),
        make_cell("fp32", findings=(Finding("black-frames", "output", "", ""),)),
    ]
    assert is_sound(good)
    for cell in bad:
        assert not is_sound(cell)
        assert choose_reference([cell, good], ["fp32", "bf16"]) == "bf16"
    assert choose_reference(bad[:1], ["fp32", "bf16"]) == "fp32"


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"error": "it failed"}, "failed"),
        ({"non_finite": 3}, "broken"),
        ({"findings": (Finding("black-frames", "output", "", ""),)}, "broken"),
        ({}, "other"),
    ],
)
def test_a_cell_is_judged_by_its_worst(facts: dict[str, Any], verdict: str) -> None:
    """Each verdict has a reason; the reference is itself."""
    reference = make_cell("fp32")
    found = judge_cell(make_cell("fp16", **facts), reference, Thresholds())
    assert found.verdict == verdict
    assert found.reasons
    assert judge_cell(reference, reference, Thresholds()).verdict == "reference"


@pytest.mark.parametrize(
    ("error", "reason"), [("", "Nothing was run."), ("It failed.", "It failed.")]
)
def test_a_precision_without_a_run_has_failed_for_a_reason(error: str, reason: str) -> None:
    """Of no prompt at all there is no error either."""
    found = judge_variant(Variant("fp16", "everything in fp16", error=error), [])
    assert (found.verdict, found.reasons) == ("failed", (reason,))
