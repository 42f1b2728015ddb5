"""A module that overflows in fp16 and returns what it computes in any form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))


class Returning(nn.Module):
    """A linear that overflows in fp16, and another form of what it gives."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.form = nn.Linear(16, 16), form
        self.eval().requires_grad_(False)
        self.wide.weight.mul_(2.0**18)

    def forward(self, x: torch.Tensor) -> Any:
        """`[N, 16]`, the same again in the form."""
        return self.form(self.wide(x))
