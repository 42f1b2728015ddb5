"""`stopdown export`: what a plan holds in the form that other programs take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from stopdown.app.display import Display, load_libraries
from stopdown.app.flags import ConfigOption, SizeOptions
from stopdown.pipelines.requests import Request
from stopdown.plans.plan_files import read_plan
from stopdown.sources.sources import resolve_source, verify_source


@dataclass(frozen=True)
class ExportOptions(SizeOptions):
    """Export a plan's components as ONNX or OpenVINO graphs.

    The graphs contain the exponents.

    Examples:
      stopdown plan shapes -o plan.json
      stopdown export plan.json shapes-onnx --to onnx --component transformer
    """

    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="Plan whose exponents to export: plan.json."),
    ]
    output: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="New folder to write."),
    ]
    to: Annotated[
        Literal["onnx", "openvino"],
        typer.Option(help="Format of the graphs: ONNX or OpenVINO IR."),
    ]
    component: Annotated[
        tuple[str, ...],
        typer.Option(help="Component to export. Repeat for several. By default all."),
    ] = ()
    source: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="The model, if it is not where the plan says."),
    ] = None
    config: ConfigOption = None


def main(options: ExportOptions) -> int:
    """Run the command; print the names of the files that were written."""
    from stopdown.app.progress import open_display

    with open_display(options) as display:
        written = export(options, display)
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


def export(options: ExportOptions, display: Display) -> list[Path]:
    """Export the components of a plan; return the files that were written, one for each call."""
    plan = read_plan(options.plan)
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
