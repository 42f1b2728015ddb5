"""`stopdown export`: what a plan holds in the form that other programs take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from stopdown.app.display import Display, load_libraries
from stopdown.app.flags import ConfigOption, ForceOption, SizeOptions
from stopdown.errors import OptionError
from stopdown.export.scale_table import FORMATS, write_table
from stopdown.files.outputs import check_target, refuse_nameless, written_beside
from stopdown.pipelines.requests import Request
from stopdown.plans.plan_files import read_plan
from stopdown.sources.sources import resolve_source, verify_source


@dataclass(frozen=True)
class ExportOptions(SizeOptions):
    """Export a plan to a table, ONNX or OpenVINO.

    --scales exports the powers of two of the input, the weight and the output of each layer. --to
    exports the components as ONNX or OpenVINO graphs that contain the exponents.

    Examples:
      stopdown plan shapes -o plan.json
      stopdown export plan.json --scales
      stopdown export plan.json --scales scales.h
      stopdown export plan.json shapes-onnx --to onnx --component transformer
    """

    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="Plan whose exponents to export: plan.json."),
    ]
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            help="With --scales: file to write (.txt, .json, .h or .py); by default the table is "
            "printed. With --to: new folder to write.",
        ),
    ] = None
    scales: Annotated[
        bool, typer.Option("--scales", help="Export the table of powers of two for each layer.")
    ] = False
    to: Annotated[
        Literal["onnx", "openvino"] | None,
        typer.Option(help="Export components as ONNX or OpenVINO IR."),
    ] = None
    component: Annotated[
        tuple[str, ...],
        typer.Option(help="With --to: component to export. Repeat for several. By default all."),
    ] = ()
    source: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="With --to: the model, if it is not where the plan says."
        ),
    ] = None
    config: ConfigOption = None
    force: ForceOption = False


def main(options: ExportOptions) -> int:
    """Run the command; the table is printed, or the names of the files that were written."""
    from stopdown.app.progress import open_display

    if options.scales == (options.to is not None):
        raise OptionError(
            "Neither --scales nor --to was given."
            if options.to is None
            else "Both --scales and --to were given.",
            remedy=f"Write: stopdown export {options.plan} --scales",
        )
    if options.to is None:
        text = export_scales(options)
        sys.stdout.write(f"{options.output}\n" if options.output is not None else text)
        return 0
    with open_display(options) as display:
        written = export_graphs(options, display)
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


def export_graphs(options: ExportOptions, display: Display) -> list[Path]:
    """The files that were written, one for each call of a component."""
    plan = read_plan(options.plan)
    if options.output is None or options.to is None:
        raise OptionError(
            "--to was given without OUT.",
            expected="OUT is the folder that the graphs are written to.",
            remedy=f"Write: stopdown export {options.plan} FOLDER --to {options.to}",
        )
    source = resolve_source(
        options.source or plan.source, config=options.config, variant=options.variant
    )
    verify_source(source)
    load_libraries(display)
    from stopdown.export.onnx_openvino import export_plan

    request = Request(frames=options.frames, height=options.height, width=options.width)
    return export_plan(
        source,
        plan,
        options.output,
        form=options.to,
        components=options.component,
        request=request,
        progress=display.progress,
    )


def export_scales(options: ExportOptions) -> str:
    """The table; it is written where a file is named."""
    ending = "json" if options.json else "txt"
    if options.output is not None:
        refuse_nameless(options.output, "as OUT")
        ending = options.output.suffix.lower().removeprefix(".")
        if ending not in FORMATS:
            raise OptionError(
                f"OUT {options.output} ends in no known format.",
                expected=f"Known values are {', '.join(f'.{x}' for x in FORMATS)}.",
                remedy=f"Write for example {options.output.with_suffix('.h')}.",
            )
        check_target(options.output, option="as OUT", force=options.force, inputs=[options.plan])
    text = write_table(read_plan(options.plan), ending)
    if options.output is not None:
        with written_beside(options.output, option="as OUT") as part:
            part.write_text(text, encoding="utf-8")
    return text
