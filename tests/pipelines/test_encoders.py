"""Text and image encoders that pipelines of Diffusers name: exact, in fp16, nearer than bf16, certified.

A few by default; the slow test takes every row of `benchmarks/encoders.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from models.encoder_models import ENCODERS, NOT_BUILT, asks_for_states, list_encoders

QUICK = {
    "ContextCLIPTextModel": ("left", "none"),  # writes its mask's lowest number from a tensor
    "PreTrainedModel": ("left",),  # asks for Inf in fp16 alone
    "Siglip2VisionModel": ("none",),  # resizes its positions and writes them into an empty tensor
    "Gemma3ForConditionalGeneration": ("none", "right"),  # reads its mask by positions
    "T5GemmaEncoderModel": ("none",),
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import encoders

    yield encoders
    sys.modules.pop("encoders")


def demand_row(script: ModuleType, name: str, mask: str, *, states: bool, ranges: str) -> None:
    """One row of the table has what is promised of all of them."""
    with torch.no_grad():
        row = script.measure_row(name, mask, states=states, ranges=ranges)
    assert row.get("exact"), row
    assert math.isfinite(row["fp16"]), row
    assert row["fp16"] < row["bf16"] / 3, row
    if ranges == "bound":
        assert row["certified"] >= 0.9, row


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(("name", "mask"), [(n, m) for n, masks in QUICK.items() for m in masks])
def test_an_encoder_is_certified(script: ModuleType, name: str, mask: str) -> None:
    """At least nine tenths of its fp16 values have a bound, and it is far nearer to fp32 than bf16."""
    demand_row(script, name, mask, states=False, ranges="bound")


@pytest.mark.slow
def test_every_class_of_the_annotations_is_there() -> None:
    """Each class that pipelines name has a tiny model, or a reason why it has none."""
    assert set(list_encoders()) == {*ENCODERS, *NOT_BUILT}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_every_row_of_an_encoder(script: ModuleType, name: str) -> None:
    """With and without mask, padded on either side, with hidden states where a pipeline asks for them."""
    named = list_encoders()
    for mask, states, ranges in script.list_rows(name, named[name]):
        demand_row(script, name, mask, states=states, ranges=ranges)
    assert asks_for_states(named[name]) == any(x[1] for x in script.list_rows(name, named[name]))
