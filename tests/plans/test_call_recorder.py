"""Calls recorded for a plan: which of many are kept, and what a pipeline is asked with."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.masked_pipelines import make_controlled, make_inpainting
from models.zimage import make_zimage
from stopdown.errors import OptionError, StopdownError
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.plans import call_recorder
from stopdown.plans.call_recorder import MOST_CALLS, _thin_out, list_requests, record_calls


def _call(*args: Any, **kwargs: Any) -> ComponentCall:
    return ComponentCall(Callee("vae.decode", nn.Linear(1, 1), "decode", "decode"), args, kwargs)


def test_few_calls_of_many_are_kept() -> None:
    """The first and the last stay, whatever their number."""
    calls = [_call(i) for i in range(100)]
    kept = _thin_out(calls)
    assert len(kept) == MOST_CALLS
    assert (kept[0].args, kept[-1].args) == ((0,), (99,))
    assert _thin_out(calls[:5]) == calls[:5]


SMALL = Request(height=64, width=64, steps=2)


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
    with pytest.raises(StopdownError) as caught:
        record_calls(pipe, list_requests(pipe, ["a"], Request(arguments={"control_image": 3})))
    message = str(caught.value)
    assert message.startswith("StableDiffusionXLControlNetImg2ImgPipeline stopped: TypeError:")
    with pytest.raises(OptionError, match="No `prompt` was given"):
        record_calls(pipe, list_requests(pipe, [{"control_image": 3}], Request()))


def test_a_run_that_the_model_itself_ends_is_one_message() -> None:
    """A size beyond a model's table of positions fails in fp32 too, and the message says so."""
    pipe = make_zimage()
    request = Request(height=2048, width=32, steps=1)
    with pytest.raises(
        StopdownError, match="ZImagePipeline stopped: IndexError: index 32"
    ) as caught:
        record_calls(pipe, list_requests(pipe, ["a"], request))
    assert caught.value.remedy.startswith(
        "It ran in fp32, so the cause is in the model or the request"
    )
