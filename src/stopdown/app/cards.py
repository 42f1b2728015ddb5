"""A run's record as a card in the terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stopdown.app.progress import make_table
from stopdown.number_formats import format_bytes
from stopdown.records import JournalUse, RunRecord

_STAGES = ("prepare", "load", "place", "encode", "denoise", "decode", "other", "write")


def print_card(record: RunRecord, console: Console, *, is_new: bool = True) -> None:
    """Print what each component really ran in and why, time by stage, memory and faults.

    Args:
        is_new: the output was written just now; a card that is shown again says what it is of.
    """
    parts: list[RenderableType] = [_make_components(record), *_make_reasons(record)]
    parts += [Text(), _make_costs(record)]
    parts += [_make_room(record)] if record.strategy else []
    parts += [_make_repairs(record)] if record.repairs else []
    parts += [_make_journal(record.journal)] if record.journal else []
    found = "".join(f"\n{f.kind}: {f.evidence} {f.remedy}" for f in record.findings)
    parts += [Text(found, style="yellow")] if found else []
    title = Text(f"{record.pipeline} on {record.device}")
    console.print(Panel(Group(*parts), title=title, title_align="left", expand=False))
    said = "Written" if is_new else "The card of"
    console.print(f"{said}: {record.output}", soft_wrap=True, highlight=False)


def _make_components(record: RunRecord) -> Table:
    numbers = ("calls", "seconds", "NaN/Inf")
    headings = ("component", "stored", "ran in", *numbers)
    table = make_table(*headings, right=numbers, no_wrap=True)
    stored = {decision.component: decision.stored or "?" for decision in record.decisions}
    for call in record.calls:
        table.add_row(
            call.component,
            stored.get(call.component, "?"),
            " + ".join(call.precisions),
            str(call.calls),
            f"{call.elapsed_s:.1f}",
            str(call.non_finite),
        )
    return table


def _make_reasons(record: RunRecord) -> list[RenderableType]:
    """Each reason once, under the components that it holds for."""
    called = {call.component for call in record.calls}
    grouped: dict[str, list[str]] = {}
    for decision in record.decisions:
        if decision.component in called:
            grouped.setdefault(decision.reason, []).append(decision.component)
    return [
        Text.assemble(("\n" + ", ".join(names), "bold"), f": {reason}")
        for reason, names in grouped.items()
    ]


def _make_costs(record: RunRecord) -> Text:
    shown = [name for name in _STAGES if name in record.stages_s]
    times = ", ".join(f"{name} {record.stages_s[name]:.1f}" for name in shown)
    spread = f"\nspread  {record.parallel}" if record.parallel else ""
    return Text(
        f"time    {record.elapsed_s:.1f} s ({times}; of these Stopdown's own {record.own_s:.3f})\n"
        f"memory  {format_bytes(record.peak_bytes)} ({record.peak_source}){spread}"
    )


def _make_room(record: RunRecord) -> Text:
    """How the run stayed within its memory, and which calls were run again for it."""
    limit = record.request.get("memory") or "auto"
    limit = "the device's memory" if limit == "auto" else limit
    lines = [f"\npredicted to fit in {limit}: {record.strategy}"]
    lines += [record.reduced.reason] if record.reduced else []
    lines += [
        f"{one.component} ran out of memory with {one.before}; run again with {one.after}"
        for one in record.steps_down
    ]
    return Text("\n".join(lines))


def _make_repairs(record: RunRecord) -> Text:
    lines = [
        f"\nrepaired  {x.module_path}: {x.action}, {x.replays} call run again, {x.elapsed_s:.1f} s. "
        f"{x.reason}"
        for x in record.repairs
    ]
    return Text("".join(lines), style="yellow")


def _make_journal(use: JournalUse) -> Text:
    known, made = (f"{n} call{'s' * (n != 1)}" for n in (use.answered, use.written))
    whose = ", ".join(f"{count} of {name}" for name, count in use.components.items())
    known += f" ({whose})" * bool(whose)
    size = format_bytes(use.bytes)
    notes = "".join(f" {note}" for note in use.notes)
    return Text(f"journal {known} answered from {use.folder}, {made} written ({size}).{notes}")
