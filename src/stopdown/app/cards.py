"""Printing of records in the terminal: a card for a run, a table for a comparison."""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from stopdown.app.progress import make_table
from stopdown.comparison.records import Comparison
from stopdown.records import RunRecord


def print_card(record: RunRecord, console: Console, *, page: Path | None = None) -> None:
    """Print the verdict, the next command, and a card with precisions, reasons, time and memory.

    Args:
        page: HTML page that was just made from the record of an earlier run; None right after a run.
    """
    is_new = page is None
    said = f"Wrote {record.output} in {record.elapsed_s:.1f} s" if is_new else record.output
    console.print(f"{said}: {record.verdict}", style="bold", soft_wrap=True, highlight=False)
    command = "explain" if record.findings else "report"
    then = f"→ stopdown {command} {shlex.quote(record.output)}" if is_new else f"Wrote {page}"
    console.print(f"{then}\n", soft_wrap=True, highlight=False)
    summary = record.summarise()
    table = make_table(*summary.headings, right=summary.headings[3:], no_wrap=True)
    for row in summary.rows:
        table.add_row(*row)
    parts: list[RenderableType] = [table]
    parts += [
        Text.assemble(("\n" + names, "bold"), f": {reason}")
        for names, reason in record.list_reasons()
    ]
    costs = [_wrap_cost(name, said, console.width - 4) for name, said in record.list_costs()]
    parts += [Text(), Text("\n".join(costs))]
    limits = "".join(f"\n{line}" for line in record.list_limits())
    parts += [Text(limits)] if limits else []
    repairs = "".join(f"\nrepaired  {line}" for line in record.list_repairs())
    parts += [Text(repairs, style="yellow")] if repairs else []
    parts += [Text(f"journal {record.journal.describe()}")] if record.journal else []
    found = "".join(f"\n{f.kind}: {f.evidence} {f.remedy}" for f in record.findings)
    parts += [Text(found, style="yellow")] if found else []
    title = Text(f"{record.pipeline} on {record.device}")
    console.print(Panel(Group(*parts), title=title, title_align="left", expand=False))


def _wrap_cost(name: str, said: str, width: int) -> str:
    """Break a line of costs into lines below each other, with each number beside its unit."""
    joined = re.sub(r"(?<=\d) (?=m?s\b|[KMG]iB\b)", _JOINED, said)
    lines = textwrap.wrap(joined, width - _NAME, break_on_hyphens=False)
    return f"{name:<{_NAME}}" + f"\n{'':{_NAME}}".join(lines).replace(_JOINED, " ")


_NAME, _JOINED = 8, "\N{NO-BREAK SPACE}"
_STYLES = {"broken": "red", "failed": "red", "other": "yellow", "same": "green"}


def print_record(record: Comparison | RunRecord, page: Path, console: Console) -> None:
    if isinstance(record, RunRecord):
        print_card(record, console, page=page)
        return

    summary = record.summarise()
    verdict, *notes = summary.list_sentences()
    console.print(Text(verdict, style="bold"), soft_wrap=True)
    console.print(f"Wrote {page}\n", soft_wrap=True, highlight=False)
    table = make_table(*summary.headings, right=summary.headings[2:], no_wrap=True)
    for variant, row in zip(record.variants, summary.rows, strict=True):
        table.add_row(row[0], Text(row[1], style=_STYLES.get(variant.verdict, "")), *row[2:])
    console.print(table)
    for index, note in enumerate(notes):
        console.print(Text(note if index else f"\n{note}"), soft_wrap=True)


def strip_pictures(record: Comparison | RunRecord) -> Comparison | RunRecord:
    """Return a comparison without its frames, which remain in the file; other records are unchanged."""
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
