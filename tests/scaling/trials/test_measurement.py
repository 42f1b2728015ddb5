"""Calls captured and measured for a search, each once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan

from models.rescaling_models import make_overflowing
from stopdown.scaling.graph.capture import capture_call
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.trials import measurement
from stopdown.scaling.trials.call_search import plan_stream
from stopdown.scaling.trials.measurement import Captures


@pytest.mark.thorough
def test_a_call_is_captured_once_as_it_is_and_once_with_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is tried with them; another stream is another capture."""
    made: list[bool] = []

    def count(*given: Any, **options: Any) -> Any:
        made.append("wide" in options)
        return capture_call(*given, **options)

    monkeypatch.setattr(measurement, "capture_call", count)
    module, calls = make_overflowing("T5")
    rescale_(module, calls=calls, residual="fp32").undo()
    assert sorted(made) == [False] * len(calls) + [True] * len(calls)
    captures = measurement.Captures()
    stream = plan_stream(module, calls, captures)
    first = captures.take(calls[0], stream)
    assert captures.take(calls[0], stream) is first
    assert captures.take(calls[0], replace(stream, kept=())) is not first


@pytest.mark.thorough
def test_the_stream_of_a_video_decoder_is_found_in_its_first_frames() -> None:
    """Wan's decoder runs all of its modules for each frame; a few of 12 name the same ones."""
    torch.manual_seed(0)
    module = AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4, temperal_downsample=[False, True, True],
    ).eval()  # fmt: skip
    call = module.decode, (torch.zeros(1, 4, 12, 2, 2),), {"return_dict": False}
    short, whole = Captures(), Captures()
    found = plan_stream(module, [call], short)
    nodes = [len(x.take_short(call).graph.graph.nodes) for x in (short, whole)]
    assert nodes[0] == nodes[1] < 0.6 * len(whole.take(call).graph.graph.nodes)
    whole.take_short = whole.take  # type: ignore[method-assign]
    assert plan_stream(module, [call], whole) == found
    assert len(short.take(call, found).graph.graph.nodes) == len(
        whole.take(call, found).graph.graph.nodes
    )
