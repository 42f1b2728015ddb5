"""The command line. Exit 0 clean, 1 findings or a failed run, 2 usage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import stopdown

if TYPE_CHECKING:
    from stopdown.app.commands import GenerateOptions
    from stopdown.app.compare_command import CompareOptions
    from stopdown.app.convert_command import ConvertOptions
    from stopdown.app.plan_command import PlanOptions
    from stopdown.app.run_command import ScriptOptions
    from stopdown.comparison.records import Comparison
    from stopdown.records import RunRecord

app = typer.Typer(
    name="stopdown",
    help="Half precision, whole picture: image and video diffusion models without black frames.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Hub id, Diffusers folder, single .safetensors file, or bundled model: shapes.",
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(help="For a single file: Diffusers folder or Hub id that holds its configs."),
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
ImageOption = Annotated[Path | None, typer.Option(help="Picture to start from.")]
VideoOption = Annotated[Path | None, typer.Option(help="Video to start from.")]
FramesOption = Annotated[int | None, typer.Option(help="Frames of the video.")]
HeightOption = Annotated[int | None, typer.Option(help="Height in pixels.")]
WidthOption = Annotated[int | None, typer.Option(help="Width in pixels.")]
GuidanceOption = Annotated[float | None, typer.Option(help="Guidance scale.")]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        help="What may change the picture so that it stays within --memory: fp8 or int8, weights "
        "that wait in 8 bits. Give it again for more."
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stopdown {stopdown.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Half precision, whole picture: image and video diffusion models without black frames."""


@app.command()
def generate(
    source: SourceArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What the picture or video shows.")
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", help="File (.mp4, .gif, .png) or folder of frames to write."
        ),
    ] = "stopdown.mp4",
    negative: Annotated[str | None, typer.Option(help="What it should not show.")] = None,
    image: ImageOption = None,
    video: VideoOption = None,
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
    from stopdown.app.commands import GenerateOptions

    options = GenerateOptions(
        source=source,
        prompt=prompt,
        output=output,
        negative=negative,
        image=image,
        video=video,
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


@app.command()
def plan(
    source: SourceArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write, ending in .json.")
    ] = Path("plan.json"),
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="What to measure; give it again for more. Without it three of ours."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Denoising steps of each measured run.")] = 4,
    precision: Annotated[str, typer.Option(help="fp16.")] = "fp16",
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


@app.command()
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
        bool, typer.Option("--force", help="Replace a model that stands at OUT.")
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


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="Python file to run; with -m its first argument."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed to the script.")
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
    plan: Annotated[
        Path | None, typer.Option(help="A plan for the pipelines that it belongs to: plan.json.")
    ] = None,
    keep_repairs: Annotated[
        bool, typer.Option("--keep-repairs", help="Write repairs into the file of --plan.")
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
        plan=plan,
        keep_repairs=keep_repairs,
    )
    raise typer.Exit(_run_script(options, as_json))


@app.command()
def check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Hub id, Diffusers folder (its configs are enough), single .safetensors file, or "
            "bundled model: shapes.",
        ),
    ],
    precision: Annotated[
        str | None,
        typer.Option(
            help="Judge it in fp32, bf16 or fp16, also by component: transformer=fp16,vae=fp32. "
            "Without it as it is stored."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Judge it for this device: cuda, mps, cpu, or a profile such as v100."),
    ] = None,
    config: ConfigOption = None,
    sums: Annotated[
        bool,
        typer.Option(
            "--sums",
            help="Load it too and run two steps in fp32: sums that kernels with fp16 accumulators do "
            "not hold, products that do not fit into fp16.",
        ),
    ] = False,
    frames: FramesOption = None,
    height: HeightOption = None,
    width: WidthOption = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Load it, mend what can be mended, and check again.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="With --fix: folder to write it to.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON instead of the page.")
    ] = False,
) -> None:
    """Say what will go wrong with dtypes, before loading and without owning the device."""
    from stopdown.app import check_command
    from stopdown.records import to_json

    record = check_command.check(
        check_command.CheckOptions(
            source, precision, device, config, fix, output, sums, frames, height, width
        )
    )
    if as_json:
        sys.stdout.write(to_json(record))
    else:
        from rich.console import Console

        check_command.print_check(record, Console(highlight=False))
    raise typer.Exit(check_command.choose_code(record))


@app.command()
def explain(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE|-|TEXT]",
            help="Log, picture, video or folder of frames; - for standard input; or the message.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the diagnosis as JSON instead of the page.")
    ] = False,
) -> None:
    """Say why: an error message, a traceback, a log or a black picture, and what to type."""
    from stopdown.app import explain_command
    from stopdown.records import to_json

    diagnosis = explain_command.explain(subject)
    if as_json:
        sys.stdout.write(to_json(diagnosis))
    else:
        from rich.console import Console

        explain_command.print_diagnosis(diagnosis, Console(highlight=False))
    raise typer.Exit(explain_command.choose_code(diagnosis))


@app.command()
def doctor(
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cuda:1, mps or cpu; a profile such as v100, t4, a100 or mps-m1; or a profile "
            "of your own: mine.toml. Without it, each device of this machine."
        ),
    ] = None,
    as_toml: Annotated[
        bool, typer.Option("--toml", help="Print the device as a profile, to start your own from.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found as JSON instead of the page.")
    ] = False,
) -> None:
    """Say what a machine computes in, natively or emulated, and what auto would choose on it."""
    from stopdown.app import doctor_command
    from stopdown.records import to_json

    if as_toml:
        sys.stdout.write(doctor_command.write_profile(device))
        return
    health = doctor_command.diagnose(device)
    if as_json:
        sys.stdout.write(to_json(health))
    else:
        from rich.console import Console

        doctor_command.print_health(health, Console(highlight=False))


def _run_script(options: ScriptOptions, as_json: bool) -> int:
    from rich.console import Console

    from stopdown.app import run_command
    from stopdown.records import to_json

    console = Console(stderr=True)

    def announce(text: str) -> None:
        console.print(f"stopdown: {text}", style="yellow", soft_wrap=True, highlight=False)

    record = run_command.run_script(options, announce)
    if as_json:
        sys.stdout.write(to_json(record))
    else:
        run_command.print_script(record, console)
    return run_command.choose_code(record, strict=options.strict)


@app.command()
def compare(
    source: SourceArgument,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with one prompt on each line.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; give it again for more.")
    ] = None,
    precisions: Annotated[
        str,
        typer.Option(
            help="fp32, bf16, fp16 (nothing repaired), autocast, clamp, plan, a plan's file, auto, "
            "or by component: transformer=bf16+vae=fp32."
        ),
    ] = "fp32,bf16,fp16,plan",
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Page to write, ending in .html.")
    ] = Path("report.html"),
    negative: Annotated[str | None, typer.Option(help="What pictures should not show.")] = None,
    image: ImageOption = None,
    video: VideoOption = None,
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:1, mps or cpu.")] = "auto",
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the first prompt; each further one has the next.")
    ] = 0,
    frames: Annotated[int | None, typer.Option(help="Frames of the videos.")] = None,
    height: HeightOption = None,
    width: WidthOption = None,
    guidance: GuidanceOption = None,
    min_psnr: Annotated[
        float | None, typer.Option(help="Least PSNR of the same picture, in dB: 33.")
    ] = None,
    min_ssim: Annotated[
        float | None, typer.Option(help="Least SSIM of the same picture: 0.95.")
    ] = None,
    max_flip: Annotated[
        float | None, typer.Option(help="Largest mean FLIP error of the same picture.")
    ] = None,
    max_flicker: Annotated[
        float | None, typer.Option(help="Largest change of the error from frame to frame.")
    ] = None,
    revision: RevisionOption = None,
    config: ConfigOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON, without its pictures.")
    ] = False,
) -> None:
    """Show what each precision does to the same prompts: one page to choose by."""
    from stopdown.app.compare_command import CompareOptions, choose_code

    options = CompareOptions(
        source=source,
        prompts=prompts,
        prompt=tuple(prompt or ()),
        precisions=precisions,
        output=output,
        negative=negative,
        image=image,
        video=video,
        device=device,
        steps=steps,
        seed=seed,
        frames=frames,
        height=height,
        width=width,
        guidance=guidance,
        min_psnr=min_psnr,
        min_ssim=min_ssim,
        max_flip=max_flip,
        max_flicker=max_flicker,
        revision=revision,
        config=config,
    )
    raise typer.Exit(choose_code(_run_compare(options, as_json)))


@app.command()
def report(
    record: Annotated[
        Path,
        typer.Argument(
            metavar="RECORD.json", help="What compare or generate wrote beside its output."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Page to write, ending in .html.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON, without its pictures.")
    ] = False,
) -> None:
    """Make the page of a record again: of a comparison, or of one run of generate."""
    from rich.console import Console

    from stopdown.app import report_command
    from stopdown.app.comparison_cards import print_record, strip_pictures
    from stopdown.records import to_json

    found, page = report_command.report(record, output)
    if as_json:
        sys.stdout.write(to_json(strip_pictures(found)))
    else:
        print_record(found, page, Console())


def _run_memory(options: PlanOptions, as_json: bool) -> int:
    from rich.console import Console

    from stopdown.app import memory_command
    from stopdown.app.displays import Bars
    from stopdown.app.request_options import read_request
    from stopdown.records import to_json

    request = read_request(options)
    with Bars(Console(stderr=True)) as display:
        made = memory_command.plan_memory(options, request, display)
    if as_json:
        sys.stdout.write(to_json(made))
    else:
        memory_command.print_memory(made, Console(highlight=False))
    return 0 if made.chosen else 1


def _run_plan(options: PlanOptions, as_json: bool) -> None:
    from rich.console import Console

    from stopdown.app import plan_command
    from stopdown.app.displays import Bars
    from stopdown.records import to_json

    with Bars(Console(stderr=True)) as display:
        made = plan_command.plan(options, display)
    if as_json:
        sys.stdout.write(to_json(made))
    else:
        plan_command.print_plan(made, options.output, Console())


def _run_convert(options: ConvertOptions, as_json: bool) -> None:
    from rich.console import Console

    from stopdown.app import convert_command
    from stopdown.app.displays import Bars
    from stopdown.records import to_json

    with Bars(Console(stderr=True)) as display:
        made = convert_command.convert(options, display)
    if as_json:
        sys.stdout.write(to_json(made))
    else:
        convert_command.print_conversion(made, Console())


def _run_compare(options: CompareOptions, as_json: bool) -> Comparison:
    from rich.console import Console

    from stopdown.app import compare_command
    from stopdown.app.comparison_cards import print_record, strip_pictures
    from stopdown.app.displays import Bars
    from stopdown.records import to_json

    with Bars(Console(stderr=True)) as display:
        made = compare_command.compare(options, display)
    if as_json:
        sys.stdout.write(to_json(strip_pictures(made)))
    else:
        print_record(made, options.output, Console())
    return made


def _run_generate(options: GenerateOptions, as_json: bool) -> RunRecord:
    from rich.console import Console

    from stopdown.app import commands
    from stopdown.app.cards import print_card
    from stopdown.app.displays import Bars
    from stopdown.records import to_json

    errors = Console(stderr=True)
    with Bars(errors) as display:
        record = commands.generate(options, display)
    if as_json:
        sys.stdout.write(to_json(record))
    else:
        print_card(record, Console())
    return record


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code; no traceback for a user's mistake."""
    from stopdown.errors import StopdownError

    wants_json = "--json" in (arguments if arguments is not None else sys.argv)
    try:
        app(args=arguments, standalone_mode=True)
    except StopdownError as error:
        _report_error(type(error).__name__, str(error), wants_json)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, SystemExit) as left:
        if isinstance(left, SystemExit) and left.code != _TYPER_INTERRUPTED:
            raise
        _report_error("KeyboardInterrupt", "Stopped by Ctrl-C; no output was finished.", wants_json)
        sys.exit(1)
    sys.exit(0)


_TYPER_INTERRUPTED = 130
"""With this code Typer leaves after Ctrl-C."""


def _report_error(kind: str, message: str, wants_json: bool) -> None:
    typer.echo(f"stopdown: {message}", err=True)
    if wants_json:
        typer.echo(json.dumps({"error": kind, "message": message}))


if __name__ == "__main__":
    main()
