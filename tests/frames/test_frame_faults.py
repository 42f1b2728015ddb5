"""Faults of finished frames: black, grey, frozen and noisy, and none in healthy ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stopdown.frames.frame_faults import find_frame_faults

ROWS, COLUMNS = np.mgrid[0:64, 0:64]
DRAWN = np.random.default_rng(0)


def draw_scene(shift: int = 0) -> np.ndarray:
    """A frame with slopes and edges, `[64, 64, 3]` uint8."""
    edges = 120 * (((ROWS + 5 * shift) // 16 + COLUMNS // 16) % 2)
    return np.stack([2 * ROWS, edges + 60, 255 - 2 * COLUMNS], axis=-1).astype(np.uint8)


def fill(*colour: int) -> np.ndarray:
    return np.broadcast_to(np.array(colour, np.uint8), (1, 64, 64, 3)).copy()


def draw_star() -> np.ndarray:
    """A black frame with one faint block of 4x4 pixels."""
    frame = fill(0, 0, 0)
    frame[:, 8:12, 8:12] = 30
    return frame


CLIPS: dict[str, tuple[Callable[[], np.ndarray], list[str]]] = {
    "a scene": (lambda: draw_scene()[None], []),
    "a moving scene": (lambda: np.stack([draw_scene(x) for x in range(4)]), []),
    "black": (lambda: fill(5, 5, 5), ["black"]),
    "grey": (lambda: fill(127, 127, 127), ["grey"]),
    "red": (lambda: fill(200, 20, 20), ["flat"]),
    "a still scene": (lambda: np.stack([draw_scene()] * 4), ["frozen"]),
    "noise": (lambda: DRAWN.integers(0, 256, (1, 64, 64, 3), np.uint8), ["noise"]),
    "a faint star": (draw_star, []),
    "a dark scene": (lambda: (draw_scene() // 10)[None], []),
}


@pytest.mark.parametrize("name", CLIPS)
def test_faults_are_told_from_pictures(name: str) -> None:
    """Each detector finds its fault alone."""
    draw, expected = CLIPS[name]
    assert [fault.kind for fault in find_frame_faults(draw())] == expected


def test_frames_are_looked_at_one_by_one() -> None:
    """An iterator gives the same faults as the clip, with the numbers of the frames."""
    clip = np.stack([draw_scene(0), fill(0, 0, 0)[0], draw_scene(2)])
    (fault,) = find_frame_faults(iter(clip))
    assert (fault.kind, tuple(fault.frames)) == ("black", (1,))
    assert find_frame_faults(clip) == [fault]
