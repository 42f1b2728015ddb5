"""Calls whose code reads values: exponents hold for those that lead it the same way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stopdown.errors import ScalingError
from stopdown.numerics import relative_l2
from stopdown.runtime.guard import guard
from stopdown.scaling.rescale import rescale_


class Reading(nn.Module):
    """Goes another way for one item than for several, and overflows in both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        if count.item() > 1:
            return self.out(self.norm(x))
        return self.out(torch.tanh(x * 1e-5))  # the values themselves, and not their ratio


def make_reading() -> tuple[Reading, torch.Tensor]:
    torch.manual_seed(0)
    module = Reading().eval().requires_grad_(False)
    module.up.weight.mul_(2.0**9)
    module.down.weight.mul_(2.0**9)
    return module, torch.randn(3, 8)


def test_a_guard_compares_what_is_read() -> None:
    """Each call is nearer to fp32 than bf16's, whichever value its code reads; its way alone counts."""
    module, x = make_reading()
    counts = [torch.tensor(one) for one in (2, 1, 3, 2, 1)]
    wanted = [module(x, count) for count in counts]
    bf16 = copy.deepcopy(module).bfloat16()
    errors = [relative_l2(bf16(x.bfloat16(), n), y) for n, y in zip(counts, wanted, strict=True)]
    told: list[str] = []
    with guard(module.half(), announce=told.append):
        for count, right, error in zip(counts, wanted, errors, strict=True):
            assert relative_l2(module(x.half(), count), right) < error / 2
    assert not any("reads 3" in text for text in told)


def test_rescaling_refuses_another_way() -> None:
    """In fp32 every bit is the same for values that lead the code the same way; others are refused."""
    module, x = make_reading()
    wanted = [module(x, torch.tensor(count)) for count in (2, 3)]
    rescale_(module, (x, torch.tensor(2)))
    assert torch.equal(module(x, torch.tensor(2)), wanted[0])
    assert torch.equal(module(x, torch.tensor(3)), wanted[1])
    with pytest.raises(ScalingError, match="with reads 1, without reads 2"):
        module(x, torch.tensor(1))
