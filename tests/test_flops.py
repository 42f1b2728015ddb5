"""The four places that count floating-point operations give the same numbers, and the right ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from stopdown.memory.allocation_tracker import StorageTracker
from stopdown.numerics import count_flops
from stopdown.scaling.exponents import problem
from stopdown.scaling.graph.capture import capture_call
from stopdown.scaling.trials import fallback


class Silent:
    """A judge of steps that finds nothing."""

    def __call__(self, step: object) -> bool:
        return False

    def watch(self, step: object, given: object, made: object) -> None:
        """Nothing is looked at."""


class Whole(nn.Module):
    """A module below another: hooks look at parts alone."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


class Products(nn.Module):
    """Products of two values: a sum with a product, and attention whose values have another width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = functional.scaled_dot_product_attention(x, x, x[..., :2])
        return torch.baddbmm(torch.ones(5), x, x.mT).sum() + mixed.sum()


class Sum(nn.Module):
    """A product that is added to a bias of another width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(torch.ones(5), x, torch.ones(3, 5))


def count_by_graph(module: nn.Module, x: torch.Tensor) -> float:
    graph = capture_call(module, (x,), dtype=torch.float32).graph.graph
    return sum(problem.count_node_flops(node) for node in graph.nodes)


def count_by_tracker(module: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad(), StorageTracker() as tracker:
        module(x)
    return tracker.flops


def count_by_hooks(module: nn.Module, x: torch.Tensor) -> float:
    seen = fallback._measure_calls(module, [(module, (x,), {})])
    parts = sum(seen.layer_flops.values())
    assert parts in (seen.flops, 0)
    return seen.flops


SINGLE = math.prod((1, 4, 6, 6)) * 8 * 9  # one product for each value, filter element and channel
CASES: dict[str, tuple[nn.Module, tuple[int, ...], float]] = {
    "transposed, stride 1": (nn.ConvTranspose2d(4, 8, 3), (1, 4, 6, 6), 2.0 * SINGLE),
    "transposed, stride 2": (nn.ConvTranspose2d(4, 8, 3, 2), (1, 4, 6, 6), 2.0 * SINGLE),
    "transposed, 1D": (nn.ConvTranspose1d(4, 2, 4, 2), (2, 4, 5), 2.0 * 2 * 4 * 5 * 2 * 4),
    "convolution, stride 2": (nn.Conv2d(4, 8, 2, 2), (1, 4, 6, 6), 2.0 * 9 * 8 * 4 * 4),
    "convolution in groups": (nn.Conv2d(4, 8, 1, groups=2), (1, 4, 6, 6), 2.0 * 36 * 8 * 2),
    "linear": (nn.Linear(4, 7), (3, 4), 2.0 * 3 * 4 * 7),
    "addmm": (Sum(), (2, 3), 2.0 * 2 * 3 * 5),
    "products": (Products(), (2, 5, 3), 2.0 * 2 * 5 * 5 * (3 + 2) + 2.0 * 2 * 5 * 5 * 3),
}


@pytest.mark.parametrize("count", [count_by_graph, count_by_tracker, count_by_hooks])
@pytest.mark.parametrize("name", CASES)
def test_counters_agree(name: str, count: Callable[[nn.Module, torch.Tensor], float]) -> None:
    """Products of a transposed convolution are counted by its input, at any stride."""
    module, shape, expected = CASES[name]
    assert count(Whole(module).eval(), torch.ones(shape)) == expected


def test_attention_on_the_cpu_is_counted() -> None:
    """torch's own counter knows no formula for the kernel that the CPU takes; ours has one."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x)

    x = torch.ones(1, 2, 5, 8)
    expected = 4.0 * 2 * 5 * 5 * 8
    assert fallback._measure_calls(Attention(), [(Attention(), (x,), {})]).flops == expected
    assert count_by_tracker(Attention(), x) == expected


def test_a_convolution_of_no_kind_tells_whether_it_is_transposed() -> None:
    """ATen's `convolution` has it as an argument, not in its name."""
    shapes = {"input": (1, 4, 6, 6), "weight": (4, 8, 3, 3)}
    assert count_flops("convolution", shapes, (1, 8, 13, 13), transposed=True) == 2.0 * SINGLE
