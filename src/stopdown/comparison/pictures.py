"""Frames made small enough for a report: one sheet of pictures for each clip, within a size.

A clip is kept lossless when that fits; otherwise its quality, then its size and its frames are
lowered until it does.
"""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np

from stopdown.comparison.records import Sheet

Frames = np.ndarray[Any, Any]

WHOLE_BYTES = 20_000_000
"""Pictures of a whole report, before base64 makes them a third larger: 30 MB with everything."""

_LONGEST_SIDE = 16383
"""WebP has no larger pictures."""

_TRIALS = ((1.0, 0), (1.0, 90), (1.0, 75), (0.75, 75), (0.5, 75), (0.5, 50), (0.35, 50), (0.25, 40))
"""Scale and quality, from the best; quality 0 stands for lossless."""


def share_bytes(cells: int) -> int:
    """Bytes for the frames of one cell, so that a whole report stays under 30 MB."""
    return max(4_000, WHOLE_BYTES * 3 // 4 // max(1, cells))


def make_sheet(frames: Frames, most_bytes: int) -> Sheet:
    """A clip as one picture.

    Args:
        frames: `[T, H, W, 3]` uint8, or `[T, H, W]` for grey.
        most_bytes: of the file; the smallest trial is kept when none fits.
    """
    every = 1
    while True:
        chosen = frames[::every]
        for scale, quality in _TRIALS:
            sheet = _draw(chosen, scale, quality, every)
            if sheet is not None and len(sheet.data) * 3 // 4 <= most_bytes:
                return sheet
        if len(chosen) <= 8 and sheet is not None:
            return sheet
        every *= 2


def _draw(frames: Frames, scale: float, quality: int, every: int) -> Sheet | None:
    from PIL import Image

    height, width = (max(1, round(size * scale)) for size in frames.shape[1:3])
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    if max(columns * width, rows * height) > _LONGEST_SIDE:
        return None
    mode = "RGB" if frames.ndim == 4 else "L"
    sheet = Image.new(mode, (columns * width, rows * height))
    for index, frame in enumerate(frames):
        picture = Image.fromarray(frame)
        if scale != 1.0:
            picture = picture.resize((width, height), Image.Resampling.LANCZOS)
        sheet.paste(picture, (index % columns * width, index // columns * height))
    held = io.BytesIO()
    sheet.save(held, "WEBP", lossless=quality == 0, quality=quality or 80, method=4)
    data = base64.b64encode(held.getvalue()).decode("ascii")
    return Sheet(width, height, len(frames), columns, every, "image/webp", data)
