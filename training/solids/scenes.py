"""Clips of shaded solids in a landscape, drawn from a prompt by a small ray marcher.

A scene is six words: how many objects, their material, colour and shape, how they move, and where.
`Scene.caption` writes a prompt, `read_prompt` reads it back, `draw_scene` draws the clip.

Every pixel has four rays. A ray meets an object only inside of the object's bounding sphere, where it
follows the signed distance to the surface (sphere tracing, Hart 1996). Places don't change, so what a
pixel shows without objects is computed once; a clip adds objects, their shadows and their reflections
in the floor. Light is linear until the last line, where it's encoded for a screen.

A clip is `[9, 96, 96, 3]` uint8. It depends on the scene and a seed alone. No place is dark: a black
frame in a result is always a fault, never a scene.

    cd training && python -m solids.scenes sheet.png   # one clip a row, its prompt below
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

FRAMES, SIDE = 9, 96
RAYS_A_SIDE = 2
"""Rays of a pixel on each axis."""

COUNTS = {"a": 1, "two": 2, "three": 3}
MATERIALS = ("matte", "shiny", "metal")
COLOURS = {
    "red": (0.72, 0.04, 0.05),
    "orange": (0.90, 0.28, 0.03),
    "yellow": (0.90, 0.68, 0.05),
    "green": (0.03, 0.42, 0.12),
    "blue": (0.04, 0.12, 0.75),
    "purple": (0.34, 0.06, 0.58),
}
"""Reflected share of red, green and blue light."""
SHAPES = ("sphere", "cube", "cylinder", "cone", "ring")
MOTIONS = ("moving left", "moving right", "bouncing", "coming closer")
PLACES = ("on a checkerboard floor", "on a beach", "in a meadow", "on a lake at sunset")

TEMPLATES = (
    "{objects} {motion} {place}",
    "{place}, {objects} {motion}",
    "a video of {objects} {motion} {place}",
)
HELD_OUT = 240

Array = np.ndarray


@dataclass(frozen=True)
class Scene:
    """What a clip shows, in words."""

    count: str
    material: str
    colour: str
    shape: str
    motion: str
    place: str

    def caption(self, template: str = TEMPLATES[0]) -> str:
        plural = "" if COUNTS[self.count] == 1 else "s"
        objects = f"{self.count} {self.material} {self.colour} {self.shape}{plural}"
        return template.format(objects=objects, motion=self.motion, place=self.place)


def all_scenes() -> list[Scene]:
    """List every combination of words, in a fixed order."""
    words = itertools.product(COUNTS, MATERIALS, COLOURS, SHAPES, MOTIONS, PLACES)
    return [Scene(*combination) for combination in words]


def all_captions() -> list[str]:
    """List every caption of every scene, in every template."""
    return [scene.caption(template) for scene in all_scenes() for template in TEMPLATES]


def split_scenes(seed: int = 55) -> tuple[list[Scene], list[Scene]]:
    """Divide all scenes into those for training and `HELD_OUT` that are never trained on."""
    scenes = all_scenes()
    order = np.random.default_rng(seed).permutation(len(scenes))
    shuffled = [scenes[i] for i in order]
    return shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def read_prompt(text: str) -> Scene:
    """Read the scene that a caption names.

    Raises:
        ValueError: one of the six words is missing, or there are two for one.
    """
    words = re.findall(r"[a-z]+", text.lower())
    joined = f" {' '.join(words)} "
    singular = {f"{shape}s": shape for shape in SHAPES} | {shape: shape for shape in SHAPES}
    named = [i for i, word in enumerate(words) if word in singular]
    if len(named) != 1 or named[0] < 3:
        raise ValueError(f"{text!r} names no objects: expected e.g. 'two matte red cubes'.")
    count, material, colour, noun = words[named[0] - 3 : named[0] + 1]
    scene = Scene(
        count, material, colour, singular[noun], _find(MOTIONS, joined), _find(PLACES, joined)
    )
    if scene not in _known_scenes() or f" {scene.caption()} ".split()[3] != noun:
        raise ValueError(f"{text!r} isn't a prompt of this model: {scene} has unknown words.")
    return scene


@functools.cache
def _known_scenes() -> frozenset[Scene]:
    return frozenset(all_scenes())


def _find(phrases: Sequence[str], text: str) -> str:
    found = [phrase for phrase in phrases if f" {phrase} " in text]
    if len(found) != 1:
        raise ValueError(f"{text.strip()!r} has {len(found)} of: {', '.join(phrases)}.")
    return found[0]


# --- the camera ---

EYE = np.array([0.0, 1.75, 5.6], np.float32)
_TARGET = np.array([0.0, 0.72, 0.0], np.float32)
_HALF_VIEW = math.tan(math.radians(19.5))


@functools.cache
def camera_rays() -> Array:
    """Return the unit direction of every ray, `[rays, 3]`, rows of the picture from the top."""
    forward = _unit(_TARGET - EYE)
    right = _unit(np.cross(forward, [0.0, 1.0, 0.0]))
    up = np.cross(right, forward)
    count = SIDE * RAYS_A_SIDE
    across = ((np.arange(count) + 0.5) / count * 2 - 1) * _HALF_VIEW
    x, y = np.meshgrid(across, -across)
    rays = forward + x[..., None] * right + y[..., None] * up
    return _unit(rays.reshape(-1, 3)).astype(np.float32)


def _unit(vectors: Array) -> Array:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _dot(first: Array, second: Array) -> Array:
    return np.einsum("...i,...i->...", first, second)


def _mix(first: Array, second: Array, share: Array) -> Array:
    return first + (second - first) * share[..., None]


def _step(low: float, high: float, x: Array) -> Array:
    """Rise smoothly from 0 at `low` to 1 at `high`."""
    t = np.clip((x - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


# --- places ---


@dataclass(frozen=True)
class Light:
    """How a place is lit.

    Attributes:
        sun: unit vector towards the sun.
        sunlight: colour of the sun's light.
        above, below: colour of the light from the sky and from the floor.
        mirror: share of light that the floor reflects at a right angle and at a flat one.
        shade: share of the sun's light that a shadow takes from the floor.
    """

    sun: tuple[float, float, float]
    sunlight: tuple[float, float, float]
    above: tuple[float, float, float]
    below: tuple[float, float, float]
    mirror: tuple[float, float]
    shade: float


LIGHTS = {
    "on a checkerboard floor": Light(
        (-0.55, 0.72, 0.45), (2.1, 2.05, 1.95), (0.55, 0.6, 0.68), (0.3, 0.3, 0.3), (0.18, 0.6), 0.7
    ),
    "on a beach": Light(
        (-0.6, 0.62, 0.5), (2.3, 2.15, 1.85), (0.45, 0.56, 0.7), (0.45, 0.38, 0.26), (0, 0), 0.68
    ),
    "in a meadow": Light(
        (0.55, 0.66, 0.5), (2.3, 2.2, 1.9), (0.42, 0.52, 0.68), (0.16, 0.24, 0.06), (0, 0), 0.7
    ),
    "on a lake at sunset": Light(
        (-0.72, 0.36, 0.6),
        (2.2, 1.45, 0.95),
        (0.62, 0.48, 0.6),
        (0.4, 0.3, 0.34),
        (0.25, 0.8),
        0.35,
    ),
}


def _noise(x: Array, y: Array, seed: int) -> Array:
    """Return value noise in 0..1, with one random value at each whole number of `x` and `y`."""
    column, row = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    u, v = x - column, y - row
    u, v = u * u * (3 - 2 * u), v * v * (3 - 2 * v)
    a, b = _hash(column, row, seed), _hash(column + 1, row, seed)
    c, d = _hash(column, row + 1, seed), _hash(column + 1, row + 1, seed)
    return (a + (b - a) * u) * (1 - v) + (c + (d - c) * u) * v


def _hash(column: Array, row: Array, seed: int) -> Array:
    mixed = (column * 374761393 + row * 668265263 + seed * 982451653) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 1274126177) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 16)) & 0xFFFF).astype(np.float32) / 65535


def _layers(x: Array, y: Array, seed: int, count: int = 4) -> Array:
    """Add `count` noises, each half as large and twice as fine as the one before; 0..1."""
    total = sum(_noise(x * 2.0**i, y * 2.0**i, seed + i) * 0.5**i for i in range(count))
    return total / (2 - 0.5 ** (count - 1))


def _clouds(rays: Array, seed: int) -> Array:
    """Return how much cloud a ray meets, 0..1, none near the horizon."""
    height = np.maximum(rays[:, 1], 0.02)
    x, y = rays[:, 0] / height, rays[:, 2] / height
    return _step(0.48, 0.78, _layers(x * 0.55 + 3, y * 0.3, seed)) * _step(0.03, 0.16, rays[:, 1])


def paint_sky(place: str, rays: Array) -> Array:
    """Return the light of the sky along rays `[N, 3]`, `[N, 3]`; below the horizon as at it."""
    height = np.clip(rays[:, 1], 0, 1)
    azimuth = np.arctan2(rays[:, 0], -rays[:, 2])
    if place == "on a checkerboard floor":
        return _mix(_rgb(0.66, 0.76, 0.90), _rgb(0.14, 0.32, 0.74), _step(0.0, 0.6, height))
    if place == "on a lake at sunset":
        sky = _mix(_rgb(1.0, 0.52, 0.22), _rgb(0.80, 0.30, 0.36), _step(0.0, 0.14, height))
        sky = _mix(sky, _rgb(0.26, 0.18, 0.46), _step(0.10, 0.5, height))
        sun = _unit(_rgb(-0.19, 0.075, -1.0))
        near = np.clip(_dot(rays, np.broadcast_to(sun, rays.shape)), 0, 1)
        glow = near[:, None] ** 60 * _rgb(0.9, 0.5, 0.15)
        disc = _step(0.99905, 0.99945, near)[:, None] * _rgb(1.6, 1.2, 0.6)
        hills = 0.035 + 0.018 * np.sin(azimuth * 9 + 1) + 0.01 * np.sin(azimuth * 23)
        sky = sky + glow + disc
        return _mix(_rgb(0.24, 0.15, 0.26), sky, _step(-0.004, 0.004, height - hills))
    sky = _mix(_rgb(0.66, 0.82, 0.95), _rgb(0.12, 0.34, 0.80), _step(0.0, 0.5, height))
    sky = _mix(sky, _rgb(1.0, 1.0, 1.0), 0.85 * _clouds(rays, 7 if place == "on a beach" else 21))
    if place == "on a beach":
        return sky
    far = 0.055 + 0.03 * np.sin(azimuth * 5 + 0.6) + 0.012 * np.sin(azimuth * 13)
    close = 0.03 + 0.022 * np.sin(azimuth * 7 + 2.4)
    sky = _mix(_rgb(0.22, 0.38, 0.36), sky, _step(-0.004, 0.004, height - far))
    return _mix(_rgb(0.13, 0.30, 0.09), sky, _step(-0.004, 0.004, height - close))


def paint_floor(place: str, x: Array, z: Array) -> Array:
    """Return the share of light that the floor reflects at points, `[N, 3]`."""
    away = np.sqrt(x * x + (z - EYE[2]) ** 2)
    fine = np.exp(-away / 9)
    if place == "on a checkerboard floor":
        square = np.clip(np.sin(x * math.pi) * np.sin((z + 0.5) * math.pi) * 12, -1, 1)
        return _mix(_rgb(0.07, 0.08, 0.10), _rgb(0.70, 0.70, 0.68), 0.5 + 0.5 * square * fine**0.6)
    if place == "on a beach":
        sand = _rgb(0.76, 0.62, 0.42) * (0.88 + 0.24 * _layers(x * 3, z * 3, 3) * fine)[:, None]
        shore = z + 4.6 + 0.35 * np.sin(x * 0.9) + 0.15 * np.sin(x * 2.3 + 1)
        sand = _mix(sand * 0.62, sand, _step(0.0, 0.9, shore))
        waves = 0.9 + 0.25 * _noise(x * 1.2, z * 3, 5)
        sea = _mix(_rgb(0.10, 0.42, 0.46), _rgb(0.03, 0.17, 0.34), _step(0, 14, -shore))
        sea = _mix(sea * waves[:, None], _rgb(0.95, 0.95, 0.95), _step(-0.5, -0.1, shore))
        return _mix(sea, sand, _step(-0.06, 0.06, shore))
    if place == "in a meadow":
        blades = _layers(x * 9, z * 4, 11, 3) * fine + 0.5 * (1 - fine)
        patches = _layers(x * 0.7, z * 0.7, 17, 3)
        grass = _mix(_rgb(0.07, 0.21, 0.02), _rgb(0.30, 0.46, 0.07), 0.65 * blades + 0.35 * patches)
        column, row = np.floor(x * 3.2), np.floor(z * 3.2)
        luck = _hash(column.astype(np.int64), row.astype(np.int64), 29)
        apart = np.hypot(x * 3.2 - column - 0.5, z * 3.2 - row - 0.5)
        petal = _mix(_rgb(0.95, 0.95, 0.9), _rgb(0.95, 0.8, 0.15), (luck > 0.93).astype(np.float32))
        return _mix(grass, petal, (luck > 0.86) * _step(0.24, 0.14, apart) * _step(0.1, 0.35, fine))
    return np.broadcast_to(_rgb(0.10, 0.09, 0.14), (len(x), 3))


def _rgb(*light: float) -> Array:
    return np.array(light, np.float32)


@dataclass(frozen=True)
class Backdrop:
    """A place without objects, ray by ray.

    Attributes:
        sky: light `[rays, 3]`, for rays that miss the floor.
        floor: indices of the rays that meet the floor, `[M]`.
        points: where they meet it, `[M, 3]`.
        lit, shaded: light of those points in the sun and in full shadow, without reflections.
        mirror: share of light that is reflected, `[M]`.
        reflected: light of the sky that is reflected, `[M, 3]`.
        mist: share of the horizon's light over each point, `[M]`.
        horizon: light of the horizon above each point, `[M, 3]`.
    """

    sky: Array
    floor: Array
    points: Array
    lit: Array
    shaded: Array
    mirror: Array
    reflected: Array
    mist: Array
    horizon: Array


@functools.cache
def backdrop(place: str) -> Backdrop:
    """Compute what every ray shows in a place without objects."""
    rays, light = camera_rays(), LIGHTS[place]
    floor = np.flatnonzero(rays[:, 1] < -0.004)
    down = rays[floor]
    distance = -EYE[1] / down[:, 1]
    points = EYE + distance[:, None] * down
    points[:, 1] = 0
    albedo = paint_floor(place, points[:, 0], points[:, 2])
    sun = _unit(_rgb(*light.sun))
    shaded = albedo * _rgb(*light.above)
    sunlight = albedo * _rgb(*light.sunlight) * sun[1] * 0.62
    facing = np.clip(1 + down[:, 1], 0, 1) ** 4
    mirror = light.mirror[0] + (light.mirror[1] - light.mirror[0]) * facing
    up = down * _rgb(1, -1, 1)
    if place == "on a lake at sunset":
        ripple = (_layers(points[:, 0] * 1.6, points[:, 2] * 5, 41, 3) - 0.5) * 0.09
        up = _unit(up + ripple[:, None] * _rgb(0.5, 1.6, 0))
    mist = 1 - np.exp(-np.maximum(distance - 7, 0) / 45)
    return Backdrop(
        sky=paint_sky(place, rays),
        floor=floor,
        points=points,
        lit=shaded + sunlight,
        shaded=shaded + sunlight * (1 - light.shade),
        mirror=mirror.astype(np.float32),
        reflected=paint_sky(place, up),
        mist=mist.astype(np.float32),
        horizon=paint_sky(place, down),
    )


# --- objects ---

HALF_HEIGHT = {"sphere": 1.0, "cube": 0.82, "cylinder": 0.95, "cone": 0.98, "ring": 1.0}
BOUND = {"sphere": 1.001, "cube": 1.43, "cylinder": 1.2, "cone": 1.42, "ring": 1.01}
"""Radius of the sphere around a shape of size 1."""


def distance_to(shape: str, p: Array) -> Array:
    """Return the signed distance from points `[N, 3]` to a shape of size 1 about the origin."""
    x, y, z = p[:, 0], p[:, 1], p[:, 2]
    if shape == "sphere":
        return np.sqrt(_dot(p, p)) - 1
    if shape == "cube":
        q = np.abs(p) - 0.74
        outside = np.sqrt(np.square(np.maximum(q, 0)).sum(-1))
        return outside + np.minimum(q.max(-1), 0) - 0.08
    around = np.sqrt(x * x + z * z)
    if shape == "cylinder":
        return _bevel(around - 0.64, np.abs(y) - 0.88) - 0.07
    if shape == "cone":
        slope = (around * 1.86 + (y - 0.92) * 0.88) / math.hypot(1.86, 0.88)
        return _bevel(slope, -0.94 - y) - 0.04
    return np.sqrt((np.sqrt(x * x + y * y) - 0.69) ** 2 + z * z) - 0.31


def _bevel(first: Array, second: Array) -> Array:
    """Return the distance to the part that two surfaces at a right angle bound."""
    outside = np.sqrt(np.maximum(first, 0) ** 2 + np.maximum(second, 0) ** 2)
    return outside + np.minimum(np.maximum(first, second), 0)


@dataclass(frozen=True)
class Objects:
    """The objects of a clip, frame by frame.

    Attributes:
        shape: of all of them.
        centres: `[frames, count, 3]`, with the floor at height 0.
        sizes: `[count]`.
        turns: about the upright axis, in radians, `[count]`.
    """

    shape: str
    centres: Array
    sizes: Array
    turns: Array


def place_objects(scene: Scene, rng: np.random.Generator) -> Objects:
    """Draw sizes, places and paths of a scene's objects; nothing leaves the picture or overlaps."""
    count = COUNTS[scene.count]
    size = (0.72, 0.52, 0.39)[count - 1] * rng.uniform(0.94, 1.06)
    gap = (0.0, 1.42, 1.10)[count - 1] * rng.uniform(0.97, 1.03)
    sizes = size * rng.uniform(0.95, 1.05, count)
    start = np.zeros((count, 3))
    start[:, 0] = (np.arange(count) - (count - 1) / 2) * gap + rng.uniform(-0.06, 0.06)
    start[:, 1] = sizes * HALF_HEIGHT[scene.shape]
    start[:, 2] = rng.uniform(-0.12, 0.12, count)
    time = np.linspace(-1, 1, FRAMES)
    path = np.zeros((FRAMES, 3))
    travel = (0.85, 0.50, 0.34)[count - 1] * rng.uniform(0.9, 1.1)
    if scene.motion in ("moving left", "moving right"):
        path[:, 0] = travel * time * (1 if scene.motion == "moving right" else -1)
    elif scene.motion == "bouncing":
        path[:, 1] = (0.85, 0.95, 0.95)[count - 1] * rng.uniform(0.9, 1.1) * (1 - time**2)
    else:
        path[:, 2] = np.linspace(-2.6, 0.35, FRAMES) * rng.uniform(0.95, 1.05)
    turns = {"cube": 0.62, "ring": 0.35}.get(scene.shape, 0.0) + rng.uniform(-0.12, 0.12, count)
    return Objects(scene.shape, start[None] + path[:, None], sizes, turns)


@dataclass(frozen=True)
class Pairs:
    """Rays that may meet an object: the object of each, and the ray in the object's own frame.

    Attributes:
        ray: index of the ray, `[N]`.
        frame, object: which object, in which frame, `[N]`.
        origins, directions: `[N, 3]`, scaled and turned so that the object is of size 1 at the origin.
    """

    ray: Array
    frame: Array
    object: Array
    origins: Array
    directions: Array


def _turn(vectors: Array, angle: Array) -> Array:
    """Turn vectors `[N, 3]` about the upright axis by `[N]` radians."""
    cos, sin = np.cos(angle), np.sin(angle)
    x, z = vectors[:, 0], vectors[:, 2]
    turned = np.stack([cos * x + sin * z, vectors[:, 1], cos * z - sin * x], axis=-1)
    return turned.astype(np.float32)


def _pair(
    objects: Objects,
    origins: Array,
    directions: Array,
    frame: Array | None = None,
    skip: Array | None = None,
    margin: float = 1.0,
) -> Pairs:
    """Find the rays that meet bounding spheres.

    Args:
        origins, directions: `[N, 3]` or `[3]`.
        frame: the frame that each ray belongs to; None if rays are the same in all frames.
        skip: the object that each ray starts from, and doesn't meet.
        margin: factor on the radius of the bounding spheres.
    """
    parts = []
    for f, k in np.ndindex(objects.centres.shape[:2]):
        rows = np.flatnonzero((frame == f) & (skip != k)) if frame is not None else slice(None)
        o = origins if origins.ndim == 1 else origins[rows]
        d = directions if directions.ndim == 1 else directions[rows]
        to_centre = (objects.centres[f, k] - o).astype(np.float32)
        along = to_centre @ d if d.ndim == 1 else _dot(np.broadcast_to(to_centre, d.shape), d)
        radius = BOUND[objects.shape] * objects.sizes[k] * margin
        squared = _dot(to_centre, to_centre) - along * along
        hit = np.flatnonzero((squared < radius * radius) & (along > -radius))
        ray = hit if frame is None else rows[hit]
        size = objects.sizes[k]
        own = np.broadcast_to(-to_centre, (len(along), 3))[hit] / size
        towards = np.broadcast_to(d, (len(along), 3))[hit]
        angle = np.full(len(hit), objects.turns[k], np.float32)
        parts.append((ray, f, k, _turn(own, angle), _turn(towards, angle)))
    lengths = [len(part[0]) for part in parts]
    return Pairs(
        ray=np.concatenate([part[0] for part in parts]),
        frame=np.repeat([part[1] for part in parts], lengths),
        object=np.repeat([part[2] for part in parts], lengths),
        origins=np.concatenate([part[3] for part in parts]),
        directions=np.concatenate([part[4] for part in parts]),
    )


def march(
    shape: str, origins: Array, directions: Array, margin: float = 1.0
) -> tuple[Array, Array]:
    """Follow rays to the surface of a shape of size 1.

    Returns:
        distance to the surface, `[N]`, infinite where it isn't met; and how far the ray passes by it, as
        a share of the way, `[N]`.
    """
    along = -_dot(origins, directions)
    nearest = np.sqrt(np.maximum(_dot(origins, origins) - along * along, 0))
    half = np.sqrt(np.maximum((BOUND[shape] * margin) ** 2 - nearest**2, 0))
    t = np.maximum(along - half, 0.0).astype(np.float32)
    leave = along + half
    met = np.full(len(t), np.inf, np.float32)
    apart = np.full(len(t), np.inf, np.float32)
    rows = np.arange(len(t))
    for _ in range(80):
        distance = distance_to(shape, origins[rows] + t[rows, None] * directions[rows])
        apart[rows] = np.minimum(apart[rows], distance / np.maximum(t[rows], 0.05))
        near = distance < 0.002
        met[rows[near]] = t[rows[near]]
        t[rows] += np.maximum(distance, 0.002)
        rows = rows[~near & (t[rows] < leave[rows])]
        if not len(rows):
            break
    return met, apart


def normals(shape: str, p: Array) -> Array:
    """Return the unit normals of a shape of size 1 at points on its surface, by differences."""
    total = np.zeros_like(p)
    for corner in _CORNERS:
        total += corner * distance_to(shape, p + 0.003 * corner)[:, None]
    return _unit(total)


_CORNERS = np.array([(1, -1, -1), (-1, -1, 1), (-1, 1, -1), (1, 1, 1)], np.float32)


def find_shadows(
    objects: Objects,
    points: Array,
    sun: Array,
    frame: Array | None = None,
    skip: Array | None = None,
) -> Array:
    """Return how much of the sun points see, 0..1: `[frames, N]`, or `[N]` for points of one frame each."""
    pairs = _pair(objects, points, sun, frame, skip, margin=1.3)
    met, apart = march(objects.shape, pairs.origins, pairs.directions, margin=1.3)
    seen = np.where(np.isfinite(met), 0.0, _step(0.0, 0.16, apart)).astype(np.float32)
    shape = (len(points),) if frame is not None else (FRAMES, len(points))
    light = np.ones(shape, np.float32)
    np.minimum.at(light, pairs.ray if frame is not None else (pairs.frame, pairs.ray), seen)
    return light


def shade(scene: Scene, points: Array, normal: Array, rays: Array, seen: Array) -> Array:
    """Return the light that objects send back along rays.

    Args:
        points, normal, rays: `[N, 3]`; rays point away from the eye.
        seen: share of the sun that each point sees, `[N]`.
    """
    light = LIGHTS[scene.place]
    albedo = _rgb(*COLOURS[scene.colour])
    sun = _unit(_rgb(*light.sun))
    facing = np.maximum(normal @ sun, 0) * seen
    upwards = 0.5 + 0.5 * normal[:, 1]
    covered = 0.45 + 0.55 * _step(0.0, 0.55, points[:, 1] + 0.25 * normal[:, 1])
    around = _mix(_rgb(*light.below), _rgb(*light.above), upwards) * covered[:, None]
    diffuse = albedo * (around + facing[:, None] * _rgb(*light.sunlight) * 0.58)
    if scene.material == "matte":
        return diffuse
    mirrored = rays - 2 * _dot(rays, normal)[:, None] * normal
    surroundings = look_around(scene.place, points, mirrored)
    half = _unit(sun - rays)
    spot = np.maximum(_dot(half, normal), 0) * (seen > 0.3)
    flat = np.clip(1 + _dot(rays, normal), 0, 1) ** 5
    if scene.material == "shiny":
        glint = (spot**90)[:, None] * _rgb(*light.sunlight) * 1.1
        return _mix(diffuse, surroundings, 0.05 + 0.55 * flat) + glint
    grey = surroundings.mean(-1, keepdims=True)
    tinted = (0.2 * surroundings + 0.8 * grey) * np.minimum(albedo * 1.5 + 0.05, 1)
    tinted = _mix(tinted * 1.25, surroundings, 0.5 * flat)
    glint = (spot**40)[:, None] * _rgb(*light.sunlight) * (0.35 + 0.65 * albedo)
    return 0.22 * diffuse + 0.9 * tinted + glint


def look_around(place: str, points: Array, rays: Array) -> Array:
    """Return the light that comes to points from sky and floor, without objects, `[N, 3]`."""
    seen = paint_sky(place, rays)
    down = np.flatnonzero(rays[:, 1] < -0.02)
    distance = points[down, 1] / -rays[down, 1]
    met = points[down] + distance[:, None] * rays[down]
    light = LIGHTS[place]
    floor = paint_floor(place, met[:, 0], met[:, 2]) * (
        _rgb(*light.above) + _rgb(*light.sunlight) * 0.45
    )
    if place == "on a lake at sunset":
        floor = 0.35 * floor + 0.65 * paint_sky(place, rays[down] * _rgb(1, -1, 1))
    seen[down] = _mix(floor, seen[down], 1 - np.exp(-distance / 14))
    return seen


def _light_of_hits(
    scene: Scene, objects: Objects, pairs: Pairs, origins: Array, directions: Array
) -> tuple[Array, Array, Array]:
    """Follow pairs, and light the nearest object of each ray and frame.

    Args:
        origins, directions: of all rays, `[N, 3]` or `[3]`.

    Returns:
        frame, ray and light of what is met.
    """
    met, _ = march(objects.shape, pairs.origins, pairs.directions)
    found = np.flatnonzero(np.isfinite(met))
    way = met[found] * objects.sizes[pairs.object[found]]
    order = np.lexsort((way, pairs.ray[found], pairs.frame[found]))
    place = pairs.frame[found][order] * np.int64(len(directions)) + pairs.ray[found][order]
    first = np.ones(len(order), bool)
    first[1:] = place[1:] != place[:-1]
    rows, way = found[order[first]], way[order[first]]
    frame, ray, which = pairs.frame[rows], pairs.ray[rows], pairs.object[rows]
    own = pairs.origins[rows] + met[rows, None] * pairs.directions[rows]
    normal = _turn(normals(objects.shape, own), -objects.turns[which])
    start = origins if origins.ndim == 1 else origins[ray]
    points = start + way[:, None] * directions[ray]
    sun = _unit(_rgb(*LIGHTS[scene.place].sun))
    seen = find_shadows(objects, points + 0.01 * normal, sun, frame, which)
    return frame, ray, shade(scene, points, normal, directions[ray], seen)


def trace(scene: Scene, objects: Objects) -> Array:
    """Return the light of all rays of a clip, `[frames, rays, 3]`."""
    place, rays = backdrop(scene.place), camera_rays()
    sun = _unit(_rgb(*LIGHTS[scene.place].sun))
    seen = find_shadows(objects, place.points, sun) * _contact(objects, place.points)
    floor = place.shaded + (place.lit - place.shaded) * seen[..., None]
    reflected = np.repeat(place.reflected[None], FRAMES, axis=0)
    if place.mirror.max() > 0:
        up = rays[place.floor] * _rgb(1, -1, 1)
        pairs = _pair(objects, place.points, up)
        frame, ray, light = _light_of_hits(scene, objects, pairs, place.points, up)
        reflected[frame, ray] = light
    floor = floor + (reflected - floor) * place.mirror[:, None]
    floor = floor + (place.horizon - floor) * place.mist[:, None]
    image = np.repeat(place.sky[None], FRAMES, axis=0)
    image[:, place.floor] = floor
    frame, ray, light = _light_of_hits(scene, objects, _pair(objects, EYE, rays), EYE, rays)
    image[frame, ray] = light
    return image


def _contact(objects: Objects, points: Array) -> Array:
    """Return how much light reaches the floor beside and below objects, `[frames, N]`."""
    light = np.ones((FRAMES, len(points)), np.float32)
    for f, k in np.ndindex(objects.centres.shape[:2]):
        size, centre = objects.sizes[k], objects.centres[f, k]
        lift = centre[1] / size - HALF_HEIGHT[objects.shape]
        apart = np.square((points[:, [0, 2]] - centre[[0, 2]]) / size).sum(-1)
        light[f] *= 1 - 0.55 * np.exp(-1.6 * apart - 2.2 * lift)
    return light


def draw_scene(scene: Scene, seed: int) -> Array:
    """Draw a clip, `[9, 96, 96, 3]` uint8; sizes, places and speeds depend on the seed alone."""
    rng = np.random.default_rng([seed, 55])
    return to_screen(trace(scene, place_objects(scene, rng)))


def draw_place(place: str) -> Array:
    """Draw a place without objects, `[96, 96, 3]` uint8."""
    b = backdrop(place)
    floor = b.lit + (b.reflected - b.lit) * b.mirror[:, None]
    image = b.sky.copy()
    image[b.floor] = floor + (b.horizon - floor) * b.mist[:, None]
    return to_screen(image[None])[0]


def to_screen(light: Array) -> Array:
    """Average the rays of each pixel, and encode light `[frames, rays, 3]` for a screen."""
    frames = light.shape[0]
    bright = np.maximum(light, 0)
    bright = np.where(bright < 0.7, bright, 0.7 + 0.3 * np.tanh((bright - 0.7) / 0.6))
    split = bright.reshape(frames, SIDE, RAYS_A_SIDE, SIDE, RAYS_A_SIDE, 3).mean((2, 4))
    return np.round(np.clip(split, 0, 1) ** (1 / 2.2) * 255).astype(np.uint8)


def draw_sheet(rows: Sequence[tuple[str, Array]], columns: int = 5) -> Image.Image:
    """Draw one clip a row, `columns` of its frames, and its prompt below."""
    shown = np.linspace(0, FRAMES - 1, columns).round().astype(int)
    sheet = Image.new("RGB", (columns * (SIDE + 4), len(rows) * (SIDE + 20)), (252, 252, 250))
    pen = ImageDraw.Draw(sheet)
    for row, (text, clip) in enumerate(rows):
        for column, frame in enumerate(shown):
            sheet.paste(Image.fromarray(clip[frame]), (column * (SIDE + 4), row * (SIDE + 20)))
        pen.text((2, row * (SIDE + 20) + SIDE + 3), text, fill=(32, 32, 36))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a sheet of held-out scenes.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scenes = split_scenes()[1][: options.rows]
    rows = [(s.caption(), draw_scene(s, options.seed + i)) for i, s in enumerate(scenes)]
    draw_sheet(rows).save(options.out)


if __name__ == "__main__":
    main()
