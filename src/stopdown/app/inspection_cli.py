"""The commands that look at something: `check`, `compare`, `report`, `explain`, `doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stopdown.app.flags import (
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
    from stopdown.app.compare_command import CompareOptions
    from stopdown.comparison.records import Comparison


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
            help="Judge it in fp32, bf16 or fp16, also by component: transformer=fp16,vae.decode=fp32, or "
            "by a plan: plan.json. Without it as it is stored."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Judge it for this device: cuda, mps, cpu, or a profile such as v100."),
    ] = None,
    revision: RevisionOption = None,
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
        Path | None,
        typer.Option("-o", "--output", help="With --fix: new or empty folder to write it to."),
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
            source, precision, device, config, fix, output, sums, frames, height, width, revision
        )
    )
    if as_json:
        sys.stdout.write(to_json(record))
    else:
        from stopdown.app.progress import open_console

        check_command.print_check(record, open_console(highlight=False))
    raise typer.Exit(check_command.choose_code(record))


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
        from stopdown.app.progress import open_console

        explain_command.print_diagnosis(diagnosis, open_console(highlight=False))
    raise typer.Exit(explain_command.choose_code(diagnosis))


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
        from stopdown.app.progress import open_console

        doctor_command.print_health(health, open_console(highlight=False))


def compare(
    source: SourceArgument,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with one prompt on each line.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; give it again for more.")
    ] = None,
    precisions: Annotated[
        list[str] | None,
        typer.Option(
            "--precisions",
            "--precision",
            help="A list, or given again for each: fp32, bf16, fp16 (nothing repaired), autocast, clamp, "
            "plan, a plan's file, auto, or by component: transformer=bf16,vae=fp32, in a list "
            "transformer=bf16+vae=fp32.",
            show_default="fp32,bf16,fp16,plan",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Page to write, ending in .html, also over another page of Stopdown. Without it "
            "report.html, or the first free report-2.html.",
        ),
    ] = None,
    negative: Annotated[str | None, typer.Option(help="What pictures should not show.")] = None,
    image: ImageOption = None,
    video: VideoOption = None,
    mask: MaskOption = None,
    control_image: ControlImageOption = None,
    strength: StrengthOption = None,
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
        precisions=tuple(precisions or CompareOptions.precisions),
        output=output,
        negative=negative,
        image=image,
        video=video,
        mask=mask,
        control_image=control_image,
        strength=strength,
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


def report(
    record: Annotated[
        Path,
        typer.Argument(
            metavar="RECORD.json", help="What compare or generate wrote beside its output."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Page to write, ending in .html, also over another page of Stopdown. Without it the "
            "record's name, numbered when that is taken.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON, without its pictures.")
    ] = False,
) -> None:
    """Make the page of a record again: of a comparison, or of one run of generate."""
    from stopdown.app import report_command
    from stopdown.app.comparison_cards import print_record, strip_pictures
    from stopdown.app.progress import open_console
    from stopdown.records import to_json

    found, page = report_command.report(record, output)
    if as_json:
        sys.stdout.write(to_json(strip_pictures(found)))
    else:
        print_record(found, page, open_console())


def _run_compare(options: CompareOptions, as_json: bool) -> Comparison:
    from stopdown.app import compare_command
    from stopdown.app.comparison_cards import print_record, strip_pictures
    from stopdown.app.progress import Bars, open_console
    from stopdown.records import to_json

    with Bars(open_console(stderr=True)) as display:
        made, page = compare_command.compare(options, display)
    if as_json:
        sys.stdout.write(to_json(strip_pictures(made)))
    else:
        print_record(made, page, open_console())
    return made
