"""From measures and limits to a word, its reasons and a choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from models.comparisons import make_comparison
from stopdown.comparison.records import Cell, Measures, Thresholds, Variant
from stopdown.comparison.verdicts import (
    choose_reference,
    is_sound,
    judge_cell,
    judge_variant,
    rank_precisions,
    recommend,
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


GOOD = Measures(False, 0.01, 40.0, 0.99, 0.02, 0.01)


def test_each_limit_is_found() -> None:
    """A measure beyond its limit makes another picture and is named; one within does not."""
    reference = Cell("fp32")
    cell = Cell("bf16", measures=GOOD)
    assert judge_cell(cell, reference, Thresholds()).verdict == "same"
    limits = {"psnr_db": 41.0, "ssim": 0.995, "flip": 0.01, "flicker": 0.001}
    for name, limit in limits.items():
        asked = dataclasses.replace(Thresholds(), **{name: limit})
        judged = judge_cell(cell, reference, asked)
        assert judged.verdict == "other", name
        assert f"the limit of {limit:g}" in judged.reasons[0]


def test_each_break_is_found() -> None:
    """NaN and frames that the reference does not have make a cell broken; an error makes it failed."""
    reference, black = Cell("fp32"), Finding("black-frames", "frames", "All black.", "")
    assert judge_cell(Cell("x", non_finite=1), reference, Thresholds()).verdict == "broken"
    assert judge_cell(Cell("x", findings=(black,)), reference, Thresholds()).verdict == "broken"
    assert judge_cell(Cell("x", error="gone"), reference, Thresholds()).reasons == ("gone",)
    dark = Cell("fp32", findings=(black,))  # a night scene: the reference is as dark
    cell = Cell("x", findings=(black,), measures=GOOD)
    assert judge_cell(cell, dark, Thresholds()).verdict == "same"


def test_fp32_comes_before_rescaled_fp16_and_that_before_bf16() -> None:
    """fp32 before rescaled fp16 before bf16; what is broken is passed over."""
    names = ["bf16", "fp16-plain", "clamp", "plan.json", "fp32", "autocast"]
    ranked = rank_precisions(names, needs_clamp=False)
    assert ranked == ["fp32", "autocast", "plan.json", "bf16", "fp16-plain", "clamp"]
    cells = [Cell("bf16"), Cell("autocast", non_finite=3), Cell("plan.json")]
    assert choose_reference(cells, ranked) == "plan.json"
    assert choose_reference([Cell("bf16", error="gone")], ["bf16"]) == "bf16"


def test_a_model_that_needs_its_clamp_is_judged_in_fp16() -> None:
    """Where a clamp is part of the model, fp32 without it is not the reference."""
    ranked = rank_precisions(["fp32", "bf16", "fp16-plain"], needs_clamp=True)
    assert (
        choose_reference([Cell("fp32"), Cell("bf16"), Cell("fp16-plain")], ranked) == "fp16-plain"
    )


def test_the_fastest_of_the_same_pictures_is_recommended() -> None:
    """Broken precisions are never recommended, however fast they are."""
    made = make_comparison()
    times = {"fp32": 1.0, "bf16": 0.5, "fp16-plain": 0.1, "fp16": 0.25}
    variants = [dataclasses.replace(v, time_ratios={"all": times[v.name]}) for v in made.variants]
    best, headline = recommend(variants, "cpu")
    assert best == "fp16"
    verdict = "bf16 and fp16 give the same pictures as fp32; fp16-plain is broken."
    assert headline == f"{verdict} Use fp16 on cpu: it takes 0.25 times as long as fp32."
    slow = [dataclasses.replace(x, time_ratios={"all": 1.0 + (x.name != "fp32")}) for x in variants]
    assert recommend(slow, "cpu") == (
        "fp32",
        f"{verdict} Use fp32 on cpu: nothing that gives the same pictures is faster.",
    )
    none, said = recommend([v for v in variants if v.name == "fp16-plain"], "cpu")
    assert none is None
    assert said.startswith("None of these precisions")


def test_too_few_prompts_compare_no_times() -> None:
    """A single time would call any of them the fastest; the smallest weights are the same in every run."""
    sizes, verdict = {"fp32": 4, "bf16": 2, "fp16-plain": 2, "fp16": 3}, "bf16 and fp16 give"
    variants = [
        dataclasses.replace(
            v, time_ratios={"all": 1.0 + (v.name != "fp32")}, weights_bytes=sizes[v.name]
        )
        for v in make_comparison().variants
    ]
    for prompts in (1, 2):
        best, headline = recommend(variants, "cpu", prompts=prompts)
        assert best == "bf16"
        assert headline.startswith(verdict)
        assert headline.endswith(
            " Use bf16 on cpu: its weights take half the memory of fp32's. To find out which is fastest, "
            "compare at least 3 prompts."
        )
    alone = [v for v in variants if v.name == "fp32"]
    assert recommend(alone, "cpu", prompts=1) == ("fp32", "Use fp32 on cpu.")


def test_a_broken_run_has_no_time() -> None:
    """The table has a dash for it: the search for its first NaN is part of its time."""
    made = make_comparison()
    ratios = {variant.name: variant.time_ratios for variant in made.variants}
    assert ratios["fp16-plain"] == {}
    assert ratios["fp16"] == {"denoise": 2.0, "all": 2.0}
    times = {row[0]: row[5] for row in made.summarise().rows}
    assert times == {"fp32": "1.00×", "bf16": "2.00×", "fp16-plain": "–", "fp16": "2.00×"}


def test_a_failed_cell_fails_its_precision_alone() -> None:
    """One prompt that did not run stands in its place; the other precisions keep their verdicts."""
    made = make_comparison(3, error="MemoryError: no room")
    verdicts = {v.name: v.verdict for v in made.variants}
    assert verdicts == {
        "fp32": "reference",
        "bf16": "failed",
        "fp16-plain": "broken",
        "fp16": "same",
    }
    bf16 = next(v for v in made.variants if v.name == "bf16")
    assert bf16.reasons[0] == "Of 3 prompts: 2 the same picture, 1 didn't run."
    assert "fp16 is closer to the reference than bf16 on 3 of 3 prompts." in made.reasons
