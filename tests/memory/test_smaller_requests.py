"""Sizes of runs without a requested size: those of the configs, and smaller where memory is short."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from models.pipeline_calls import make_pipeline
from stopdown import testing
from stopdown.devices.device_profiles import find_profile
from stopdown.dtype_rules.sum_overflow import check_sums, run_pipeline
from stopdown.memory.smaller_requests import choose_size
from stopdown.pipelines.requests import Request, build_arguments, name_pipeline_arguments

PICTURE = np.full((24, 40, 3), 128, np.uint8)
PLENTY = 2**40


def make_arguments(name: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of a tiny pipeline's call, with no sizes but those of `options`."""
    given = {"image": PICTURE} if name == "svd" else {"prompt": "a"}
    return name_pipeline_arguments(type(make_pipeline(name)), Request(**given, **options))


@pytest.mark.thorough
def test_a_small_model_runs_at_the_size_of_its_configs() -> None:
    """SVD's default is 576x1024 for every checkpoint; this one is made for 32x32."""
    sizes, why = choose_size(make_pipeline("svd"), make_arguments("svd"), memory_bytes=PLENTY)
    assert (sizes, why) == ({"height": 32, "width": 32}, "")


@pytest.mark.parametrize("options", [{"height": 576}, {"frames": 3}])
def test_a_size_that_was_asked_for_is_left_alone(options: dict[str, int]) -> None:
    """Whatever it takes."""
    arguments = make_arguments("svd", **options)
    assert choose_size(make_pipeline("svd"), arguments, memory_bytes=1) == ({}, "")


def test_a_default_that_the_configs_decide_stays() -> None:
    """Stable Diffusion asks its configs itself."""
    arguments = make_arguments("sd")
    assert choose_size(make_pipeline("sd"), arguments, memory_bytes=PLENTY) == ({}, "")


def test_a_size_that_comes_with_a_picture_is_left_alone() -> None:
    """Image to image makes what it is given; there is nothing to choose."""
    import diffusers

    pipe = diffusers.StableDiffusionImg2ImgPipeline(
        **make_pipeline("sd").components, requires_safety_checker=False
    )
    arguments = build_arguments(pipe, Request("a", image=PICTURE))
    assert choose_size(pipe, arguments, memory_bytes=1) == ({}, "")


@pytest.mark.thorough
def test_what_does_not_fit_is_run_smaller_and_says_so() -> None:
    """The forecast is made before the run, and names both sizes and both amounts of memory."""
    sizes, why = choose_size(make_pipeline("sd"), make_arguments("sd"), memory_bytes=1)
    assert sizes == {"height": 8, "width": 8}
    assert why == (
        "It was run at 8x8 and not at 32x32, where a run in fp32 takes 0.0 GiB, and 0.0 GiB are there "
        "for it."
    )


def test_sums_are_looked_at_where_the_default_would_take_all_memory() -> None:
    """At 576x1024 the scores alone of this tiny model's attention take 65 GB."""
    pipe = testing.make_pipeline("svd", dtype=torch.float16)
    pipe.set_progress_bar_config(disable=True)
    sizes: list[Any] = []
    pipe.unet.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[-2:]))
    run = functools.partial(run_pipeline, pipe, {})
    (found,) = check_sums(pipe, {"unet"}, find_profile("a100"), run)
    assert found.severity == "note"
    assert set(sizes) == {torch.Size((8, 8))}
