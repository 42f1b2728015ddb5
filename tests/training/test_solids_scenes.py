"""Scenes of `solids`: prompts are read back, clips are the same each time and show what was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from solids import scenes
from solids.scenes import HELD_OUT, SHAPES, TEMPLATES, Scene, all_scenes, read_prompt, split_scenes


def test_prompts_are_read_back() -> None:
    """Each scene comes back from its caption, in every template."""
    for scene in all_scenes():
        assert all(read_prompt(scene.caption(template)) == scene for template in TEMPLATES)


@pytest.mark.parametrize(
    "text",
    [
        "a matte red cube bouncing",
        "a matte red cubes bouncing on a beach",
        "two matte red cube bouncing on a beach",
        "four matte red cubes bouncing on a beach",
        "a matte red cube bouncing on a beach in a meadow",
        "a matte red cube and a matte blue ring bouncing on a beach",
        "red cube",
        "",
    ],
)
def test_other_prompts_are_refused(text: str) -> None:
    """A prompt that lacks a word, or has two for one, names no scene."""
    with pytest.raises(ValueError, match=r"names no objects|isn't a prompt|has \d of"):
        read_prompt(text)


def test_held_out_scenes_are_no_training_scenes() -> None:
    """Both parts together are all scenes, each of them once, and the same each time."""
    training, held_out = split_scenes()
    assert len(held_out) == HELD_OUT
    assert set(training) | set(held_out) == set(all_scenes())
    assert len(training) + len(held_out) == len(all_scenes())
    assert split_scenes() == (training, held_out)


def test_each_word_is_in_training_and_held_out_scenes() -> None:
    """No word is asked for that was never trained on."""
    for part in split_scenes():
        for name in ("count", "material", "colour", "shape", "motion", "place"):
            assert {getattr(s, name) for s in part} == {getattr(s, name) for s in all_scenes()}


@pytest.mark.parametrize("shape", SHAPES)
def test_bounding_spheres_hold_shapes(shape: str) -> None:
    """A shape lies in its bounding sphere, and its lowest point is at its half height."""
    rng = np.random.default_rng(0)
    outside = rng.normal(size=(4000, 3))
    outside *= scenes.BOUND[shape] / np.linalg.norm(outside, axis=1, keepdims=True)
    assert scenes.distance_to(shape, outside.astype(np.float32)).min() > 0
    grid = np.stack(np.meshgrid(*[np.linspace(-1.4, 1.4, 57)] * 3), -1).reshape(-1, 3)
    inside = grid[scenes.distance_to(shape, grid.astype(np.float32)) <= 0]
    assert abs(inside[:, 1].min() + scenes.HALF_HEIGHT[shape]) < 0.06


@pytest.mark.parametrize("shape", SHAPES)
def test_marched_rays_end_on_the_surface(shape: str) -> None:
    """A ray is met on the surface or passes by; those through the middle of a solid are met."""
    rng = np.random.default_rng(1)
    origins = rng.normal(size=(600, 3))
    origins = (4 * origins / np.linalg.norm(origins, axis=1, keepdims=True)).astype(np.float32)
    targets = rng.uniform(-0.9, 0.9, (600, 3)).astype(np.float32)
    directions = targets - origins
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    met, apart = scenes.march(shape, origins, directions)
    hit = np.isfinite(met)
    ends = origins[hit] + met[hit, None] * directions[hit]
    assert np.abs(scenes.distance_to(shape, ends)).max() < 0.01
    assert hit[scenes.distance_to(shape, targets) < -0.02].all()
    assert (apart[~hit] > 0).all()


@pytest.mark.thorough
def test_clips_depend_on_scene_and_seed_alone() -> None:
    """The same seed draws the same clip bit for bit, another one another clip."""
    scene = Scene("a", "shiny", "red", "sphere", "bouncing", "on a beach")
    clip = scenes.draw_scene(scene, 3)
    assert (clip.shape, clip.dtype) == ((9, 96, 96, 3), np.uint8)
    assert np.array_equal(clip, scenes.draw_scene(scene, 3))
    assert not np.array_equal(clip, scenes.draw_scene(scene, 4))


@pytest.mark.thorough
@pytest.mark.parametrize("place", scenes.PLACES)
def test_clips_are_bright_places_with_objects(place: str) -> None:
    """A clip differs from the empty place where its object is, and no frame is dark."""
    empty = scenes.draw_place(place).astype(int)
    clip = scenes.draw_scene(Scene("a", "matte", "red", "ring", "moving left", place), 5)
    changed = (np.abs(clip - empty).max(-1) > 60).mean((1, 2))
    assert ((changed > 0.02) & (changed < 0.3)).all()
    assert clip.mean((1, 2, 3)).min() > 80


@pytest.mark.thorough
@pytest.mark.parametrize("count", scenes.COUNTS)
def test_objects_stay_in_the_picture_and_apart(count: str) -> None:
    """No object leaves the picture's sides; neighbours don't touch."""
    for shape in SHAPES:
        for motion in scenes.MOTIONS:
            for seed in range(20):
                scene = Scene(count, "matte", "red", shape, motion, "on a beach")
                objects = scenes.place_objects(scene, np.random.default_rng(seed))
                sides = np.abs(objects.centres[..., 0]) + objects.sizes
                depth = scenes.EYE[2] - objects.centres[..., 2]
                assert (sides / depth).max() < scenes._HALF_VIEW * 1.04
                gaps = np.diff(objects.centres[..., 0], axis=1)
                assert (gaps > objects.sizes[1:] + objects.sizes[:-1]).all()
