"""Read number, colour, shape and motion back from a clip's frames, without knowing how it was made.

A place looks the same in every clip, so the checker holds the frames against pictures of empty places.
The place is the one whose picture the most pixels agree with. What differs from it in colour, and not
by being darker as a shadow does, belongs to an object; a reflection in the floor differs too, but half
as much. The pieces that remain are the objects: their number is that of pieces, their colour the
hue of their pixels, their shape follows from the outline, their motion from the path of centres and
areas. The material isn't read: a picture of a dull object and one of a shiny object differ in a few pixels.

**Catches** a wrong number, colour, shape, motion or place, objects that melt into each other or vanish
in a frame. **Doesn't catch** a wrong material, size or shadow.

    cd training && python -m solids.checker --clips 240   # how often it's right on drawn clips
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import ndimage

from solids.scenes import COUNTS, PLACES, SIDE, Scene, draw_place, draw_scene, split_scenes

WORDS = ("count", "colour", "shape", "motion", "place")
UNREADABLE = "unreadable"
SPECK = 0.0012 * SIDE**2
"""Pieces with fewer pixels are no objects."""
FAR = 0.047 * SIDE
"""What an object that moves goes at least, in pixels."""

HUES = {"red": 0.0, "orange": 28.0, "yellow": 56.0, "green": 145.0, "blue": 226.0, "purple": 286.0}
"""Hue of each colour on a screen in white light, in degrees."""

SHARES = {
    "on a checkerboard floor": 0.55,
    "on a beach": 0.3,
    "in a meadow": 0.4,
    "on a lake at sunset": 0.55,
}
"""What a pixel of an object changes by at least, as a share of those that change the most."""

GAPS = {
    "on a checkerboard floor": 2,
    "on a beach": 1,
    "in a meadow": 1,
    "on a lake at sunset": 1,
}
"""How wide gaps in an object are closed, where it has the colour of the place; half the width in pixels."""

Array = np.ndarray


@dataclass(frozen=True)
class Reading:
    """What a clip shows, in the words of a `Scene`; a word is `UNREADABLE` where nothing is made out."""

    count: str
    colour: str
    shape: str
    motion: str
    place: str


@dataclass(frozen=True)
class Piece:
    """An object in one frame.

    Attributes:
        x, y: centre of the bounding box, in pixels.
        area: in pixels, holes included.
        hole: share of the area that is hole.
        tall: height by width of the bounding box.
        top: width near the upper end by the largest width.
        round: overlap with the ellipse that fills the bounding box, by the union of both.
    """

    x: float
    y: float
    area: float
    hole: float
    tall: float
    top: float
    round: float


@cache
def empty_places() -> dict[str, Array]:
    """Draw each place without objects, `[H, W, 3]` fp32 in 0..255."""
    return {place: draw_place(place).astype(np.float32) for place in PLACES}


def measure_change(frame: Array, empty: Array) -> Array:
    """Return how far pixels are from those of the empty place in hue, or above them in brightness.

    A shadow makes pixels darker and leaves their hue.
    """
    factor = (frame * empty).sum(-1) / np.maximum((empty * empty).sum(-1), 1)
    hue = np.linalg.norm(frame - factor[..., None] * empty, axis=-1)
    brighter = np.maximum(factor - 1, 0) * np.linalg.norm(empty, axis=-1)
    return np.hypot(hue, 0.5 * brighter)


def find_objects(frame: Array, place: str) -> Array:
    """Return the pixels `[H, W]` that show objects and not their shadows or reflections.

    Objects are beside each other, so a piece below another one is a reflection.
    """
    change = measure_change(frame, empty_places()[place])
    strong = np.quantile(change, 0.985)
    if strong < 25:
        return np.zeros(change.shape, bool)
    mask = ndimage.binary_opening(change > SHARES[place] * strong)
    mask = ndimage.binary_closing(np.pad(mask, 4), iterations=GAPS[place])[4:-4, 4:-4]
    labels, _ = ndimage.label(mask, np.ones((3, 3)))
    pieces = sorted(enumerate(ndimage.find_objects(labels), 1), key=lambda piece: piece[1][0].start)
    kept: list[slice] = []
    for index, (rows, columns) in pieces:
        own = labels[rows, columns] == index
        end = rows.start + find_waterline(np.where(own, change[rows, columns], np.nan))
        mask[end : rows.stop, columns] &= ~own[end - rows.start :]
        area = int((labels[rows, columns] == index).sum())
        width = columns.stop - columns.start
        shared = [min(columns.stop, x.stop) - max(columns.start, x.start) for x in kept]
        if area < SPECK or any(overlap > 0.5 * width for overlap in shared):
            mask[labels == index] = False
        else:
            kept.append(columns)
    return mask


def find_waterline(change: Array) -> int:
    """Return the row of a piece where its reflection begins, or the number of its rows.

    Only upright pieces are cut, where each row below changes by less than most of those above.

    Args:
        change: `[H, W]`, NaN where the box of the piece isn't the piece.
    """
    height, width = change.shape
    if height <= 1.17 * width:
        return height
    rows = np.nanquantile(change, 0.8, axis=1)
    weak = rows < 0.75 * np.median(rows[:width])
    weak[: int(0.6 * width)] = False
    last_strong = np.flatnonzero(~weak)[-1]
    return int(last_strong) + 1


def measure_pieces(mask: Array) -> list[Piece]:
    """Measure each connected piece of a mask; those below a quarter of the largest are left out."""
    labels, count = ndimage.label(mask, np.ones((3, 3)))
    pieces = []
    for index in range(1, count + 1):
        own = labels == index
        rows, columns = np.flatnonzero(own.any(1)), np.flatnonzero(own.any(0))
        cut = own[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        pieces.append(_measure(cut, columns.mean(), rows.mean()))
    largest = max((piece.area for piece in pieces), default=0)
    return [piece for piece in pieces if piece.area > max(SPECK, 0.25 * largest)]


def _measure(cut: Array, x: float, y: float) -> Piece:
    height, width = cut.shape
    full = ndimage.binary_fill_holes(cut)
    rows, columns = np.ogrid[:height, :width]
    v, u = (2 * rows + 1) / height - 1, (2 * columns + 1) / width - 1
    middle = np.hypot(u, v) < 0.6
    ellipse = np.hypot(u, v) <= 1
    widths = full.sum(1)
    tip = max(1, round(height * 0.2))
    return Piece(
        x=x,
        y=y,
        area=float(full.sum()),
        hole=float((full & ~cut & middle).sum() / full.sum()),
        tall=height / width,
        top=float(widths[:tip].mean() / widths.max()),
        round=float((full & ellipse).sum() / (full | ellipse).sum()),
    )


def name_shape(pieces: list[Piece]) -> str:
    """Name the shape of most of the objects in most of the frames."""
    hole, tall, top, roundness = (
        float(np.median([getattr(piece, name) for piece in pieces]))
        for name in ("hole", "tall", "top", "round")
    )
    if hole > 0.08:
        return "ring"
    if top < 0.4:
        return "cone"
    if tall > 1.17:
        return "cylinder"
    return "sphere" if roundness - top > 0.26 else "cube"


def name_motion(frames: list[list[Piece]]) -> str:
    """Name the motion from centres and areas of all objects, frame by frame."""
    x = np.array([np.mean([piece.x for piece in pieces]) for pieces in frames])
    y = np.array([np.mean([piece.y for piece in pieces]) for pieces in frames])
    area = np.array([np.mean([piece.area for piece in pieces]) for pieces in frames])
    if area[-2:].mean() > 1.6 * area[:2].mean():
        return "coming closer"
    middle = len(y) // 2
    rise = (y[:2].mean() + y[-2:].mean()) / 2 - y[middle - 1 : middle + 2].mean()
    across = x[-2:].mean() - x[:2].mean()
    if rise > max(FAR, abs(across)):
        return "bouncing"
    if abs(across) > FAR:
        return "moving right" if across > 0 else "moving left"
    return UNREADABLE


def name_colour(pixels: Array) -> str:
    """Name the hue of the more colourful half of pixels `[N, 3]`."""
    spread = pixels.max(1) - pixels.min(1)
    red, green, blue = pixels[spread >= np.median(spread)].mean(0)
    angle = np.degrees(np.arctan2(np.sqrt(3) * (green - blue), 2 * red - green - blue)) % 360
    return min(HUES, key=lambda name: min(abs(angle - HUES[name]), 360 - abs(angle - HUES[name])))


def read_clip(frames: Array) -> Reading:
    """Read what a clip shows.

    Args:
        frames: `[T, H, W, 3]` uint8.
    """
    clip = frames.astype(np.float32)
    apart = {
        place: float(np.median(np.abs(clip - empty).mean(-1)))
        for place, empty in empty_places().items()
    }
    place = min(apart, key=lambda name: apart[name])
    if apart[place] > 25:
        place = UNREADABLE
        return Reading(UNREADABLE, UNREADABLE, UNREADABLE, UNREADABLE, place)
    masks = [find_objects(frame, place) for frame in clip]
    measured = [measure_pieces(mask) for mask in masks]
    if not all(measured):
        return Reading(UNREADABLE, UNREADABLE, UNREADABLE, UNREADABLE, place)
    number, often = Counter(len(pieces) for pieces in measured).most_common(1)[0]
    words = {number: word for word, number in COUNTS.items()}
    sure = often > len(frames) // 2 and number in words
    pixels = np.concatenate([frame[mask] for frame, mask in zip(clip, masks, strict=True)])
    return Reading(
        count=words[number] if sure else UNREADABLE,
        colour=name_colour(pixels),
        shape=name_shape([piece for pieces in measured for piece in pieces]),
        motion=name_motion(measured),
        place=place,
    )


def compare(found: Reading, wanted: Scene) -> dict[str, bool]:
    """Return which words were read right."""
    return {name: getattr(found, name) == getattr(wanted, name) for name in WORDS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Read drawn clips of held-out scenes.")
    parser.add_argument("--clips", type=int, default=240)
    parser.add_argument("--seed", type=int, default=20_000)
    options = parser.parse_args()
    results = []
    for i, scene in enumerate(split_scenes()[1][: options.clips]):
        found = read_clip(draw_scene(scene, options.seed + i))
        results.append(compare(found, scene))
        if not all(results[-1].values()):
            print(json.dumps({"drawn": scene.caption(), "read": vars(found)}), flush=True)
    right = {name: round(sum(r[name] for r in results) / len(results), 4) for name in WORDS}
    whole = round(sum(all(r.values()) for r in results) / len(results), 4)
    print(json.dumps({"clips": len(results), "all": whole, **right}))


if __name__ == "__main__":
    main()
