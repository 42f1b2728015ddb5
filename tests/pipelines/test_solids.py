"""The bundled model `solids`: black in plain fp16, right in fp16 with exponents, read by its checker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stopdown
from solids import finish
from solids.checker import read_clip
from solids.scenes import TEMPLATES, all_scenes, split_scenes
from stopdown.app.generate_command import BUNDLED_WORDS, list_unknown_words
from stopdown.numerics import relative_l2
from stopdown.pipelines.dry_run import make_arguments
from stopdown.pipelines.requests import Request, build_arguments, find_steps, list_own_sides
from stopdown.pipelines.skeletons import build_skeleton
from stopdown.sources.sources import BUNDLED_FOLDER, resolve_source

SOLIDS = BUNDLED_FOLDER / "solids"
MOST_BYTES = 25_000_000


def make_clip(pipe: Any, prompt: str) -> np.ndarray[Any, Any]:
    """Frames `[T, H, W, 3]` in 0 to 1."""
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        prompt,
        num_inference_steps=8,
        guidance_scale=2.0,
        video_length=9,
        height=96,
        width=96,
        clean_caption=False,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    )
    frames = torch.as_tensor(made.frames)[0].float().numpy()
    return np.moveaxis(frames, 1, -1) if frames.shape[1] == 3 else frames


@pytest.mark.thorough
def test_it_is_black_in_plain_fp16_and_right_with_exponents() -> None:
    """In fp16 with Stopdown the clip is what was asked for, and nearer to fp32 than bf16's."""
    from diffusers import LattePipeline

    scene = split_scenes()[1][0]
    clips = {
        dtype: make_clip(LattePipeline.from_pretrained(SOLIDS, dtype=dtype), scene.caption())
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    plain = np.nan_to_num(clips[torch.float16] * 255).round()
    assert not np.isfinite(clips[torch.float16]).all() or plain.max() == 0
    pipe = stopdown.load("solids", precision="fp16", device="cpu")
    found = make_clip(pipe, scene.caption())
    want = torch.from_numpy(clips[torch.float32])
    errors = [relative_l2(torch.from_numpy(x), want) for x in (found, clips[torch.bfloat16])]
    assert errors[0] < errors[1]
    read = read_clip((found * 255).round().astype(np.uint8))
    assert (read.count, read.colour, read.shape, read.motion, read.place) == (
        scene.count,
        scene.colour,
        scene.shape,
        scene.motion,
        scene.place,
    )


def test_each_word_of_its_captions_is_known() -> None:
    """Words of no caption are named."""
    source = resolve_source("solids")
    captions = [x.caption(template) for x in all_scenes()[::7] for template in TEMPLATES]
    assert [found for x in captions if (found := list_unknown_words(source, x))] == []
    assert list_unknown_words(source, "two shiny cats on a beach") == ['"cats"']
    for name, (_, _, example) in BUNDLED_WORDS.items():
        assert list_unknown_words(resolve_source(name), example) == []


def test_it_is_called_as_it_was_scored() -> None:
    """Steps, guidance and captions that aren't cleaned are the model's own; what a user asks for wins."""
    pipe = build_skeleton(resolve_source("solids"), {})
    own = finish.RECOMMENDED_CALL
    assert own.items() <= build_arguments(pipe, Request("a ring")).items()
    assert own.items() <= make_arguments(pipe).items()
    assert list_own_sides(pipe, Request("a ring")) == {}  # so that no size is announced
    assert find_steps(pipe, {}) == 8
    asked = build_arguments(pipe, Request("a ring", steps=3, guidance=5.0))
    assert (asked["num_inference_steps"], asked["guidance_scale"]) == (3, 5.0)
    assert find_steps(pipe, asked) == 3


def test_it_is_small() -> None:
    """The package grows by no more than 25 MB."""
    files = [x for x in Path(SOLIDS).rglob("*") if x.is_file()]
    assert sum(x.stat().st_size for x in files) < MOST_BYTES
