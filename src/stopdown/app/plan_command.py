"""`stopdown plan`, as a plain function: options in, plan out, and the table that shows it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stopdown.app.display import Display, load_libraries
from stopdown.app.flags import (
    ForceOption,
    ModelOptions,
    PlanRunOptions,
    SourceArgument,
)
from stopdown.app.request_options import find_source, read_request
from stopdown.app.size_limits import refuse_unmeasurable
from stopdown.errors import OptionError
from stopdown.files.outputs import check_suffix, check_target, find_free
from stopdown.pipelines.requests import FIELDS, MEDIA
from stopdown.plans.plan_files import describe_no_plan, seal_plan, write_plan
from stopdown.plans.precision import check_components, leave_components, parse_fp16
from stopdown.records import Plan, describe_other

if TYPE_CHECKING:
    from rich.console import Console


DEFAULT_OUTPUT = Path("plan.json")
"""Where a plan goes without -o; it replaces nothing there."""


@dataclass(frozen=True)
class PlanOptions(PlanRunOptions, ModelOptions):
    """Find how a model runs in fp16 without overflow.

    Computes bounds from the weights that hold for every prompt, and runs nothing. With --measure, or with
    an option of runs such as --prompt or --steps, it runs the model a few times and measures instead.

    Examples:
      stopdown plan zai-org/CogVideoX-5b -o plan.json
      stopdown plan shapes --measure --steps 2
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
    prompt: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Prompt to measure. Repeat for several. By default three built-in prompts."
        ),
    ] = ()
    steps: Annotated[
        int | None, typer.Option(help="Denoising steps of each measured run. By default 4.")
    ] = field(default=None, kw_only=True)
    precision: Annotated[
        str,
        typer.Option(
            help="auto and fp16 plan everything in fp16; text_encoder=fp32 keeps a component in "
            "another precision."
        ),
    ] = "auto"
    residual: Annotated[
        Literal["native", "fp32"] | None,
        typer.Option(
            help="Precision of the residual stream. native: as the model has it. fp32: sums and "
            "norms in fp32, which is more precise. By default fp32, and native for a measured file "
            "with a single component."
        ),
    ] = None
    ranges: Annotated[
        Literal["measured", "bound", "auto"] | None,
        typer.Option(
            help="Bounds in place of what runs measured. auto, the default: where they cost nothing. "
            "bound: wherever there are any. measured: none, and none is computed."
        ),
    ] = None
    call: Annotated[
        tuple[str, ...],
        typer.Option(
            help="For a file with a single component: a recorded call to measure, FILE or "
            "vae.decode=FILE. Repeat for several."
        ),
    ] = ()
    certificate: Annotated[
        Path | None,
        typer.Option(
            help="File ending in .json that states each bound and what implies it. stopdown-verify "
            "FILE --weights FOLDER checks it without this library."
        ),
    ] = None
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure a few runs instead of bounding all values.")
    ] = False
    device: Annotated[
        str | None, typer.Option(help="Device to measure on: cuda, cuda:1, mps or cpu.")
    ] = None

    memory: Annotated[str | None, typer.Option(hidden=True)] = None
    """Refused: what it suggests is a forecast, which `fit` makes."""

    @property
    def measures(self) -> bool:
        """Whether runs are measured: that was asked for, or something that only runs have."""
        fields = (x for x in FIELDS if x.name not in ("prompt", "strength", *MEDIA))
        is_asked = any(getattr(self, x.name) != x.default for x in fields)
        others = (self.measure, is_asked, self.prompt, self.call)
        return any(others) or self.ranges is not None or self.device is not None


def main(options: PlanOptions) -> int:
    from stopdown.app.progress import open_display, print_result

    with open_display(options) as display:
        made, written = plan(options, display)
    print_result(options, made, functools.partial(print_plan, made, written), name=written)
    return 0


def plan(options: PlanOptions, display: Display) -> tuple[Plan, Path]:
    if options.memory is not None:
        device = f" --device {options.device}" if options.device is not None else ""
        raise OptionError(
            f"--memory {options.memory} was given, but a plan has no memory limit.",
            expected="Another command predicts the memory of a run.",
            remedy=f"Use stopdown fit SOURCE --memory {options.memory}{device}.",
        )
    _check_certificate(options)
    others = parse_fp16(options.precision, "A plan")
    output = options.output or find_free(DEFAULT_OUTPUT)
    check_suffix(
        output, ".json", expected="generate --precision recognises a plan by this extension."
    )
    request = read_request(options)
    check_target(output, replaces=describe_no_plan, force=options.force)
    source = find_source(options, display)
    if source.components:
        check_components(others, source.components)
    load_libraries(display)
    from stopdown.plans.calibrated import STEPS
    from stopdown.plans.call_recorder import read_call
    from stopdown.plans.certificate_files import write_certificate
    from stopdown.plans.certified import Scope, certify_plan
    from stopdown.runtime.plan_maker import make_plan
    from stopdown.sources.library_messages import quiet_libraries

    if options.measures:
        refuse_unmeasurable(source, request, options.device, display, precision="auto")
        with quiet_libraries():
            made = make_plan(
                source,
                measure=options.ranges or True,
                device=options.device,
                prompts=[*options.prompt, *map(read_call, options.call)],
                residual=options.residual,
                request=dataclasses.replace(request, steps=request.steps or STEPS),
                progress=display.progress,
            )
        if others:
            kept = tuple(leave_components(made.components, others))
            made = seal_plan(dataclasses.replace(made, components=kept))
    else:
        with quiet_libraries():
            made = certify_plan(
                source,
                precision=options.precision,
                request=request,
                residual=options.residual or "fp32",
                progress=display.progress,
                scope=Scope(keeps=True),
            )
    if options.certificate is not None:
        with quiet_libraries():
            write_certificate(made, source, options.certificate, request, display.progress)
    return made, write_plan(made, output, numbered=options.output is None)


def _check_certificate(options: PlanOptions) -> None:
    """Refuse a certificate without bounds, and a file that is there or is no JSON file."""
    if options.certificate is None:
        return
    if options.ranges == "measured":
        raise OptionError(
            f"--certificate {options.certificate} was given, but no bounds are computed.",
            expected="A certificate states bounds that hold for every input.",
            remedy="Leave out --ranges measured.",
        )
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
    basis = "From the weights alone"
    if made.steps:
        calls, runs = sum(entry.calls for entry in made.components), len(made.prompts) or 1
        basis = f"Calibrated on {calls} calls in {runs} run{'s' * (runs != 1)} of {made.steps} steps on "
        basis += str(made.device)
    said = f"\n{basis}, {made.elapsed_s:.1f} s. Written: {output}"
    console.print(said, soft_wrap=True, highlight=False)
