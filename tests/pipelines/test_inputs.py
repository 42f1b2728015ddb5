"""Pipelines that start from more than a prompt: masks, control pictures and arguments of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stopdown.dtype_rules.check import check
from stopdown.errors import OptionError
from stopdown.frames.media import write_media
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.plans import call_recorder
from stopdown.plans.call_recorder import list_requests, record_calls
from stopdown.testing import make_pipeline

SMALL = Request(height=64, width=64, steps=2)


def make_inpainting() -> Any:
    """A tiny Stable Diffusion that paints inside a mask."""
    import diffusers

    parts = make_pipeline("sd").components
    return diffusers.StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)


def make_controlled(kind: str) -> Any:
    """A tiny pipeline of a class with a ControlNet."""
    import diffusers

    parts = make_pipeline("sdxl" if "XL" in kind else "sd").components
    if "XL" not in kind:
        parts["requires_safety_checker"] = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = diffusers.ControlNetModel.from_unet(
            parts["unet"], conditioning_embedding_out_channels=(8, 16, 16, 16)
        )
    return getattr(diffusers, kind)(**parts, controlnet=net.eval().requires_grad_(False))


@pytest.mark.thorough
def test_calls_are_recorded_with_a_mask_that_is_given_or_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each run gets the mask, the strength and further arguments; without them they are drawn."""
    pipe, seen = make_inpainting(), list[dict[str, Any]]()

    def note(pipe: Any, request: Request) -> dict[str, Any]:
        seen.append(build_arguments(pipe, request))
        return seen[-1]

    monkeypatch.setattr(call_recorder, "build_arguments", note)
    record_calls(pipe, list_requests(pipe, ["a"], SMALL))
    mask = torch.ones(1, 1, 64, 64)
    own = {"mask_image": mask, "strength": 0.5}
    record_calls(pipe, list_requests(pipe, ["a"], dataclasses.replace(SMALL, arguments=own)))
    drawn, given = seen
    assert np.asarray(drawn["mask_image"]).mean() == pytest.approx(255 / 4, abs=1)
    assert "strength" not in drawn
    assert given["mask_image"] is mask
    assert given["strength"] == 0.5


@pytest.mark.thorough
def test_arguments_are_recorded_as_a_prompt_is() -> None:
    """Arguments in place of a prompt are a run of its own: embeddings, other pictures."""
    pipe = make_controlled("StableDiffusionControlNetPipeline")
    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    embeds = {name: torch.zeros(1, 77, 32) for name in ("prompt_embeds", "negative_prompt_embeds")}
    once = dataclasses.replace(SMALL, steps=1)
    requests = list_requests(pipe, [{"image": picture, **embeds}, {"prompt": "a"}], once)
    recorded = record_calls(pipe, requests)
    assert len(recorded["text_encoder"]) == 2  # the second call alone: a prompt, and an empty one
    assert len(recorded["controlnet"]) == 2


def test_what_a_pipeline_lacks_is_one_message() -> None:
    """What no signature tells is told with the pipeline's own words and what it was not given."""
    pipe = make_controlled("StableDiffusionXLControlNetImg2ImgPipeline")
    with pytest.raises(OptionError) as caught:
        record_calls(pipe, list_requests(pipe, ["a"], Request(arguments={"control_image": 3})))
    message = str(caught.value)
    assert message.startswith(
        "StableDiffusionXLControlNetImg2ImgPipeline did not start: TypeError:"
    )
    with pytest.raises(OptionError, match="No `prompt` was given"):
        record_calls(pipe, list_requests(pipe, [{"control_image": 3}], Request()))


@pytest.mark.thorough
def test_check_runs_what_takes_masks_and_control_pictures() -> None:
    """The run without weights gets a picture for each input that the class cannot do without."""
    for pipe in (
        make_inpainting(),
        make_controlled("StableDiffusionXLControlNetImg2ImgPipeline"),
    ):
        kinds = [finding.kind for finding in check(pipe)]
        assert "unexamined" not in kinds


@pytest.mark.thorough
def test_the_command_line_takes_a_mask_and_a_control_picture(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """`--mask` and `--control-image` are given on; without them the flag is named, and nothing written."""
    noise = np.random.default_rng(0).integers(0, 255, (1, 64, 64, 3), np.uint8)
    picture, out, again = (tmp_path / name for name in ("a.png", "b.png", "c.png"))
    write_media(picture, noise)
    make_controlled("StableDiffusionControlNetPipeline").save_pretrained(tmp_path / "control")
    small = ("--steps", 1, "--height", 64, "--width", 64, "--precision", "fp32")
    code, _, said = run("generate", tmp_path / "control", "a", "-o", out, *small)
    assert code == 2
    assert "StableDiffusionControlNetPipeline needs --control-image (its argument image)" in said
    assert not out.exists()
    given = ("--control-image", picture)
    assert run("generate", tmp_path / "control", "a", "-o", out, *given, *small)[0] == 0
    assert out.exists()
    make_inpainting().save_pretrained(tmp_path / "inpaint")
    masked = ("--image", picture, "--mask", picture)
    assert run("generate", tmp_path / "inpaint", "a", "-o", again, *masked, *small)[0] == 0
    assert again.exists()
