"""Definitions of the options that several commands share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from stopdown.pipelines.requests import FIELDS, MEDIA

SHOWN = ("json", "quiet", "verbose")
"""Options that only affect what is printed; records leave them out."""


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options of every command; the dataclass of a command is a subclass."""

    quiet: Annotated[
        bool,
        typer.Option(
            "-q",
            "--quiet",
            help="Show no progress or remarks; if a file is written, print only its name.",
        ),
    ] = False
    verbose: Annotated[
        bool,
        typer.Option(
            "-v",
            "--verbose",
            help="Show more detail, and tracebacks.",
        ),
    ] = False
    json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON instead of text."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SourceOptions(CommandOptions):
    """Options of every command that reads a model."""

    variant: Annotated[
        str | None,
        typer.Option(help="Variant of the weights, if the model has several, such as fp16."),
    ] = None


ArgumentsOption = Annotated[
    tuple[str, ...],
    typer.Option(
        metavar="NAME=VALUE",
        help="Extra argument for the pipeline call: a number, text, JSON, or the path of a picture, video "
        "or sound, such as pose_video=pose.mp4. Repeat for several.",
    ),
]


def make_options(name: str, wanted: Iterable[dataclasses.Field[Any]]) -> Any:
    """Make a dataclass of options from fields of `Request`, from which the options of a command inherit.

    A command can redeclare a field. Fields that are left out become class attributes with their defaults.

    Args:
        name: name of the dataclass.
        wanted: fields of `Request`, each with its type and its help text in `metadata`.
    """
    entries = list[tuple[str, Any, Any]]()
    for entry in wanted:
        kind, option = entry.metadata["kind"], typer.Option(help=entry.metadata["help"])
        hint = kind | None if entry.default is None else kind
        entries.append((entry.name, Annotated[hint, option], entry.default))
    given = {entry[0] for entry in entries}
    entries += [("arg", ArgumentsOption, ())] if "steps" in given else []
    own = {entry[0] for entry in entries}
    left_out = {entry.name: entry.default for entry in FIELDS if entry.name not in given}
    return dataclasses.make_dataclass(
        name,
        entries,
        bases=(SourceOptions,),
        frozen=True,
        kw_only=True,
        namespace={k: v for k, v in (_NOT_TAKEN | left_out).items() if k not in own},
    )


_NOT_TAKEN = {
    **dict.fromkeys(("memory", "revision", "config", "scheduler", "device")),
    "precision": "auto",
    "lora": (),
    "arg": (),
}
"""Values that a command's options have in place of options that the command does not offer."""

LEFT_OUT = {
    "run": ("prompt",),
    "plan": tuple(entry.name for entry in FIELDS),
    "convert": tuple(entry.name for entry in FIELDS),
    "fit": ("prompt", "negative", "seed", "strength", *MEDIA),
}
"""Fields of a request that are not options of a command, by kind of command.

Commands read prompts in their own ways. Plans and conversions depend on the weights alone. Memory does not
depend on the fields left out for `fit`, and forecasts generate the pictures that they need.
"""

RunOptions, PlanRunOptions, ConvertRunOptions, FitRunOptions = (
    make_options(f"{name.title()}Options", (x for x in FIELDS if x.name not in names))
    for name, names in LEFT_OUT.items()
)


RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
ConfigOption = Annotated[
    str | None,
    typer.Option(help="For a single file: Diffusers folder or Hub id with its configs."),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SourceOptions):
    """Options that select a model, with its LoRAs and scheduler."""

    lora: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="FILE[:WEIGHT]",
            help="LoRA to add, such as style.safetensors:0.8. Repeat for several.",
        ),
    ] = ()
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Scheduler to use instead of the model's own, such as DPMSolverMultistep or Euler.",
        ),
    ] = None
    revision: RevisionOption = None
    config: ConfigOption = None


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Hub id, Diffusers folder, single .safetensors file, or a bundled model: shapes, solids.",
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="auto, fp32, bf16, fp16 (with a plan) or fp16-plain (as Diffusers runs it); per component, "
        "such as transformer=bf16,vae.decode=fp32; or a plan file, such as plan.json."
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(
        help="Frame rate of the video, in frames per second. By default the rate that the pipeline's "
        "videos are made for, or 8."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cuda, cuda:1, mps or cpu.")]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Exit with code 1 if frames are black, grey, frozen or noisy, or sound is silent, "
        "clipped or noisy.",
    ),
]
KeepRepairsOption = Annotated[
    bool,
    typer.Option("--keep-repairs", help="Write repairs into the plan given to --precision."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
