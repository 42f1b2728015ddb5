"""Rotary embeddings as one operation, which ComfyUI's kernels bring."""

from __future__ import annotations

import torch
from torch import nn

from stopdown import cast_, rescale_
from stopdown.numerics import relative_l2


@torch.library.custom_op("stopdown_tests::apply_rope", mutates_args=())
def apply_rope(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both turned, in fp32, with the signature of `comfy_kitchen::apply_rope`."""
    return _turn(xq, freqs_cis), _turn(xk, freqs_cis)


@apply_rope.register_fake
def _(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(xq), torch.empty_like(xk)


@torch.library.custom_op("stopdown_tests::apply_rope1", mutates_args=())
def apply_rope1(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """One turned."""
    return _turn(x, freqs_cis)


@apply_rope1.register_fake
def _(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _turn(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    turned = torch.cat(
        [first * table[0] - second * table[1], first * table[1] + second * table[0]], -1
    )
    return turned.to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(3.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        table = torch.stack([angles.cos(), angles.sin()])
        q, k = torch.ops.stopdown_tests.apply_rope(self.q(x), self.k(x), table)
        v = torch.ops.stopdown_tests.apply_rope1(self.v(x), table)
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v))


def test_what_is_turned_keeps_its_exponent() -> None:
    """Large values, large queries over small keys: folded, exact, nothing pinned."""
    torch.manual_seed(0)
    module = Attention().eval().requires_grad_(False)
    module.q.weight.mul_(2.0**18)
    module.k.weight.mul_(2.0**-18)
    module.v.weight.mul_(2.0**18)
    module.o.weight.mul_(2.0**-18)
    x = torch.randn(1, 3, 8)
    plain = module(x)
    rescaling = rescale_(module, (x,))
    assert rescaling.exponents["q.weight"] == -rescaling.exponents["k.weight"] < 0
    assert rescaling.exponents["v.weight"] == -rescaling.exponents["o.weight"] < 0
    assert not rescaling.pinned
    assert torch.equal(module(x), plain)
    cast_(module, torch.float16, rescaling)
    assert relative_l2(module(x.half()).float(), plain) < 0.01
    rescaling.undo()
