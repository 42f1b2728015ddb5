"""A block that mixes dtypes as sgm's do, and a call of it that overflows fp16."""

from __future__ import annotations

import math

import torch
from torch import nn

LARGE = 2.0**18


class GroupNorm32(nn.GroupNorm):
    """Widens its input by itself, as sgm's does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type(x.dtype)


class TimedBlock(nn.Module):
    """A timestep embedding that is always fp32, a norm that widens itself, a large residual channel."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        super().__init__()
        self.is_pinned, self.time_embed = is_pinned, nn.Linear(8, 16)
        self.skip, self.first, self.second = (nn.Conv1d(n, 16, 1) for n in (4, 4, 16))
        self.norm, self.last = GroupNorm32(4, 16), nn.Conv1d(16, 4, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-math.log(100) * torch.arange(4, dtype=torch.float32) / 4)
        angles = t[:, None].float() * frequencies
        embedded = self.time_embed(torch.cat([angles.cos(), angles.sin()], -1))
        inner = self.first(x)
        hidden = inner if self.is_pinned else self.skip(x)
        hidden = hidden + self.second(torch.tanh(inner)) + embedded[..., None]
        return self.last(torch.tanh(self.norm(hidden)))


def make_block(*, is_pinned: bool = False) -> TimedBlock:
    """The block with random weights, one of them large.

    Args:
        is_pinned: a nonlinearity reads the sum that overflows, so folding alone does not do.
    """
    torch.manual_seed(0)
    block = TimedBlock(is_pinned=is_pinned).eval().requires_grad_(False)
    block.second.weight.mul_(LARGE)
    return block


def make_call() -> tuple[torch.Tensor, torch.Tensor]:
    """Its arguments."""
    return torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([500.0])
