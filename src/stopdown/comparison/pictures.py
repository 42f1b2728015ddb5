"""Frames made small enough for a report: one sheet of pictures for each clip, within a size.

A clip is kept lossless when that fits; otherwise its quality, then its size down to a half, then its
frames are lowered until it does, and its size again at last.
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

_GOOD = ((1.0, 0), (1.0, 90), (1.0, 75), (0.75, 75), (0.5, 75), (0.5, 50))
"""Scale and quality, from the best; quality 0 stands for lossless."""

_POOR = ((0.35, 50), (0.25, 40), (0.15, 40), (0.08, 40), (0.04, 40))

_LEAST = {0: 0.4, 90: 0.06, 75: 0.03, 50: 0.02, 40: 0.0}
"""Bytes a pixel by quality, below which no photograph comes out: such a trial is not made."""


def share_bytes(cells: int) -> int:
    """Bytes for the frames of one cell, so that a whole report stays under 30 MB."""
    return max(4_000, WHOLE_BYTES * 3 // 4 // max(1, cells))


def make_sheet(frames: Frames, most_bytes: int) -> Sheet:
    """A clip as one picture.

    Args:
        frames: `[T, H, W, 3]` uint8, or `[T, H, W]` for grey.
        most_bytes: of the file; the smallest trial is kept when none fits.
    """
    last: Sheet | None = None
    thinned = [every for every in (1, 2, 4, 8) if every == 1 or len(frames) >= 4 * every]
    trials = [(every, *trial) for every in thinned for trial in _GOOD]
    trials += [(thinned[-1], *trial) for trial in _POOR]
    for every, scale, quality in trials:
        pixels = frames[::every].size / frames[0, 0, 0].size * scale**2
        if most_bytes < _LEAST[quality] * pixels:
            continue
        last = _draw(frames[::every], scale, quality, every) or last
        if last is not None and len(last.data) * 3 // 4 <= most_bytes:
            return last
    if last is None:
        raise ValueError(f"frames of {frames.shape[1:3]} pixels fit no sheet")
    return last


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
