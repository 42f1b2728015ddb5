"""Implementation of `stopdown bench`: measure each precision on this device, for a report in an issue."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from stopdown.app.display import load_libraries
from stopdown.app.flags import CommandOptions, DeviceOption
from stopdown.app.request_options import refuse_unknown_device
from stopdown.devices.device_choice import choose_device
from stopdown.pipelines.requests import Request
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import resolve_source


@dataclass(frozen=True)
class BenchOptions(CommandOptions):
    """Measure time, memory and error of each precision on this device.

    Prints a report for the issue form "Report your card". It contains no user names, host names or
    paths. Takes about five minutes, and needs no download.

    Examples:
      stopdown bench
      stopdown bench --minutes 3
    """

    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Model to run in addition to the synthetic one."),
    ] = "shapes"
    device: DeviceOption = "auto"
    minutes: Annotated[float, typer.Option(help="Stop after about this many minutes.")] = 5.0


def run_bench_command(options: BenchOptions) -> int:
    """Measure models in each precision and print the report; return 1 if a measurement failed."""
    from stopdown.app.progress import open_display, print_result

    refuse_unknown_device(options.device)
    with open_display(options) as display:
        load_libraries(display)
        from stopdown.bench import list_subjects, measure_models, render
        from stopdown.pipelines.loader import complete_source

        source = resolve_source(options.source)
        verify_source(source)
        device = choose_device(options.device)
        subjects = list_subjects(complete_source(source), device, Request(steps=2))
        report = measure_models(device, subjects, options.minutes, display.progress)
    print_result(options, report, lambda _: sys.stdout.write(render(report)))
    return 1 if any(row.note for row in report.rows) else 0
