"""`stopdown plan`, as a plain function: options in, plan out, and the table that shows it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stopdown.app.display import Display, load_libraries
from stopdown.app.flags import (
    ForceOption,
    ModelOptions,
    PlanRunOptions,
    SourceArgument,
)
from stopdown.app.request_options import find_source
from stopdown.errors import OptionError
from stopdown.files.outputs import check_suffix, check_target, find_free
from stopdown.plans.plan_files import describe_no_plan, write_plan
from stopdown.plans.precision import check_components, parse_fp16
from stopdown.records import Plan, describe_other

if TYPE_CHECKING:
    from rich.console import Console


DEFAULT_OUTPUT = Path("plan.json")
"""Where a plan goes without -o; it replaces nothing there."""


@dataclass(frozen=True)
class PlanOptions(PlanRunOptions, ModelOptions):
    """Find how a model runs in fp16 without overflow.

    Computes bounds from the weights that hold for every prompt, and runs nothing.

    Examples:
      stopdown plan zai-org/CogVideoX-5b -o plan.json
    """

    source: SourceArgument
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write, ending in .json. By default plan.json, or plan-2.json if that "
            "exists, and so on.",
        ),
    ] = None
    force: ForceOption = False
    precision: Annotated[
        str,
        typer.Option(
            help="auto and fp16 plan everything in fp16; text_encoder=fp32 keeps a component in "
            "another precision."
        ),
    ] = "auto"
    certificate: Annotated[
        Path | None,
        typer.Option(
            help="File ending in .json that states each bound and what implies it. stopdown-verify "
            "FILE --weights FOLDER checks it without this library."
        ),
    ] = None

    memory: Annotated[str | None, typer.Option(hidden=True)] = None
    """Refused: what it suggests is a forecast, which `fit` makes."""


def main(options: PlanOptions) -> int:
    from stopdown.app.progress import open_display, print_result

    with open_display(options) as display:
        made, written = plan(options, display)
    print_result(options, made, functools.partial(print_plan, made, written), name=written)
    return 0


def plan(options: PlanOptions, display: Display) -> tuple[Plan, Path]:
    if options.memory is not None:
        raise OptionError(
            f"--memory {options.memory} was given, but a plan has no memory limit.",
            expected="Another command predicts the memory of a run.",
            remedy=f"Use stopdown fit SOURCE --memory {options.memory}.",
        )
    _check_certificate(options)
    others = parse_fp16(options.precision, "A plan")
    output = options.output or find_free(DEFAULT_OUTPUT)
    check_suffix(
        output, ".json", expected="generate --precision recognises a plan by this extension."
    )
    check_target(output, replaces=describe_no_plan, force=options.force)
    source = find_source(options, display)
    if source.components:
        check_components(others, source.components)
    load_libraries(display)
    from stopdown.plans.certificate_files import write_certificate
    from stopdown.plans.certified import Scope, certify_plan
    from stopdown.sources.library_messages import quiet_libraries

    with quiet_libraries():
        made = certify_plan(
            source,
            precision=options.precision,
            residual="fp32",
            progress=display.progress,
            scope=Scope(keeps=True),
        )
    if options.certificate is not None:
        with quiet_libraries():
            write_certificate(made, source, options.certificate, progress=display.progress)
    return made, write_plan(made, output, numbered=options.output is None)


def _check_certificate(options: PlanOptions) -> None:
    """Refuse a file that is there or is no JSON file."""
    if options.certificate is None:
        return
    check_suffix(options.certificate, ".json", expected="A certificate is a JSON file.")
    check_target(
        options.certificate,
        noun="certificate",
        option="with --certificate",
        replaces=functools.partial(describe_other, "certificate"),
        force=options.force,
    )


def print_plan(made: Plan, output: Path, console: Console) -> None:
    """Print one line for each component, and the reasons below."""
    from rich.text import Text

    from stopdown.app.progress import make_table

    summary = made.summarise()
    table = make_table(*summary.headings, no_wrap=True)
    for row in summary.rows:
        table.add_row(*row)
    console.print(table)
    for name, said in summary.notes:
        console.print(Text.assemble((f"\n{name}", "bold"), f": {said}"))
    said = f"\nFrom the weights alone, {made.elapsed_s:.1f} s. Written: {output}"
    console.print(said, soft_wrap=True, highlight=False)
