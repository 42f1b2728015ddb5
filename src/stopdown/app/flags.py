"""Options that several commands of the command line share, each written once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

QuietOption = Annotated[
    bool,
    typer.Option(
        "-q",
        "--quiet",
        help="No progress and no remarks; of a card only the file that was written.",
    ),
]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "-v",
        "--verbose",
        help="Also which file gave defaults, where the model was found, and the traceback of an error.",
    ),
]


SHOWN = ("json", "quiet", "verbose", "token")
"""Options about what is printed, and what is secret: no record has them."""


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """What every command takes; the dataclass of a command is a subclass."""

    quiet: QuietOption = False
    verbose: VerboseOption = False


VariantOption = Annotated[
    str | None, typer.Option(help="Variant of the weights, where there are several: fp16.")
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        help="Token for a gated or private model; others see it, so hf auth login is better."
    ),
]


@dataclass(frozen=True, kw_only=True)
class SourceOptions(CommandOptions):
    """What every command takes that reads a model."""

    variant: VariantOption = None
    token: TokenOption = None


LoraOption = Annotated[
    tuple[str, ...],
    typer.Option(
        metavar="FILE[:WEIGHT]",
        help="LoRA to put on, style.safetensors:0.8; give it again for more.",
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Scheduler in the place of the model's own: DPMSolverMultistep, Euler…"
    ),
]
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
MaskOption = Annotated[
    Path | None,
    typer.Option(help="Mask of --image: white where something new is made."),
]
ControlImageOption = Annotated[
    Path | None, typer.Option(help="Picture that a ControlNet follows: edges, depth, a pose.")
]
StrengthOption = Annotated[
    float | None, typer.Option(help="How much of --image is made anew: above 0, up to 1.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cuda, cuda:1, mps or cpu.")]
StepsOption = Annotated[int | None, typer.Option(help="Denoising steps.")]
FramesOption = Annotated[int | None, typer.Option(help="Frames of the video.")]
HeightOption = Annotated[int | None, typer.Option(help="Height in pixels.")]
WidthOption = Annotated[int | None, typer.Option(help="Width in pixels.")]
GuidanceOption = Annotated[float | None, typer.Option(help="Guidance scale.")]
AllowOption = Annotated[
    tuple[str, ...],
    typer.Option(
        help="What may change the picture so that it stays within --memory: fp8 or int8, weights "
        "that wait in 8 bits; smaller, fewer frames or a smaller picture where nothing else fits. "
        "Give it again for more."
    ),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit 1 when frames are black, grey or frozen.")
]
KeepRepairsOption = Annotated[
    bool,
    typer.Option("--keep-repairs", help="Write repairs into the plan that --precision names."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace the output where it is there already.")
]
RecordJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the record as JSON, without its pictures.")
]
