"""Implementation of `stopdown plan`: compute a plan from the weights, write it, and print a table."""

from __future__ import annotations

import functools
import shlex
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
from stopdown.app.request_options import find_named_source
from stopdown.errors import OptionError
from stopdown.files.outputs import check_suffix, check_target, find_free
from stopdown.plans.plan_files import describe_no_plan, write_plan
from stopdown.plans.precision import check_components, parse_fp16
from stopdown.records import Plan, describe_other

if TYPE_CHECKING:
    from rich.console import Console


DEFAULT_OUTPUT = Path("plan.json")
"""Default path of a plan; an existing file there is kept."""


@dataclass(frozen=True)
class PlanOptions(PlanRunOptions, ModelOptions):
    """Work out how to run a model in fp16 without overflow.

    Computes bounds from the weights alone, valid for every prompt; the model is not run. -v also prints
    the reasons for each component.

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
            help="File to write, ending in .json, with each bound and its derivation. "
            "stopdown-verify FILE --weights FOLDER checks it without Stopdown."
        ),
    ] = None

    memory: Annotated[str | None, typer.Option(hidden=True)] = None
    """Hidden, and refused with a pointer to `stopdown fit`, which forecasts memory."""


def run_plan_command(options: PlanOptions) -> int:
    from stopdown.app.progress import open_display, print_result

    with open_display(options) as display:
        made, written = plan(options, display)
    draw = functools.partial(print_plan, made, written, options)
    print_result(options, made, draw, name=written)
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
    source = find_named_source(options, display)
    if source.components:
        check_components(others, source.components)
    load_libraries(display)
    from stopdown.plans.certificate_files import write_certificate
    from stopdown.plans.certified import Scope, certify_plan
    from stopdown.scaling import TracedCalls
    from stopdown.sources.library_messages import quiet_libraries

    traced = dict[str, TracedCalls]()
    with quiet_libraries():
        made = certify_plan(
            source,
            precision=options.precision,
            residual="fp32",
            progress=display.progress,
            scope=Scope(keeps=True),
            traced=traced,
        )
    if options.certificate is not None:
        with quiet_libraries():
            write_certificate(made, source, options.certificate, traced, display.progress)
    return made, write_plan(made, output, numbered=options.output is None)


def _check_certificate(options: PlanOptions) -> None:
    """Refuse a certificate path that is not a JSON file or must not be overwritten."""
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


def print_plan(made: Plan, output: Path, options: PlanOptions, console: Console) -> None:
    """Print the verdict, the next command, a line for each component, and with -v the reasons."""
    from rich.text import Text

    from stopdown.app.progress import make_table

    console.print(describe_proof(made), style="bold", soft_wrap=True, highlight=False)
    run = f"stopdown generate {shlex.quote(options.source)} PROMPT --precision {output}"
    console.print(f"→ {run}\n", soft_wrap=True, highlight=False, markup=False)
    summary = made.summarise()
    table = make_table(*summary.headings, no_wrap=True)
    for row in summary.rows:
        table.add_row(*row)
    console.print(table)
    for name, said in summary.notes if options.verbose else ():
        console.print(Text.assemble((f"\n{name}", "bold"), f": {said}"))
    written = f"{output} and {options.certificate}" if options.certificate else output
    said = f"\nWrote {written} ({made.elapsed_s:.1f} s, from the weights alone)"
    console.print(said, soft_wrap=True, highlight=False)


def describe_proof(made: Plan) -> str:
    """Summarise the proof of a plan in a line: proven and unproven parts, and the smallest headroom."""
    planned = [x for x in made.components if x.precision == "fp16"]
    if not planned:
        return "No component can run in fp16; -v shows why."
    proven = [x.component for x in planned if x.in_force.certified]
    rest = [x for x in planned if not x.in_force.certified]
    headroom = min((x.in_force.headroom_bits or 0.0 for x in planned), default=0.0)
    parts = [f"Proven not to overflow in fp16: {', '.join(proven)}"] if proven else []
    if rest:
        left = [
            f"{x.component} ({x.in_force.values - x.in_force.bounded} of {x.in_force.values} activations)"
            for x in rest
        ]
        parts.append(f"Estimated, and watched at run time: {', '.join(left)}")
    others = [f"{x.component} ({x.precision})" for x in made.components if x not in planned]
    parts += [f"Not in fp16: {', '.join(others)}"] if others else []
    parts.append(f"Smallest headroom: {headroom:.1f} bits")
    return f"{'. '.join(parts)}."
