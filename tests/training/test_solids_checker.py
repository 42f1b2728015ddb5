"""The checker of `solids` reads drawn clips right, and notices what was changed in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from solids.checker import UNREADABLE, compare, empty_places, name_colour, read_clip
from solids.scenes import COLOURS, FRAMES, PLACES, SHAPES, SIDE, Scene, draw_scene

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("shape", SHAPES)
def test_drawn_clips_are_read_right(shape: str) -> None:
    """Each shape is read in a place, colour, number and motion of its own."""
    row = SHAPES.index(shape)
    scene = Scene(
        ("a", "two", "three")[row % 3],
        ("matte", "shiny", "metal")[row % 3],
        list(COLOURS)[row],
        shape,
        ("moving left", "bouncing", "coming closer", "moving right")[row % 4],
        PLACES[row % 4],
    )
    assert all(compare(read_clip(draw_scene(scene, 7 + row)), scene).values())


def test_wrong_clips_are_noticed() -> None:
    """Frames in reverse, objects that vanish and an object too few are all read as such."""
    scene = Scene("two", "matte", "blue", "sphere", "moving left", "on a beach")
    clip = draw_scene(scene, 3)
    assert read_clip(clip[::-1]).motion == "moving right"
    gone = clip.copy()
    gone[4] = empty_places()[scene.place]
    assert read_clip(gone).count == UNREADABLE
    one = draw_scene(replace(scene, count="a"), 3)
    assert not compare(read_clip(one), scene)["count"]


def test_pictures_of_nothing_are_unreadable() -> None:
    """Noise is no place, an empty place has no objects."""
    noise = np.random.default_rng(0).integers(0, 255, (FRAMES, SIDE, SIDE, 3), np.uint8)
    assert set(vars(read_clip(noise)).values()) == {UNREADABLE}
    for place, empty in empty_places().items():
        still = np.repeat(empty[None].astype(np.uint8), 9, axis=0)
        found = read_clip(still)
        assert (found.place, found.count, found.shape) == (place, UNREADABLE, UNREADABLE)


def test_colours_have_hues_apart() -> None:
    """The colours of objects in white light are read as themselves."""
    for name, light in COLOURS.items():
        pixels = np.array([np.array(light) ** (1 / 2.2) * 255 * share for share in (0.5, 0.8, 1.0)])
        assert name_colour(pixels) == name
