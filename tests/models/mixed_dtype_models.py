"""A block that mixes dtypes as sgm's do, and a call of it that overflows fp16."""

from __future__ import annotations

import math

import torch
from torch import nn

LARGE = 2.0**18


class GroupNorm32(nn.GroupNorm):
    """Computes in fp32 whatever it gets, as sgm's does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm in fp32, in the dtype that came."""
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


class PartlyHalf(nn.Module):
    """Blocks in 16 bits between layers in fp32, as TRELLIS has them; its last norm has no weight."""

    def __init__(self, *, forgets: bool) -> None:
        """
        Args:
            forgets: the embedding reaches the blocks in fp32.
        """
        super().__init__()
        self.dtype, self.forgets = torch.float32, forgets
        self.enter, self.time_embed, self.leave = (
            nn.Linear(8, 32),
            nn.Linear(8, 32),
            nn.Linear(32, 8),
        )
        self.blocks = nn.ModuleList(ModulatedBlock() for _ in range(2))

    def cast_blocks(self, dtype: torch.dtype) -> PartlyHalf:
        self.blocks.to(dtype)
        self.dtype = dtype
        return self

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        embedded = self.time_embed(torch.cos(t.float()[:, None] * torch.arange(8).float()))
        hidden = self.enter(x).to(self.dtype)
        for block in self.blocks:
            hidden = block(hidden, embedded if self.forgets else embedded.to(self.dtype))
        return self.leave(nn.functional.layer_norm(hidden.to(x.dtype), (32,)))


class ModulatedBlock(nn.Module):
    """A feed-forward whose scale, shift and gate come from an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32, elementwise_affine=False)
        self.up, self.down, self.modulation = (
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Linear(32, 96),
        )

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        scale, shift, gate = self.modulation(nn.functional.silu(embedded))[:, None].chunk(3, -1)
        inner = self.norm(hidden.float()).to(hidden.dtype) * (1 + scale) + shift
        return hidden + self.down(nn.functional.gelu(self.up(inner))) * gate


def make_partly_half(*, forgets: bool) -> PartlyHalf:
    """In fp32, with a residual stream that fp16 cannot hold."""
    torch.manual_seed(0)
    module = PartlyHalf(forgets=forgets).eval().requires_grad_(False)
    for block in module.blocks:
        block.up.weight.mul_(2.0**9)
        block.down.weight.mul_(2.0**9)
    return module
