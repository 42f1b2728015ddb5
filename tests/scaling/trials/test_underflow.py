"""Values that fp16 holds few bits of are seen without a trial, where an output rests on them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stopdown.numerics import relative_l2
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.rescale import rescale_


class Gated(nn.Module):
    """A product with a sigmoid, alone or added to what it is made of."""

    def __init__(self, bias: float, adds: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.large, self.out = (nn.Linear(16, 16) for _ in range(3))
        self.adds = adds
        self.gate.weight.data.mul_(0.1)
        self.gate.bias.data.fill_(bias)
        self.large.weight.data.mul_(3000)
        self.requires_grad_(False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        made = torch.sigmoid(self.gate(states)) * self.large(states)
        return states + made if self.adds else made


def measure_errors(module: Gated, residual: str) -> tuple[float, float]:
    """Errors of a module rescaled without a trial, and in bf16."""
    states = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    wanted = module(states)
    bf16 = copy.deepcopy(module).bfloat16()(states.bfloat16())
    rescaling = rescale_(module, states, residual=residual, verify=False)
    cast_(module, torch.float16, rescaling)
    return relative_l2(module(states.half()), wanted), relative_l2(bf16, wanted)


@pytest.mark.parametrize("residual", ["native", "fp32"])
@pytest.mark.parametrize("bias", [-14.5, -17.5])
def test_a_result_that_is_tiny_as_a_whole_is_not_left_to_fp16(bias: float, residual: str) -> None:
    error, bf16 = measure_errors(Gated(bias, adds=False), residual)
    assert error < bf16


def test_what_a_sum_hides_keeps_its_exponents() -> None:
    module = Gated(-14.5, adds=True)
    error, bf16 = measure_errors(module, "native")
    assert error < bf16
    states = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    assert not rescale_(Gated(-14.5, adds=True), states, verify=False).scaling.note
