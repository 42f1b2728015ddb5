"""A record on the terminal: the table of a comparison, or the card of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console
from rich.text import Text

from stopdown.app.cards import print_card
from stopdown.app.progress import make_table
from stopdown.comparison.records import WORDS, Comparison, Variant
from stopdown.comparison.verdicts import pick_cells
from stopdown.records import RunRecord
from stopdown.report import figures
from stopdown.report.pages import SIGNS

_STYLES = {"broken": "red", "failed": "red", "other": "yellow", "same": "green"}


def print_record(record: Comparison | RunRecord, page: Path, console: Console) -> None:
    if isinstance(record, RunRecord):
        print_card(record, console, is_new=False)
        console.print(f"Written: {page}", soft_wrap=True, highlight=False)
        return

    headings, *rows = list_rows(record)
    table = make_table(*headings, right=headings[2:], no_wrap=True)
    for variant, row in zip(record.variants, rows, strict=True):
        table.add_row(row[0], Text(row[1], style=_STYLES.get(variant.verdict, "")), *row[2:])
    console.print(table)
    for index, note in enumerate(list_notes(record)):
        style = "bold" if index == 0 else ""
        console.print(Text(f"\n{note}" if index < 2 else note, style=style), soft_wrap=True)
    console.print(f"\nWritten: {page}", soft_wrap=True, highlight=False)


def strip_pictures(record: Comparison | RunRecord) -> Comparison | RunRecord:
    """A comparison without its frames, which the file keeps."""
    if isinstance(record, RunRecord):
        return record
    rows = tuple(
        dataclasses.replace(
            row,
            cells=tuple(
                dataclasses.replace(cell, sheet=None, difference=None) for cell in row.cells
            ),
        )
        for row in record.rows
    )
    return dataclasses.replace(record, rows=rows)


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
        figures.format_number(psnr[1], 1),
        figures.format_number(figures.summarise_measure(cells, "ssim")[1], 4),
        figures.format_number(figures.summarise_measure(cells, "flip")[1], 3),
        figures.format_ratio(variant.time_ratios.get("all")),
        figures.format_bits(figures.find_tightest(cells)[0]),
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
