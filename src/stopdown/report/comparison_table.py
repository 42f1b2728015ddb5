"""A comparison as text for a terminal; of each measure the worst over the prompts."""

from __future__ import annotations

from stopdown.comparison.records import Comparison, Variant
from stopdown.comparison.verdicts import pick_cells
from stopdown.report import figures, formats
from stopdown.report.pages import SIGNS, WORDS

_HEADINGS = ("precision", "verdict", "PSNR", "SSIM", "FLIP", "time", "headroom")


def list_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """One row of text for each precision, the headings first."""
    return [_HEADINGS, *(_describe(variant, comparison) for variant in comparison.variants)]


def _describe(variant: Variant, comparison: Comparison) -> tuple[str, ...]:
    cells = pick_cells(comparison.rows, variant.name)
    psnr = figures.summarise_measure(cells, "psnr_db")
    return (
        variant.name,
        f"{SIGNS[variant.verdict]} {WORDS[variant.verdict]}",
        formats.format_number(psnr[1], 1),
        formats.format_number(figures.summarise_measure(cells, "ssim")[1], 4),
        formats.format_number(figures.summarise_measure(cells, "flip")[1], 3),
        formats.format_ratio(variant.time_ratios.get("all")),
        formats.format_bits(figures.find_tightest(cells)[0]),
    )


def list_notes(comparison: Comparison) -> list[str]:
    """The verdict, its reasons and what was not run, in whole sentences."""
    notes = [comparison.headline, comparison.reference_reason]
    notes += [f"{variant.name}: {' '.join(variant.reasons)}" for variant in comparison.variants]
    notes += comparison.reasons
    notes += [f"Line {x.line} of the prompts was not run: {x.reason}" for x in comparison.bad_lines]
    for row in comparison.rows:
        notes += [
            f"{cell.precision} did not run on line {row.line}: {cell.error}"
            for cell in row.cells
            if cell.error
        ]
    return list(dict.fromkeys(notes))
