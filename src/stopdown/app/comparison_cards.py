"""A record on the terminal: the table of a comparison, or the card of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console
from rich.text import Text

from stopdown.app.cards import print_card
from stopdown.app.progress import make_table
from stopdown.comparison.records import Comparison
from stopdown.records import RunRecord

_STYLES = {"broken": "red", "failed": "red", "other": "yellow", "same": "green"}


def print_record(record: Comparison | RunRecord, page: Path, console: Console) -> None:
    if isinstance(record, RunRecord):
        print_card(record, console, is_new=False)
        console.print(f"Written: {page}", soft_wrap=True, highlight=False)
        return

    summary = record.summarise()
    table = make_table(*summary.headings, right=summary.headings[2:], no_wrap=True)
    for variant, row in zip(record.variants, summary.rows, strict=True):
        table.add_row(row[0], Text(row[1], style=_STYLES.get(variant.verdict, "")), *row[2:])
    console.print(table)
    for index, note in enumerate(summary.list_sentences()):
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
