"""Exponents of one component from its calls, real and made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models.snapshots import assert_untouched
from stopdown.errors import CaptureError, PlanError, ScalingError
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.plans.exponents import (
    describe_unscaled,
    group_calls,
    leave_out_failing,
    scale_component,
)


class Autoencoder(nn.Module):
    """Its encoder takes only even widths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.requires_grad_(False)
        self.up.weight.mul_(2.0**20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) % 2:
            raise ValueError("an odd number of rows")
        return self.down(x)


def call(module: Any, method: str, rows: int = 4, **options: Any) -> ComponentCall:
    callee = Callee("vae", module, method, "decode")
    return ComponentCall(callee, (torch.randn(rows, 8),), {}, **options)


def test_a_component_is_scaled_and_left_as_it_was() -> None:
    """Exponents without notes, tried."""
    module = Autoencoder()
    with assert_untouched(module):
        scaling, notes = scale_component(module, [call(module, "decode")])
    assert scaling.exponents["up.weight"] < 0
    assert scaling.trial is not None
    assert notes == ()


def test_a_call_that_was_made_up_is_measured_too() -> None:
    """What encoding was measured on is noted."""
    module = Autoencoder()
    calls = [call(module, "decode"), call(module, "encode", made_up=True)]
    scaling, notes = scale_component(module, calls)
    assert notes == (
        "Encoding was measured on what the decoder gave, because the pipeline doesn't encode.",
    )
    assert len(scaling.signatures) == 2


def test_a_made_up_call_that_fails_is_left_out() -> None:
    """The real calls have their exponents, and the reason is noted."""
    module = Autoencoder()
    real, odd = call(module, "decode"), call(module, "encode", rows=3, made_up=True)
    scaling, notes = scale_component(module, [real, odd])
    assert len(scaling.signatures) == 1
    (note,) = notes
    assert note.startswith("Encoding wasn't measured: ")
    assert "an odd number of rows" in note
    even = call(module, "encode", made_up=True)
    assert leave_out_failing(module, [real, odd, even]) == [real, even]
    broken = call(module, "encode", rows=3)  # the pipeline itself made it
    assert leave_out_failing(module, [broken]) == [broken]


def test_calls_of_one_kind_are_together() -> None:
    """Another method and another length are other kinds, in the order of the calls."""
    module = Autoencoder()
    calls = [call(module, "decode"), call(module, "encode"), call(module, "decode")]
    calls.append(call(module, "decode", rows=2))
    groups = group_calls(calls)
    assert [[calls.index(x) for x in group] for group in groups] == [[0, 2], [1], [3]]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ScalingError("It is too large.", remedy="Use bf16."), "It is too large."),
        (CaptureError("It has no graph."), "It has no graph."),
        (PlanError("No plan.", remedy="Make one."), str(PlanError("No plan.", remedy="Make one."))),
        (ValueError("odd\nmore"), "Finding its exponents failed with ValueError: odd"),
    ],
)
def test_a_reason_is_one_sentence(error: Exception, said: str) -> None:
    """Of our errors it is what was found; of others the first line."""
    assert describe_unscaled(error) == said
