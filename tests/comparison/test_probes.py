"""The probe on a pipeline: what it notes of calls and blocks, and that it is gone afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from models.comparisons import SMALL, run_by_hand
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.comparison.probes import Probe, find_block_paths
from stopdown.number_formats import FP16
from stopdown.pipelines.requests import build_arguments
from stopdown.pipelines.results import read_frames
from stopdown.runtime.guard import Guard, GuardOptions


@pytest.fixture(scope="module")
def pipe() -> Any:
    """CogVideoX, tiny, with a transformer that overflows in fp16."""
    return testing.make_pipeline("cogvideox", overflow="transformer")


def test_a_probe_is_silent_and_gone(pipe: Any) -> None:
    """A probed run gives the same bits, and the pipeline is as it was, also after an error."""
    bare = run_by_hand(pipe, "a", 0, torch.float32)
    arguments = build_arguments(pipe, dataclasses.replace(SMALL, prompt="a", steps=2))
    pipe.set_progress_bar_config(disable=True)
    with assert_untouched(pipe), Probe(pipe) as probe, torch.no_grad():
        assert np.array_equal(read_frames(pipe(**arguments)), bare)
    assert len(probe.trace.latents) == 2
    with assert_untouched(pipe), pytest.raises(ZeroDivisionError), Probe(pipe):
        raise ZeroDivisionError


def test_blocks_are_members_of_lists_and_what_stands_beside() -> None:
    """Each block of a list is named, a projection beside the list too, what is inside a block not."""
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2))
    block = torch.nn.Module()
    block.inner = torch.nn.Linear(2, 2)
    model = torch.nn.Module()
    model.first, model.blocks = torch.nn.Linear(2, 2), torch.nn.ModuleList([block, inner])
    assert find_block_paths(model) == ("first", "blocks.0", "blocks.1", "blocks.1.0")


def test_saturated_values_are_counted() -> None:
    """Values at the very end of fp16 are counted in fp16 and nowhere else."""
    pipe = testing.make_pipeline("cogvideox")
    pipe.transformer.half()
    with torch.no_grad():
        pipe.transformer.proj_out.bias.fill_(FP16.largest)
    call = {
        "hidden_states": torch.zeros(1, 2, 4, 4, 4).half(),
        "encoder_hidden_states": torch.zeros(1, 8, pipe.transformer.config.text_embed_dim).half(),
        "timestep": torch.tensor([5]),
    }
    with Probe(pipe) as probe, torch.no_grad():
        pipe.transformer(**call)
    assert probe.trace.saturated > 0


def test_a_repeated_call_is_not_counted_twice() -> None:
    """A guard runs a call once more to find where NaN begins; the probe counts the program's own."""
    pipe = testing.make_pipeline("cogvideox", overflow="transformer")
    pipe.transformer.half()
    call = {
        "hidden_states": torch.ones(1, 2, 4, 4, 4).half(),
        "encoder_hidden_states": torch.ones(1, 8, pipe.transformer.config.text_embed_dim).half(),
        "timestep": torch.tensor([5]),
    }
    counts = set()
    for names_culprit in (True, False):
        settings = GuardOptions(
            on_fault="warn", announce=lambda text: None, names_culprit=names_culprit
        )
        with Guard(pipe, settings).put_on(), Probe(pipe, clamps=True) as probe, torch.no_grad():
            pipe.transformer(**call)
        counts.add((probe.trace.clamped, probe.trace.saturated))
    assert len(counts) == 1
    assert min(counts.pop()) > 0
