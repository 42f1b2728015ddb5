"""`stopdown convert`, as a plain function: options in, files and record out, and the summary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stopdown.app.plan_command import PlanOptions
from stopdown.app.request_options import read_request
from stopdown.number_formats import list_some

if TYPE_CHECKING:
    from rich.console import Console

    from stopdown.app.generate_command import Display
    from stopdown.records import Conversion, ConvertedComponent


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `stopdown convert`.

    Attributes:
        output: folder to write, or `.safetensors` file.
        plan: path of the plan.
        runs: the source, and how it is run where exponents are found anew.
        leave: components that are written as they are stored.
        allow_eps: write whatever unwritten eps change.
        force: replace a converted model.
    """

    output: Path
    plan: Path
    runs: PlanOptions
    leave: tuple[str, ...] = ()
    allow_eps: bool = False
    force: bool = False


def convert(options: ConvertOptions, display: Display) -> Conversion:
    """Write a checkpoint as its plan says, for programs without Stopdown.

    Raises:
        StopdownError: anything that went wrong, with what to type; no output is left.
    """
    request = read_request(options.runs)
    from stopdown.checkpoints import convert as convert_module
    from stopdown.pipelines.sources import resolve_source

    source = resolve_source(
        options.runs.source,
        revision=options.runs.revision,
        progress=lambda what, done, total: display.progress("download", what, done, total),
    )
    return convert_module.convert(
        source,
        options.output,
        options.plan,
        leave=options.leave,
        allow_eps=options.allow_eps,
        force=options.force,
        device=options.runs.device or "cpu",
        request=request,
        config=options.runs.config,
        progress=display.progress,
    )


def print_conversion(made: Conversion, console: Console) -> None:
    """Print one line for each component, the reasons below, and how to load what was written."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("component", "written in", "tensors", "fields", "eps left", "effect"):
        table.add_column(heading)
    for entry in made.components:
        table.add_row(*_describe_row(entry))
    console.print(table)
    for entry in made.components:
        reasons = " ".join(entry.reasons)
        console.print(Text.assemble((f"\n{entry.component}", "bold"), f": {reasons}"))
    lines = [f"Written: {made.output} in {made.elapsed_s:.1f} s. Load it: {made.load}"]
    if made.unread:
        lines.insert(
            0, f"Copied, because Diffusers does not read them: {list_some(made.unread, 5)}."
        )
    for line in ["", *lines]:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _shorten(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _describe_row(entry: ConvertedComponent) -> tuple[str, ...]:
    return (
        entry.component,
        entry.precision,
        str(entry.folded) if entry.precision == "fp16" else "",
        ", ".join(f"{name}={_shorten(value)}" for name, value in entry.fields.items()),
        str(len(entry.eps_left)) if entry.eps_left else "",
        f"{entry.effect:.1e}" if entry.eps_left else "",
    )
