"""Whether a call is traced."""

from __future__ import annotations

import torch
from torch import nn

from stopdown.interception.tracing import is_traced


def test_code_is_traced_while_it_is_exported() -> None:
    """A plain call of the same code is not."""
    seen = []

    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(is_traced())
            return x + 1

    module = Asking()
    module(torch.ones(2))
    torch.export.export(module, (torch.ones(2),), strict=False)
    assert not seen[0]
    assert seen[1:]
    assert all(seen[1:])
