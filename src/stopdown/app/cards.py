"""A run's record as a card in the terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from stopdown.app.progress import make_table
from stopdown.records import RunRecord


def print_card(record: RunRecord, console: Console, *, is_new: bool = True) -> None:
    """Print what each component really ran in and why, time by stage, memory and faults.

    Args:
        is_new: the output was written just now; a card that is shown again says what it is of.
    """
    summary = record.summarise()
    table = make_table(*summary.headings, right=summary.headings[3:], no_wrap=True)
    for row in summary.rows:
        table.add_row(*row)
    parts: list[RenderableType] = [table]
    parts += [
        Text.assemble(("\n" + names, "bold"), f": {reason}")
        for names, reason in record.list_reasons()
    ]
    parts += [Text(), Text("\n".join(f"{name:<8}{said}" for name, said in record.list_costs()))]
    limits = "".join(f"\n{line}" for line in record.list_limits())
    parts += [Text(limits)] if limits else []
    repairs = "".join(f"\nrepaired  {line}" for line in record.list_repairs())
    parts += [Text(repairs, style="yellow")] if repairs else []
    parts += [Text(f"journal {record.journal.describe()}")] if record.journal else []
    found = "".join(f"\n{f.kind}: {f.evidence} {f.remedy}" for f in record.findings)
    parts += [Text(found, style="yellow")] if found else []
    title = Text(f"{record.pipeline} on {record.device}")
    console.print(Panel(Group(*parts), title=title, title_align="left", expand=False))
    said = "Written" if is_new else "The card of"
    console.print(f"{said}: {record.output}", soft_wrap=True, highlight=False)
