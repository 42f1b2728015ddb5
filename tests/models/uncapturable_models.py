"""Models whose code can't be captured as a graph without values."""

from __future__ import annotations

import torch
from torch import nn


class Branching(nn.Module):
    """A branch that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.linear(x).sum() > 0:
            return x
        return -x


class Leaving(nn.Module):
    """Values that leave PyTorch on their way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)
