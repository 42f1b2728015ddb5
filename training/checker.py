"""Read colour, shape, direction and background back from a clip, without knowing how it was made.

The background is the median of the border; the figure is what differs from it (its largest connected
piece). Its colour is the median of its pixels; its shape follows from how much of its bounding box it
fills and whether its centre of mass sits below the middle; its direction from the path of that centre.
"""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from scenes import BACKGROUNDS, COLOURS, Scene

ATTRIBUTES = ("colour", "shape", "direction", "background")
UNREADABLE = "unreadable"


def name_colour(value: np.ndarray, palette: dict[str, tuple[int, int, int]]) -> str:
    """The nearest colour of a palette; `value`: `[3]` in 0..255."""
    return min(palette, key=lambda name: float(np.square(value - np.array(palette[name])).sum()))


def find_figure(frame: np.ndarray, background: np.ndarray) -> np.ndarray | None:
    """Mask `[H, W]` of the largest piece that is not background, None when there is none."""
    apart = np.abs(frame.astype(float) - background).max(axis=-1)
    mask = apart > max(24.0, 0.5 * np.quantile(apart, 0.99))
    pieces, count = ndimage.label(mask)
    if not count:
        return None
    sizes = ndimage.sum_labels(mask, pieces, range(1, count + 1))
    if sizes.max() < 20:
        return None
    return pieces == 1 + int(np.argmax(sizes))


def measure_figure(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Centre x and y in pixels, share of the bounding box filled, centre of mass below the middle."""
    mask = trim(mask)
    rows, columns = np.nonzero(mask)
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    lower = (rows.mean() - (rows.min() + rows.max()) / 2) / height
    return columns.mean(), rows.mean(), len(rows) / (height * width), lower


def trim(mask: np.ndarray) -> np.ndarray:
    """Without the rows and columns that hold less than a quarter of the fullest: trails, stray pixels."""
    rows, columns = mask.sum(axis=1), mask.sum(axis=0)
    kept = np.outer(rows >= rows.max() / 4, columns >= columns.max() / 4)
    return mask & kept


def name_shape(fill: float, lower: float) -> str:
    if lower > 0.07:
        return "triangle"
    if fill > 0.9:
        return "square"
    return "circle" if fill > 0.67 else "cross"


def name_direction(dx: float, dy: float) -> str:
    if max(abs(dx), abs(dy)) < 4:
        return "still"
    if abs(dx) > abs(dy):
        return "right" if dx > 0 else "left"
    return "down" if dy > 0 else "up"


def read_clip(frames: np.ndarray) -> Scene:
    """What a clip shows; a word is `UNREADABLE` where nothing can be made out.

    Args:
        frames: `[T, H, W, 3]` uint8.
    """
    edges = (frames[:, :2], frames[:, -2:], frames[:, :, :2], frames[:, :, -2:])
    border = np.concatenate([edge.reshape(-1, 3) for edge in edges])
    ground = np.median(border, axis=0)
    background = name_colour(ground, BACKGROUNDS)
    figures = [find_figure(frame, ground) for frame in frames]
    if any(figure is None for figure in figures):
        return Scene(UNREADABLE, UNREADABLE, UNREADABLE, background)
    pixels = np.concatenate([frame[mask] for frame, mask in zip(frames, figures, strict=True)])
    measures = np.array([measure_figure(mask) for mask in figures])
    fill, lower = np.median(measures[:, 2]), np.median(measures[:, 3])
    dx, dy = measures[-1, :2] - measures[0, :2]
    colour = name_colour(np.median(pixels, axis=0), COLOURS)
    return Scene(colour, name_shape(fill, lower), name_direction(dx, dy), background)


def compare(found: Scene, wanted: Scene) -> dict[str, bool]:
    """Which attributes were read right."""
    return {name: getattr(found, name) == getattr(wanted, name) for name in ATTRIBUTES}
