"""Networks of one branch, whose stream leaves fp16."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WIDTH = 16


class Branch(nn.Module):
    """One residual branch: a norm, a gate or an attention, a linear back into the stream."""

    def __init__(self, body: str) -> None:
        super().__init__()
        self.kind = body
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH if body == "attention" else 2 * WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(getattr(self, f"_{self.kind}")(self.wide(self.norm(x))))

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = x.chunk(2, dim=-1)
        return functional.silu(gate) * value

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = x.unflatten(-1, (3, 2, WIDTH // 2)).unbind(-3)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(1, 2).flatten(2)


class Network(nn.Module):
    """An embedding, a branch, a final norm and a projection."""

    def __init__(self, body: str) -> None:
        super().__init__()
        self.embed, self.branch = nn.Linear(4, WIDTH), Branch(body)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.branch(self.embed(x))))


def make_overflowing(body: str = "gated") -> tuple[Network, torch.Tensor]:
    torch.manual_seed(0)
    module = Network(body).eval().requires_grad_(False)
    module.embed.weight.mul_(2.0**20)
    return module, torch.randn(2, 5, 4)


def copy_state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}
