"""`stopdown export`: what a plan holds in the form that other programs take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stopdown.app.flags import CommandOptions, ForceOption
from stopdown.errors import OptionError
from stopdown.outputs import check_target, written_beside


@dataclass(frozen=True)
class ExportOptions(CommandOptions):
    """Write a plan's exponents in the form that another program takes.

    --scales is the table of powers of two by layer: of input, weight and output.

    Examples:
      stopdown plan shapes -o plan.json
      stopdown export plan.json --scales
      stopdown export plan.json --scales scales.h
    """

    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="The plan whose exponents are written: plan.json."),
    ]
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            help="File to write: .txt, .json, .h (C) or .py. Without it the table is printed.",
        ),
    ] = None
    scales: Annotated[
        bool, typer.Option("--scales", help="The table of powers of two by layer.")
    ] = False
    force: ForceOption = False
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False


def main(options: ExportOptions) -> int:
    """Run the command; the table is printed, or the name of the file that was written."""
    text = export(options)
    sys.stdout.write(f"{options.output}\n" if options.output is not None else text)
    return 0


def export(options: ExportOptions) -> str:
    """The table; it is written where a file is named.

    Raises:
        OptionError: nothing is asked for, or the name of the file has another ending.
        PlanError: the plan is damaged, or has no exponents.
        OutputError: the file cannot be written.
    """
    if not options.scales:
        raise OptionError(
            "Nothing was said of what to export.",
            remedy=f"Write: stopdown export {options.plan} --scales",
        )
    from stopdown.plans.plan_files import read_plan
    from stopdown.plans.scale_table import FORMATS, write_table

    ending = "json" if options.json else "txt"
    if options.output is not None:
        ending = options.output.suffix.lower().removeprefix(".")
        if ending not in FORMATS:
            raise OptionError(
                f"OUT {options.output} ends in no known format.",
                expected=f"Known are {', '.join(f'.{x}' for x in FORMATS)}.",
                remedy=f"Write for example {options.output.with_suffix('.h')}.",
            )
        check_target(options.output, option="as OUT", force=options.force, inputs=[options.plan])
    text = write_table(read_plan(options.plan), ending)
    if options.output is not None:
        with written_beside(options.output, option="as OUT") as part:
            part.write_text(text, encoding="utf-8")
    return text
