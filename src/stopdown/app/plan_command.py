"""`stopdown plan`, as a plain function: options in, plan out, and the table that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stopdown.app.request_options import read_request
from stopdown.errors import OptionError
from stopdown.records import ComponentPlan, Plan

if TYPE_CHECKING:
    from rich.console import Console

    from stopdown.app.generate_command import Display
    from stopdown.pipelines.requests import Request
    from stopdown.pipelines.sources import Source


DEFAULT_OUTPUT = Path("plan.json")
"""Where a plan goes when nobody says; it replaces nothing there."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of `stopdown plan`; None leaves the model's own default.

    Attributes:
        source: Hub id, Diffusers folder, single safetensors file or bundled model.
        output: file to write; None takes plan.json, numbered when that is taken.
        prompts: what to measure; empty for the prompts of Stopdown's own.
        steps: denoising steps of each run.
        precision: `fp16`, which `auto` is as well; with `memory` see `memory_command`.
        residual: `native`, or `fp32` to keep residual streams in fp32.
        ranges: `measured`, `bound` or `auto`.
        certify: run nothing; bounds from the weights alone.
        device: where to measure; None for the best that holds the pipeline in fp32.
        image, video, mask, control_image: files to start from.
        strength: how much of the picture is made anew.
        frames, height, width, guidance: of the runs.
        revision: branch, tag or commit on the Hub.
        config: for a single file, a Diffusers folder or Hub id with its configs.
        memory: a limit, `8GiB`, or `auto`: predict memory instead, see `memory_command`.
        allow: what may change the picture so that it fits, see `request_options`.
    """

    source: str
    output: Path | None = None
    prompts: tuple[str, ...] = ()
    steps: int = 4
    precision: str = "auto"
    residual: str = "native"
    ranges: str = "measured"
    certify: bool = False
    device: str | None = None
    image: Path | None = None
    video: Path | None = None
    mask: Path | None = None
    control_image: Path | None = None
    strength: float | None = None
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    guidance: float | None = None
    revision: str | None = None
    config: str | None = None
    memory: str | None = None
    allow: tuple[str, ...] = ()


def plan(options: PlanOptions, display: Display) -> tuple[Plan, Path]:
    """Make a plan and write it: the plan, and where it stands.

    Raises:
        StopdownError: anything that went wrong, with what to type; no file is left.
    """
    from stopdown.outputs import check_target, find_free
    from stopdown.plans.plan_files import describe_no_plan, write_plan
    from stopdown.scaling import check_residual
    from stopdown.scaling.certificate import check_ranges

    check_residual(options.residual)
    check_ranges(options.ranges)
    _check_certify(options)
    output = options.output or find_free(DEFAULT_OUTPUT)
    if output.suffix.lower() != ".json":
        raise OptionError(
            f"The output {output} does not end in .json.",
            expected="generate --precision knows a plan by that ending.",
            remedy=f"Use -o {output.with_suffix('.json')}.",
        )
    request = read_request(options)
    check_target(output, replaces=describe_no_plan)
    from stopdown.pipelines.library_messages import quiet_libraries
    from stopdown.pipelines.sources import resolve_source, verify_source
    from stopdown.plans.calibrated import make_plan

    source = resolve_source(
        options.source,
        revision=options.revision,
        progress=lambda what, done, total: display.progress("download", what, done, total),
    )
    verify_source(source)
    if options.certify:
        made = _certify(source, options, request, display)
        return made, write_plan(made, output, numbered=options.output is None)
    with quiet_libraries():
        made = make_plan(
            source,
            precision=options.precision,
            device=options.device,
            prompts=options.prompts,
            steps=options.steps,
            residual=options.residual,
            ranges=options.ranges,
            request=request,
            config=options.config,
            progress=display.progress,
        )
    return made, write_plan(made, output, numbered=options.output is None)


def _check_certify(options: PlanOptions) -> None:
    """Refuse options of runs beside --certify, which makes none.

    Raises:
        OptionError: naming the option.
    """
    sizes = (options.frames, options.height, options.width, options.guidance)
    given = {
        "--prompt": options.prompts,
        "--residual": options.residual != "native",
        "--ranges": options.ranges != "measured",
        "--device": options.device,
        "--frames, --height, --width or --guidance": any(x is not None for x in sizes),
    }
    for name, value in given.items():
        if options.certify and value:
            raise OptionError(
                f"{name} was given beside --certify.",
                expected="A certificate is made from the weights alone, and nothing is run.",
                remedy=f"Leave one of them out; stopdown plan {options.source} --ranges auto runs "
                "and bounds.",
            )


def _certify(source: Source, options: PlanOptions, request: Request, display: Display) -> Plan:
    from stopdown.pipelines.library_messages import quiet_libraries
    from stopdown.plans.certified import certify_plan

    with quiet_libraries():
        return certify_plan(
            source, precision=options.precision, request=request, progress=display.progress
        )


def print_plan(made: Plan, output: Path, console: Console) -> None:
    """Print one line for each component, and the reasons below."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("component", "runs in", "tensors", "exponents", "islands", "headroom"):
        table.add_column(heading, no_wrap=True)
    for entry in made.components:
        table.add_row(*_describe_row(entry))
    console.print(table)
    for entry in made.components:
        reasons = " ".join(entry.reasons)
        console.print(Text.assemble((f"\n{entry.component}", "bold"), f": {reasons}"))
    if not made.steps:
        console.print(
            f"\nFrom the weights alone, {made.elapsed_s:.1f} s. Written: {output}",
            soft_wrap=True,
            highlight=False,
        )
        return
    calls = sum(entry.calls for entry in made.components)
    runs = len(made.prompts) or 1
    console.print(
        f"\nCalibrated on {calls} calls in {runs} run{'s' * (runs != 1)} of {made.steps} steps on "
        f"{made.device}, {made.elapsed_s:.1f} s. Written: {output}",
        soft_wrap=True,
        highlight=False,
    )


def _describe_row(entry: ComponentPlan) -> tuple[str, ...]:
    exponents = entry.exponents.values()
    return (
        entry.component,
        entry.precision,
        str(len({name.partition("[")[0] for name in entry.exponents})),
        f"{min(exponents)}..{max(exponents)}" if exponents else "",
        str(len(entry.islands)),
        "" if entry.headroom_bits is None else f"{entry.headroom_bits:.1f} bits",
    )
