"""Records of a comparison: to JSON and back, and the figures that pages show."""

from __future__ import annotations

import math
from typing import Any

import pytest

from models.comparisons import make_comparison
from stopdown.comparison.records import (
    SPOILT,
    Cell,
    Comparison,
    Measures,
    count_bits,
    find_median,
    find_tightest,
    format_bits,
    format_number,
    format_ratio,
    list_bits,
    summarise_measure,
)
from stopdown.records import from_json, to_json


def test_a_comparison_survives_json() -> None:
    """A record comes back from its JSON unchanged."""
    made = make_comparison()
    assert from_json(to_json(made), Comparison) == made


def test_headroom_is_counted_in_bits() -> None:
    """An eighth of the largest value leaves three bits; zero has none, and NaN and Inf are marked."""
    assert count_bits(65504 / 8) == pytest.approx(3.0)
    assert count_bits(65504 * 2) == pytest.approx(-1.0)
    assert count_bits(0.0) is None
    assert count_bits(math.nan) == count_bits(math.inf) == count_bits(None) == SPOILT


def test_headroom_is_listed_by_block_and_step() -> None:
    """Each block has a place for each step that any had; a call outside of steps counts as the first."""
    seen = {("a", 0): 65504.0, ("a", 2): 32752.0, ("b", 2): math.inf, ("c", None): 16376.0}
    assert list_bits(seen) == {"a": (0.0, 1.0), "b": (None, SPOILT), "c": (2.0, None)}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (format_ratio(0.638), "0.64×"),
        (format_ratio(310.2), "310×"),
        (format_ratio(None), "–"),
        (format_ratio(math.inf), "–"),
        (format_number(1.005, 1), "1.0"),
        (format_number(math.nan), "–"),
        (format_bits(4.12), "4.1"),
        (format_bits(-1.9), "−1.9"),
        (format_bits(SPOILT), "not finite"),
        (format_bits(None), "–"),
    ],
)
def test_figures_are_words(said: str, words: str) -> None:
    """What is unknown is a dash, and a minus is no hyphen."""
    assert said == words


def make_cell(psnr_db: float | None, flip: float | None, **changes: Any) -> Cell:
    return Cell("fp16", measures=Measures(False, 0.0, psnr_db, 0.9, flip, 0.0), **changes)


def test_the_worst_of_a_measure_is_low_for_psnr_and_high_for_errors() -> None:
    """Cells without the measure don't count; without any there is neither median nor worst."""
    cells = [make_cell(40.0, 0.1), make_cell(30.0, 0.4), make_cell(35.0, None), Cell("fp16")]
    assert summarise_measure(cells, "psnr_db") == (35.0, 30.0)
    assert summarise_measure(cells, "flip") == (0.25, 0.4)
    assert summarise_measure(cells[3:], "flip") == (None, None)
    assert find_median([None, 3.0, 1.0, 2.0]) == 2.0


def test_an_identical_picture_counts_in_the_median() -> None:
    """Its PSNR is infinite: two of three prompts like that are typical, and the third is the worst."""
    same = Cell("fp16", measures=Measures(True, 0.0, None, 1.0, 0.0, 0.0))
    assert summarise_measure([same, make_cell(40.0, 0.1), same], "psnr_db") == (math.inf, 40.0)
    assert format_number(math.inf, 1) == "∞"


def test_the_tightest_prompt_counts() -> None:
    """A prompt that ran without a known headroom had NaN or Inf; one that didn't run says nothing."""
    cells = [
        make_cell(1.0, 0.0, headroom_bits=3.0, tightest="a"),
        make_cell(1.0, 0.0, headroom_bits=-1.0, tightest="b"),
        Cell("fp16", error="no room"),
    ]
    assert find_tightest(cells) == (-1.0, "b")
    assert find_tightest([*cells, make_cell(1.0, 0.0, tightest="c")]) == (SPOILT, "c")
    assert find_tightest([*cells, make_cell(1.0, 0.0)]) == (-1.0, "b")  # it has no blocks
    assert find_tightest([make_cell(1.0, 0.0)]) == (None, "")
    assert find_tightest(cells[2:]) == (None, "")
