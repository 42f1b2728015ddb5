"""Functions that were set on parts before a module is captured run with the module's own weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn

from stopdown.numerics import relative_l2
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.graph.module_copies import copy_module
from stopdown.scaling.rescale import rescale_


class Net(nn.Module):
    """A stream that overflows before and behind its block."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.block, self.leave = (
            nn.Linear(32, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        out: torch.Tensor = self.leave(self.norm(x + self.block(self.norm(x))))
        return out


def make_net() -> Net:
    torch.manual_seed(0)
    net = Net().eval().requires_grad_(False)
    net.enter.weight.mul_(1e5)
    net.block.weight.mul_(1e5)
    return net


def replace_by_closure(net: Net) -> None:
    before = net.block.forward
    net.block.forward = lambda x: 2 * before(x)  # type: ignore[method-assign]


def merge_tokens(net: Net) -> None:
    """Half of the tokens go through the block, and come out twice."""
    before, merging = net.block.forward, [net.block]

    def forward(x: torch.Tensor) -> torch.Tensor:
        mean = (x[0::2] + x[1::2]) / 2
        return torch.repeat_interleave(before(mean) + 0 * merging[0].bias, 2, 0)

    net.block.forward = forward  # type: ignore[method-assign]


def replace_whole(net: Net) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        h = net.enter(x)
        out: torch.Tensor = net.leave(net.norm(h + 2 * net.block(net.norm(h))))
        return out

    net.forward = forward  # type: ignore[method-assign]


def ask_for_the_layer(net: Net) -> None:
    block = net.block

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return (256 if self is block else 1) * nn.Linear.forward(self, x)

    net.block.forward = MethodType(forward, net.block)  # type: ignore[method-assign]


def replace_by_defaults(net: Net) -> None:
    def forward(x: torch.Tensor, *, layer: nn.Linear = net.block, times: int = 1) -> torch.Tensor:
        return times * nn.Linear.forward(layer, x)

    net.block.forward = partial(forward, times=2)  # type: ignore[method-assign]


def hook_another_part(net: Net) -> None:
    net.block.register_forward_hook(
        lambda _, given, out: out + nn.Linear.forward(net.block, given[0])
    )


@pytest.mark.parametrize(
    "replace",
    [
        replace_by_closure,
        merge_tokens,
        replace_whole,
        ask_for_the_layer,
        replace_by_defaults,
        hook_another_part,
    ],
)
def test_replaced_functions_are_captured(replace: Callable[[Net], None]) -> None:
    """A function that was set before `rescale_` is captured: exact in fp32, finite in fp16."""
    net, plain = make_net(), make_net()
    replace(net)
    replace(plain)
    calls = [torch.randn(4, 32, generator=torch.Generator().manual_seed(3)), torch.randn(8, 32)]
    wanted = [plain(x) for x in calls]
    rescaling = rescale_(net, calls[0])
    assert all(torch.equal(net(x), y) for x, y in zip(calls, wanted, strict=True))
    cast_(net, torch.float16, rescaling)
    found = [net(x.half()) for x in (*calls, *calls)]
    assert max(relative_l2(x, y) for x, y in zip(found, [*wanted, *wanted], strict=True)) < 1e-3


def test_a_copy_closes_over_itself() -> None:
    """Functions of a copy know its own parts and tensors, themselves, and what is not of the module."""
    net, other = make_net(), nn.Linear(2, 2)
    cell: list[object] = [net.block, net.norm.weight, other]

    def forward(x: torch.Tensor) -> object:
        return forward, cell, {"part": net.enter}

    net.forward = forward  # type: ignore[method-assign, assignment]
    copied = copy_module(net, {})
    itself, held, named = copied.forward(torch.ones(1))
    assert itself is copied.forward
    assert held == [copied.block, copied.norm.weight, other]
    assert named["part"] is copied.enter
    assert net.forward(torch.ones(1))[1] is cell
    assert copy.deepcopy(net).forward is forward
