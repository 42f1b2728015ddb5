"""The README's picture: plain Diffusers beside `stopdown generate`, the same prompt and seed.

`split.png` is one frame: plain Diffusers in fp16 on the left, Stopdown in fp16 on the right.
`bundled.png` has a clip of each bundled model, one a row. Plain
Diffusers is called as its documentation does, and its frames are saved as it saves them. Stopdown is a
command. Other scripts draw their rows of frames with `draw_contact_sheet`.

    python benchmarks/contact_sheet.py  # a CPU emulates fp16: some minutes
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import LattePipeline
from PIL import Image, ImageDraw, ImageFont

from stopdown.files.outputs import written_beside
from stopdown.frames.media import read_video
from stopdown.sources.sources import BUNDLED_FOLDER

IMAGES = Path(__file__).parents[1] / "docs" / "images"


Frames = np.ndarray[Any, np.dtype[np.uint8]]
_PAPER, _INK, _EDGE = (252, 252, 250), (32, 32, 36), (205, 205, 200)


def draw_contact_sheet(
    rows: Sequence[tuple[str, Frames]],
    path: str | os.PathLike[str],
    *,
    scale: float = 1.0,
    columns: int | None = None,
) -> Path:
    """Write labelled rows of frames as one png, and return its path.

    Args:
        rows: a label (it may have several lines) and `[T, H, W, 3]` uint8 frames for each row.
        path: the png file.
        scale: size of a frame on the sheet; whole numbers keep pixels sharp.
        columns: show at most so many frames of each row, evenly spaced; None shows all.

    Raises:
        OutputError: the operating system refused to write.
    """
    clips = [(label, _pick_columns(frames, columns)) for label, frames in rows]
    if not clips:
        raise ValueError("a contact sheet needs at least one row")
    height = round(max(clip.shape[1] for _, clip in clips) * scale)
    font = _load_font(min(22, max(14, height // 6)))
    gap = max(6, height // 20)
    margin = _measure_labels([label for label, _ in clips], font) + 3 * gap
    total = max(len(clip) * (round(clip.shape[2] * scale) + gap) for _, clip in clips)
    sheet = Image.new("RGB", (margin + total + gap, gap + len(clips) * (height + gap)), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for row, (label, clip) in enumerate(clips):
        top = gap + row * (height + gap)
        draw.multiline_text((2 * gap, top + height / 2), label, _INK, font, anchor="lm", spacing=3)
        _paste_row(sheet, draw, clip, (margin, top), scale, gap)
    with written_beside(path) as part:
        sheet.save(part, format="PNG", optimize=True)
    return Path(path)


def _pick_columns(clip: Frames, columns: int | None) -> Frames:
    if columns is None or len(clip) <= columns:
        return clip
    return clip[np.linspace(0, len(clip) - 1, columns).round().astype(int)]


def _load_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _measure_labels(
    labels: Sequence[str], font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> int:
    lines = [line for label in labels for line in label.splitlines()]
    return math.ceil(max((font.getbbox(line)[2] for line in lines), default=0))


def _paste_row(
    sheet: Image.Image, draw: Any, clip: Frames, corner: tuple[int, int], scale: float, gap: int
) -> None:
    left, top = corner
    size = (round(clip.shape[2] * scale), round(clip.shape[1] * scale))
    is_whole = float(scale).is_integer()
    resample = Image.Resampling.NEAREST if is_whole else Image.Resampling.LANCZOS
    for frame in clip:
        sheet.paste(Image.fromarray(frame).resize(size, resample), (left, top))
        box = (left - 1, top - 1, left + size[0], top + size[1])
        draw.rectangle(box, outline=_EDGE)  # so that a white or black frame has an edge
        left += size[0] + gap


def draw_split(left: Frames, right: Frames, path: Path, frame: int) -> Path:
    """Write the middle of one frame as a png, its left half from one clip, its right half from another.

    Args:
        left: `[T, H, W, 3]` uint8, and `right` alike.
        path: the png file.
        frame: which frame.
    """
    width, height, head, foot = 480, 360, 50, 40  # the middle of the frame, as wide as a phone
    top = (width - height) // 2
    halves = [
        Image.fromarray(x[frame]).resize((width, width), Image.Resampling.BICUBIC)
        for x in (left, right)
    ]
    sheet = Image.new("RGB", (width, head + height + foot), _PAPER)
    for half, start in zip(halves, (0, width // 2), strict=True):
        sheet.paste(half.crop((start, top, start + width // 2, top + height)), (start, head))
    draw = ImageDraw.Draw(sheet)
    draw.line((width // 2, head, width // 2, head + height - 1), _PAPER, 4)
    for place, text in ((width // 4, "Diffusers, fp16"), (3 * width // 4, "Stopdown, fp16")):
        draw.text((place, head / 2), text, _INK, _load_font(27), anchor="mm")
    below = "one frame: same model, same prompt, same seed"
    draw.text((width / 2, head + height + foot / 2), below, _INK, _load_font(20), anchor="mm")
    with written_beside(path) as part:
        sheet.save(part, format="PNG", optimize=True)
    return path


def run_diffusers(prompt: str, dtype: torch.dtype, options: argparse.Namespace) -> np.ndarray:
    """Frames `[T, H, W, 3]` uint8 of plain Diffusers."""
    pipe = LattePipeline.from_pretrained(BUNDLED_FOLDER / "solids", dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        video = pipe(
            prompt,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            video_length=9,
            height=96,
            width=96,
            clean_caption=False,
            generator=torch.Generator().manual_seed(options.seed),
        ).frames[0]
    for warning in caught:
        if issubclass(warning.category, RuntimeWarning):
            print(f"Diffusers in {dtype}: {warning.category.__name__}: {warning.message}")
    return np.stack([np.asarray(frame) for frame in video])


def run_stopdown(
    prompt: str, options: argparse.Namespace, precision: str, model: str = "solids"
) -> np.ndarray:
    """Frames `[T, H, W, 3]` uint8 of the command."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/frames/"
        command = [sys.executable, "-m", "stopdown.app.cli", "generate", model, prompt]
        command += ["--steps", str(options.steps), "--seed", str(options.seed), "-o", out]
        command += ["--precision", precision, "--guidance", str(options.guidance)]
        subprocess.run(command, check=True)
        return read_video(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prompt", default="two shiny red spheres coming closer on a lake at sunset"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--frame", type=int, default=8, help="of the split picture")
    options = parser.parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    black = run_diffusers(options.prompt, torch.float16, options)
    made = run_stopdown(options.prompt, options, "fp16")
    print(draw_split(black, made, IMAGES / "split.png", options.frame))
    of_shapes = argparse.Namespace(steps=20, guidance=4.0, seed=0)
    other = run_stopdown(
        "a yellow circle moving left on a cyan background", of_shapes, "fp16", "shapes"
    )
    rows = [("shapes, 64 x 64", other), ("solids, 96 x 96", made)]
    print(draw_contact_sheet(rows, IMAGES / "bundled.png", columns=5, scale=1.5))


if __name__ == "__main__":
    main()
