"""Synthetic pictures, videos and masks as missing inputs of a pipeline, for plans and forecasts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from stopdown.pipelines.allowed_sizes import choose_own_sides, find_own_sides
from stopdown.pipelines.requests import PROMPTS, Request, find_own_frames, list_needed_fields

_SIDE, _FRAMES = 256, 9


def draw_inputs(
    pipe: Any, request: Request, *, sides: tuple[int, int] = (_SIDE, _SIDE), frames: int = _FRAMES
) -> Request:
    """Return a request with the missing pictures, masks and video that the pipeline needs filled in.

    Args:
        sides: height and width of the synthetic inputs, in pixels.
        frames: number of frames of a synthetic video.
    """
    needed = list_needed_fields(type(pipe))
    missing = [name for name in _DRAWN if name in needed and getattr(request, name) is None]
    drawn: dict[str, Any] = {name: _DRAWN[name](sides, frames) for name in missing}
    return dataclasses.replace(request, **drawn)


def complete_request(pipe: Any, request: Request) -> Request:
    """Complete a request for a forecast: add a prompt if needed, and inputs of the model's own size."""
    if "prompt" in list_needed_fields(type(pipe)) and request.prompt is None:
        request = dataclasses.replace(request, prompt=PROMPTS[0])
    own = tuple(choose_own_sides(pipe).values()) or find_own_sides(pipe) or (_SIDE, _SIDE)
    height, width = request.height or own[0], request.width or own[1]
    frames = request.frames or find_own_frames(pipe) or _FRAMES
    return draw_inputs(pipe, request, sides=(height, width), frames=frames)


def _draw_picture(sides: tuple[int, int], frames: int = 1, shift: int = 0) -> np.ndarray[Any, Any]:
    """Draw a picture `[H, W, 3]` uint8 with gradients, edges and noise.

    Args:
        sides: height and width.
        shift: number of the picture in a video, which moves the edges and seeds the noise.
    """
    rows, columns = np.mgrid[0 : sides[0], 0 : sides[1]] % _SIDE
    grain = np.random.default_rng(shift).integers(0, 48, sides)
    edges = 96 * (((rows + 4 * shift) // 32 + columns // 32) % 2)
    return np.stack([rows, edges + grain, 255 - columns], axis=-1).astype(np.uint8)


def _draw_mask(sides: tuple[int, int], frames: int) -> np.ndarray[Any, Any]:
    """Draw a mask `[H, W]` uint8, white in the middle."""
    mask = np.zeros(sides, np.uint8)
    mask[sides[0] // 4 : sides[0] * 3 // 4, sides[1] // 4 : sides[1] * 3 // 4] = 255
    return mask


_DRAWN: dict[str, Callable[[tuple[int, int], int], np.ndarray[Any, Any]]] = {
    "image": _draw_picture,
    "video": lambda sides, frames: np.stack(
        [_draw_picture(sides, shift=number) for number in range(frames)]
    ),
    "mask": _draw_mask,
    "control_image": functools.partial(_draw_picture, shift=1),
}
"""Function that draws each input, by field of a request."""
