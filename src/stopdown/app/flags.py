"""Options that several commands of the command line share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
RecordJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the record as JSON, without its pictures.")
]
