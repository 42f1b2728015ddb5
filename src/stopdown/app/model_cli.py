"""The commands that make something: `generate`, `run`, `plan`, `convert`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stopdown.app.flags import (
    AllowOption,
    ConfigOption,
    ControlImageOption,
    FramesOption,
    GuidanceOption,
    HeightOption,
    ImageOption,
    MaskOption,
    RevisionOption,
    SourceArgument,
    StrengthOption,
    VideoOption,
    WidthOption,
)

if TYPE_CHECKING:
    from stopdown.app.convert_command import ConvertOptions
    from stopdown.app.generate_command import GenerateOptions
    from stopdown.app.plan_command import PlanOptions
    from stopdown.app.run_command import ScriptOptions
    from stopdown.records import RunRecord


def generate(
    source: SourceArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What the picture or video shows.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            help="File (.mp4, .gif, .png) to write, also over one that is there, or new folder of "
            "frames. Without it stopdown.mp4, or the first free stopdown-2.mp4.",
        ),
    ] = None,
    negative: Annotated[str | None, typer.Option(help="What it should not show.")] = None,
    image: ImageOption = None,
    video: VideoOption = None,
    mask: MaskOption = None,
    control_image: ControlImageOption = None,
    strength: StrengthOption = None,
    precision: Annotated[
        str,
        typer.Option(
            help="auto, fp32, bf16, fp16, by component: transformer=bf16,vae.decode=fp32, or a "
            "plan: plan.json."
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:1, mps or cpu.")] = "auto",
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    frames: FramesOption = None,
    height: HeightOption = None,
    width: WidthOption = None,
    guidance: GuidanceOption = None,
    fps: Annotated[float, typer.Option(help="Frames per second of the file.")] = 8.0,
    revision: RevisionOption = None,
    config: ConfigOption = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 when frames are black, grey or frozen.")
    ] = False,
    on_fault: Annotated[
        str,
        typer.Option(
            help="repair: mend a component that gives NaN or Inf, run that call again, go on. "
            "raise: stop there."
        ),
    ] = "repair",
    maxima: Annotated[
        bool,
        typer.Option("--maxima", help="Note how large each block's values get at each step."),
    ] = False,
    keep_repairs: Annotated[
        bool,
        typer.Option("--keep-repairs", help="Write repairs into the plan that --precision names."),
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option(
            help="Folder for what each call gives: after a kill the same command goes on where it "
            "stopped. It is emptied when the run is done."
        ),
    ] = None,
    journal_limit: Annotated[
        float, typer.Option(help="GiB at which the journal ends; the run goes on without it.")
    ] = 4.0,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Stay within this much memory, 8GiB, or within what the device has, auto: weights "
            "that wait elsewhere, tiles, pieces; a call that runs out is run again with less."
        ),
    ] = None,
    allow: AllowOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON instead of the card.")
    ] = False,
) -> None:
    """Make a video or a picture from a prompt, an image or a video; never a black one in silence."""
    from stopdown.app.generate_command import GenerateOptions

    options = GenerateOptions(
        source=source,
        prompt=prompt,
        output=output,
        negative=negative,
        image=image,
        video=video,
        mask=mask,
        control_image=control_image,
        strength=strength,
        precision=precision,
        device=device,
        steps=steps,
        seed=seed,
        frames=frames,
        height=height,
        width=width,
        guidance=guidance,
        fps=fps,
        revision=revision,
        config=config,
        strict=strict,
        on_fault=on_fault,
        maxima=maxima,
        keep_repairs=keep_repairs,
        journal=journal,
        journal_limit=journal_limit,
        memory=memory,
        allow=tuple(allow or ()),
    )
    record = _run_generate(options, as_json)
    raise typer.Exit(1 if record.findings and strict else 0)


def plan(
    source: SourceArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write, ending in .json, also over another plan. Without it plan.json, or "
            "the first free plan-2.json.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="What to measure; give it again for more. Without it three of ours."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Denoising steps of each measured run.")] = 4,
    precision: Annotated[
        str,
        typer.Option(
            help="fp16 or auto, which is the same; with --memory auto compares precisions, and fp32, "
            "bf16, fp16 or a plan, plan.json, is that one."
        ),
    ] = "auto",
    residual: Annotated[
        str,
        typer.Option(
            help="native, or fp32: sums and norms in fp32 beside fp16 matrix products, nearer to "
            "fp32 still."
        ),
    ] = "native",
    ranges: Annotated[
        str,
        typer.Option(
            help="measured; bound: ranges that hold for every input, where there are some; auto: "
            "those that cost nothing."
        ),
    ] = "measured",
    certify: Annotated[
        bool,
        typer.Option(
            "--certify",
            help="Run nothing: bounds for every prompt from the weights alone, read tensor by tensor.",
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Where to measure, in fp32: cuda, cuda:1, mps or cpu.")
    ] = None,
    image: ImageOption = None,
    video: VideoOption = None,
    mask: MaskOption = None,
    control_image: ControlImageOption = None,
    strength: StrengthOption = None,
    frames: FramesOption = None,
    height: HeightOption = None,
    width: WidthOption = None,
    guidance: GuidanceOption = None,
    revision: RevisionOption = None,
    config: ConfigOption = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Predict memory instead, without weights: what each strategy takes on --device "
            "(v100, t4… too), and which stays within 8GiB, or auto."
        ),
    ] = None,
    allow: AllowOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON instead of the table.")
    ] = False,
) -> None:
    """Find how a model that overflows in fp16 runs in it, for generate --precision plan.json."""
    from stopdown.app.plan_command import PlanOptions

    options = PlanOptions(
        source=source,
        output=output,
        prompts=tuple(prompt or ()),
        steps=steps,
        precision=precision,
        residual=residual,
        ranges=ranges,
        certify=certify,
        device=device,
        image=image,
        video=video,
        mask=mask,
        control_image=control_image,
        strength=strength,
        frames=frames,
        height=height,
        width=width,
        guidance=guidance,
        revision=revision,
        config=config,
        memory=memory,
        allow=tuple(allow or ()),
    )
    if memory is not None:
        raise typer.Exit(_run_memory(options, as_json))
    _run_plan(options, as_json)


def convert(
    source: SourceArgument,
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="New folder; from a single file also a .safetensors file."
        ),
    ],
    plan: Annotated[Path, typer.Option(help="The plan that is written down: plan.json.")],
    leave: Annotated[
        list[str] | None,
        typer.Option(help="Component to write as it is stored; give it again for more."),
    ] = None,
    allow_eps: Annotated[
        bool,
        typer.Option(
            "--allow-eps", help="Write also where eps that no config sets change the output."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what convert wrote at OUT before.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Where exponents are found anew: cuda, cuda:1, mps or cpu.")
    ] = None,
    image: Annotated[Path | None, typer.Option(help="Picture for those runs.")] = None,
    video: Annotated[Path | None, typer.Option(help="Video for those runs.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of those runs.")] = None,
    height: Annotated[int | None, typer.Option(help="Height in pixels of those runs.")] = None,
    width: Annotated[int | None, typer.Option(help="Width in pixels of those runs.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale of those runs.")] = None,
    revision: RevisionOption = None,
    config: ConfigOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON instead of the summary.")
    ] = False,
) -> None:
    """Write a plan into the weights: an fp16 model that runs right without Stopdown."""
    from stopdown.app.convert_command import ConvertOptions
    from stopdown.app.plan_command import PlanOptions

    runs = PlanOptions(
        source=source,
        device=device,
        image=image,
        video=video,
        frames=frames,
        height=height,
        width=width,
        guidance=guidance,
        revision=revision,
        config=config,
    )
    options = ConvertOptions(output, plan, runs, tuple(leave or ()), allow_eps, force)
    _run_convert(options, as_json)


def run(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT",
            help="Python file to run, after the options of Stopdown; with -m its first argument.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Whatever stands after SCRIPT is the script's."),
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", "--module", help="Module to run instead of a file.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, mps or cuda:1: where to send what the script sends to CUDA. Without it the "
            "script's choice stands."
        ),
    ] = None,
    on_fault: Annotated[
        str, typer.Option(help="repair: mend it, run that call again, go on. raise: stop. warn.")
    ] = "repair",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 when frames are black, grey or frozen.")
    ] = False,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            "--plan",
            help="auto leaves the script's choice alone; plan.json is a plan for the pipelines that "
            "it belongs to.",
        ),
    ] = "auto",
    keep_repairs: Annotated[
        bool,
        typer.Option("--keep-repairs", help="Write repairs into the plan that --precision names."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON after the script's output.")
    ] = False,
) -> None:
    """Run a script unedited: its Diffusers pipelines are guarded, its exit code is kept."""
    from stopdown.app.run_command import ScriptOptions

    given = tuple(arguments or ())
    if module is not None:
        given = (script, *given) if script is not None else given
    elif script is None:
        raise typer.BadParameter("Name a SCRIPT, or a module with -m.")
    options = ScriptOptions(
        script=module or script or "",
        arguments=given,
        is_module=module is not None,
        on_fault=on_fault,
        device=device,
        strict=strict,
        precision=precision,
        keep_repairs=keep_repairs,
    )
    raise typer.Exit(_run_script(options, as_json))


def _run_generate(options: GenerateOptions, as_json: bool) -> RunRecord:
    from stopdown.app import generate_command as commands
    from stopdown.app.cards import print_card
    from stopdown.app.progress import Bars, open_console
    from stopdown.records import to_json

    errors = open_console(stderr=True)
    with Bars(errors) as display:
        record = commands.generate(options, display)
    if as_json:
        sys.stdout.write(to_json(record))
    else:
        print_card(record, open_console())
    return record


def _run_memory(options: PlanOptions, as_json: bool) -> int:
    from stopdown.app import memory_command
    from stopdown.app.progress import Bars, open_console
    from stopdown.app.request_options import read_request
    from stopdown.records import to_json

    request = read_request(options, takes_profile=True)
    with Bars(open_console(stderr=True)) as display:
        made = memory_command.plan_memory(options, request, display)
    if as_json:
        sys.stdout.write(to_json(made))
    else:
        memory_command.print_memory(made, open_console(highlight=False))
    return 0 if made.chosen else 1


def _run_plan(options: PlanOptions, as_json: bool) -> None:
    from stopdown.app import plan_command
    from stopdown.app.progress import Bars, open_console
    from stopdown.records import to_json

    with Bars(open_console(stderr=True)) as display:
        made, written = plan_command.plan(options, display)
    if as_json:
        sys.stdout.write(to_json(made))
    else:
        plan_command.print_plan(made, written, open_console())


def _run_convert(options: ConvertOptions, as_json: bool) -> None:
    from stopdown.app import convert_command
    from stopdown.app.progress import Bars, open_console
    from stopdown.records import to_json

    with Bars(open_console(stderr=True)) as display:
        made = convert_command.convert(options, display)
    if as_json:
        sys.stdout.write(to_json(made))
    else:
        convert_command.print_conversion(made, open_console())


def _run_script(options: ScriptOptions, as_json: bool) -> int:
    from stopdown.app import run_command
    from stopdown.app.progress import open_console
    from stopdown.app.streams import CheckedStdout
    from stopdown.records import to_json

    console = open_console(stderr=True)

    def announce(text: str) -> None:
        wraps = not console.is_terminal
        console.print(f"stopdown: {text}", style="yellow", soft_wrap=wraps, highlight=False)

    record = run_command.run_script(options, announce)
    if as_json:
        CheckedStdout(sys.stdout).write(to_json(record))
    else:
        run_command.print_script(record, console)
    return run_command.choose_code(record, strict=options.strict)
