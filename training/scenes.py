"""Clips of one moving shape, drawn from a description, with their captions.

A scene is four words (colour, shape, direction, background) and a few numbers (size, start, speed).
Shapes are drawn by signed distance with one pixel of anti-aliasing, so a position may lie between
pixels. No background is dark: a black frame in a result is always a fault, never a scene.

All pictures are `[T, 3, H, W]` fp32 in [-1, 1].
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import torch

FRAMES, HEIGHT, WIDTH = 9, 64, 64

COLOURS = {
    "red": (215, 38, 45),
    "green": (35, 150, 60),
    "blue": (45, 75, 215),
    "yellow": (245, 215, 40),
    "purple": (140, 45, 180),
    "white": (248, 248, 248),
}
BACKGROUNDS = {
    "grey": (128, 128, 128),
    "pink": (245, 165, 190),
    "brown": (130, 85, 50),
    "cyan": (115, 215, 225),
    "beige": (220, 200, 160),
}
SHAPES = ("circle", "square", "triangle", "cross")
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}

TEMPLATES = (
    "a {colour} {shape} moving {direction} on a {background} background",
    "a {colour} {shape} moves {direction} on a {background} background",
    "{colour} {shape} moving {direction}, {background} background",
    "on a {background} background, a {colour} {shape} moves {direction}",
    "a video of a {colour} {shape} moving {direction} across a {background} background",
)

HELD_OUT = 120

SPREAD = 3.0
"""How far the middle of a path may lie from the middle of the picture, in pixels."""
RADIUS = (12.0, 13.5)
"""Half the extent of a shape, in pixels: from, to."""

TRAVEL = (14.0, 18.0)
"""How far a shape moves in a clip, in pixels: from, to."""


@dataclass(frozen=True)
class Scene:
    """What a clip shows, in words."""

    colour: str
    shape: str
    direction: str
    background: str

    def caption(self, template: str = TEMPLATES[0]) -> str:
        return template.format(**vars(self))


def all_scenes() -> list[Scene]:
    """Every combination of words, in a fixed order."""
    words = itertools.product(COLOURS, SHAPES, DIRECTIONS, BACKGROUNDS)
    return [Scene(*combination) for combination in words]


def all_captions() -> list[str]:
    """List every caption of every scene, in every template."""
    return [scene.caption(template) for scene in all_scenes() for template in TEMPLATES]


def split_scenes(seed: int = 20) -> tuple[list[Scene], list[Scene]]:
    """Training and held-out scenes: `HELD_OUT` combinations are never trained on."""
    scenes = all_scenes()
    random.Random(seed).shuffle(scenes)
    return scenes[HELD_OUT:], scenes[:HELD_OUT]


def _distance(shape: str, x: torch.Tensor, y: torch.Tensor, radius: float) -> torch.Tensor:
    """Signed distance to the outline in pixels, negative inside; `x`, `y`: offsets from the centre."""
    if shape == "circle":
        return torch.sqrt(x * x + y * y) - radius
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.9 * radius
    if shape == "triangle":
        slope = math.sqrt(3) / 2
        sides = torch.maximum(slope * x - 0.5 * y, -slope * x - 0.5 * y)
        return torch.maximum(sides, y) - 0.62 * radius
    arm, length = 0.36 * radius, 1.1 * radius
    upright = torch.maximum(x.abs() - arm, y.abs() - length)
    level = torch.maximum(x.abs() - length, y.abs() - arm)
    return torch.minimum(upright, level)


def draw(
    shape: str,
    colour: tuple[float, ...],
    background: tuple[float, ...],
    centres: torch.Tensor,
    radius: float,
    size: tuple[int, int] = (HEIGHT, WIDTH),
) -> torch.Tensor:
    """One clip.

    Args:
        shape: one of `SHAPES`.
        colour, background: red, green, blue in 0..255.
        centres: `[T, 2]` fp32, x and y of the centre in pixels.
        radius: half the extent in pixels.
        size: height and width in pixels.

    Returns:
        `[T, 3, H, W]` fp32 in [-1, 1].
    """
    rows = torch.arange(size[0], dtype=torch.float32).view(1, -1, 1)
    columns = torch.arange(size[1], dtype=torch.float32).view(1, 1, -1)
    x = columns - centres[:, 0].view(-1, 1, 1)
    y = rows - centres[:, 1].view(-1, 1, 1)
    alpha = (0.5 - _distance(shape, x, y, radius)).clamp(0, 1).unsqueeze(1)
    paint = torch.tensor(colour, dtype=torch.float32).view(1, 3, 1, 1)
    ground = torch.tensor(background, dtype=torch.float32).view(1, 3, 1, 1)
    return (ground + alpha * (paint - ground)) / 127.5 - 1


def _path(
    direction: str,
    rng: random.Random,
    travel: tuple[float, float] = TRAVEL,
    spread: float = SPREAD,
    radii: tuple[float, float] = RADIUS,
) -> tuple[torch.Tensor, float]:
    """A straight path that stays inside the picture, and a radius."""
    radius = rng.uniform(*radii)
    length = rng.uniform(*travel)
    margin = radius * 1.15 + 1
    dx, dy = DIRECTIONS[direction]
    low, high = margin, WIDTH - 1 - margin
    middle = (WIDTH - 1) / 2
    across = rng.uniform(max(low, middle - spread), min(high, middle + spread))
    along = rng.uniform(
        max(low, middle - length / 2 - spread), min(high, middle + length / 2 + spread) - length
    )
    if dx + dy < 0:
        along += length
    start = (along, across) if dx else (across, along)
    steps = torch.linspace(0, length, FRAMES).view(-1, 1)
    return torch.tensor([start]) + steps * torch.tensor([[dx, dy]]), radius


def draw_scene(
    scene: Scene,
    rng: random.Random,
    spread: float = SPREAD,
    radii: tuple[float, float] = RADIUS,
) -> torch.Tensor:
    """One clip of a scene, `[T, 3, H, W]` fp32 in [-1, 1]; place, size and speed come from `rng`."""
    centres, radius = _path(scene.direction, rng, TRAVEL, spread, radii)
    return draw(scene.shape, COLOURS[scene.colour], BACKGROUNDS[scene.background], centres, radius)


def draw_any(rng: random.Random, travel: tuple[float, float]) -> torch.Tensor:
    """One clip of any scene anywhere, its colours shifted a little, for the autoencoder."""
    scene = rng.choice(all_scenes())
    centres, radius = _path(scene.direction, rng, travel, spread=100.0, radii=(9.0, 12.0))
    colour, background = (
        tuple(min(255.0, max(0.0, value + rng.uniform(-10, 10))) for value in base)
        for base in (COLOURS[scene.colour], BACKGROUNDS[scene.background])
    )
    return draw(scene.shape, colour, background, centres, radius)
