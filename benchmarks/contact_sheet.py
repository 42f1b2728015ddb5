"""The picture in the README: plain Diffusers in fp32, bf16 and fp16, and `stopdown generate`.

Same prompt, same seed. Plain Diffusers is called as its documentation does, and its frames are saved
as it saves them, whatever they hold. Stopdown is called as a command.

    python benchmarks/contact_sheet.py
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
from diffusers import CogVideoXPipeline
from PIL import Image, ImageDraw, ImageFont

from stopdown.files.outputs import written_beside
from stopdown.frames.media import read_video
from stopdown.sources.sources import BUNDLED_FOLDER

SHEET = Path(__file__).parents[1] / "docs" / "images" / "contact-sheet.png"


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


def run_diffusers(prompt: str, dtype: torch.dtype, options: argparse.Namespace) -> np.ndarray:
    """Frames `[T, H, W, 3]` uint8 of plain Diffusers."""
    pipe = CogVideoXPipeline.from_pretrained(BUNDLED_FOLDER / "shapes", torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        video = pipe(
            prompt,
            num_inference_steps=options.steps,
            max_sequence_length=16,
            generator=torch.Generator().manual_seed(options.seed),
        ).frames[0]
    for warning in caught:
        if issubclass(warning.category, RuntimeWarning):
            print(f"Diffusers in {dtype}: {warning.category.__name__}: {warning.message}")
    return np.stack([np.asarray(frame) for frame in video])


def run_stopdown(prompt: str, options: argparse.Namespace) -> np.ndarray:
    """Frames `[T, H, W, 3]` uint8 of the command."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/frames/"
        command = [sys.executable, "-m", "stopdown.app.cli", "generate", "shapes", prompt]
        command += ["--steps", str(options.steps), "--seed", str(options.seed), "-o", out]
        subprocess.run(command, check=True)
        return read_video(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default="a red circle moving left on a grey background")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=SHEET)
    options = parser.parse_args()
    rows = [
        (f"Diffusers {name}", run_diffusers(options.prompt, dtype, options))
        for name, dtype in (
            ("fp16", torch.float16),
            ("bf16", torch.bfloat16),
            ("fp32", torch.float32),
        )
    ]
    rows.append(("stopdown generate", run_stopdown(options.prompt, options)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(draw_contact_sheet(rows, options.out, scale=1.5))


if __name__ == "__main__":
    main()
