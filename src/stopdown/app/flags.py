"""Options that several commands of the command line share, each written once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

SHOWN = ("json", "quiet", "verbose", "token")
"""Options about what is printed, and what is secret: no record has them."""


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """What every command takes; the dataclass of a command is a subclass."""

    quiet: Annotated[
        bool,
        typer.Option(
            "-q",
            "--quiet",
            help="Show no progress and no remarks; instead of the summary, print only the name of "
            "the file written.",
        ),
    ] = False
    verbose: Annotated[
        bool,
        typer.Option(
            "-v",
            "--verbose",
            help="Also show which file set defaults, where the model was found, and the traceback of "
            "an error.",
        ),
    ] = False
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the record as JSON, without pictures, instead of text."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SourceOptions(CommandOptions):
    """What every command takes that reads a model."""

    variant: Annotated[
        str | None,
        typer.Option(help="Variant of the weights, if the model has several, such as fp16."),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            help="Token for a gated or private model. Other users can see it in the list of "
            "processes; prefer hf auth login."
        ),
    ] = None


ImageOption = Annotated[Path | None, typer.Option(help="Picture to start from.")]
StrengthOption = Annotated[
    float | None, typer.Option(help="How much of --image is changed: above 0, up to 1.")
]


@dataclass(frozen=True, kw_only=True)
class MediaOptions(SourceOptions):
    """What a run starts from, or follows."""

    image: ImageOption = None
    video: Annotated[Path | None, typer.Option(help="Video to start from.")] = None
    mask: Annotated[
        Path | None, typer.Option(help="Mask of --image: white areas are replaced.")
    ] = None
    control_image: Annotated[
        Path | None,
        typer.Option(help="Picture for a ControlNet to follow: edges, depth or a pose."),
    ] = None
    strength: StrengthOption = None


@dataclass(frozen=True, kw_only=True)
class SizeOptions(SourceOptions):
    """The sizes of what is made."""

    frames: Annotated[int | None, typer.Option(help="Frames of the video.")] = None
    height: Annotated[int | None, typer.Option(help="Height in pixels.")] = None
    width: Annotated[int | None, typer.Option(help="Width in pixels.")] = None


RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
ConfigOption = Annotated[
    str | None,
    typer.Option(help="For a single file: Diffusers folder or Hub id with its configs."),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SourceOptions):
    """Which model is meant, and what is put on it."""

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
            help="Scheduler to use instead of the model's own: DPMSolverMultistep, Euler…",
        ),
    ] = None
    revision: RevisionOption = None
    config: ConfigOption = None


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Hub id, Diffusers folder, single .safetensors file, or the bundled model shapes.",
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="auto, fp32, bf16 or fp16; by component, as in transformer=bf16,vae.decode=fp32; or a "
        "plan, plan.json."
    ),
]
NegativeOption = Annotated[
    str | None, typer.Option(help="What the picture or video should not show.")
]
RateOption = Annotated[float, typer.Option(help="Frames per second of what is written.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cuda, cuda:1, mps or cpu.")]
StepsOption = Annotated[int | None, typer.Option(help="Denoising steps.")]
GuidanceOption = Annotated[float | None, typer.Option(help="Guidance scale.")]
AllowOption = Annotated[
    tuple[str, ...],
    typer.Option(
        help="Change that is allowed so that the run stays within --memory: smaller makes fewer "
        "frames or a smaller picture if nothing else fits."
    ),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 1 if frames are black, grey, frozen or noise.")
]
KeepRepairsOption = Annotated[
    bool,
    typer.Option("--keep-repairs", help="Write repairs into the plan given to --precision."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
