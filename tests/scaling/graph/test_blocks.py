"""Blocks of channels that can be scaled one by one, followed through views, splits and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stopdown.scaling.graph.blocks import (
    Blocks,
    find_blocks,
    find_part,
    is_part,
    map_through_view,
)
from stopdown.scaling.graph.capture import Capture, capture_call


def capture(module: nn.Module, *args: torch.Tensor) -> Capture:
    """Capture a call of a module in eval mode, in fp16."""
    module.eval().requires_grad_(False)
    return capture_call(module, tuple(x.half() for x in args), {}, dtype=torch.float16)


def test_indices_are_in_blocks() -> None:
    """Blocks that overlap a range of indices are counted from the first to the last; none outside."""
    blocks = Blocks(0, (0, 4, 6, 10))
    assert len(blocks) == 3
    assert list(blocks.covered(4, 6)) == [1]
    assert list(blocks.covered(3, 7)) == [0, 1, 2]
    assert list(blocks.covered(10, 12)) == []


@pytest.mark.parametrize(
    ("out", "source", "blocks", "found"),
    [
        ((2, 3, 4), (2, 12), Blocks(1, (0, 1, 3)), Blocks(1, (0, 4, 12))),
        ((2, 12), (2, 3, 4), Blocks(1, (0, 4, 12)), Blocks(1, (0, 1, 3))),
        ((2, 12), (2, 3, 4), Blocks(1, (0, 6, 12)), None),
        ((2, 12), (2, 1, 12), Blocks(1, (0, 6, 12)), Blocks(2, (0, 6, 12))),
        ((12,), (13,), Blocks(0, (0, 12)), None),
        ((6, 4), (3, 8), Blocks(1, (0, 2, 4)), None),
    ],
)
def test_blocks_go_through_a_view(
    out: tuple[int, ...], source: tuple[int, ...], blocks: Blocks, found: Blocks | None
) -> None:
    """Where a boundary is one before the view as well; else there are none."""
    assert map_through_view(out, source, blocks) == found


def scale(out: tuple[int, ...], source: tuple[int, ...], blocks: Blocks) -> torch.Tensor:
    """What a view makes of a tensor whose blocks are numbered."""
    mapped = map_through_view(out, source, blocks)
    assert mapped is not None
    value = torch.zeros(source)
    for number in range(len(mapped)):
        first, last = mapped.bounds[number], mapped.bounds[number + 1]
        value.narrow(mapped.dim, first, last - first).fill_(number)
    return value.reshape(out)


@pytest.mark.parametrize(
    ("out", "source", "blocks"),
    [
        ((2, 3, 4), (2, 12), Blocks(1, (0, 1, 3))),
        ((2, 12), (2, 3, 4), Blocks(1, (0, 4, 12))),
        ((5, 2, 6), (5, 12), Blocks(1, (0, 1, 2))),
    ],
)
def test_a_mapped_block_holds_the_same_elements(
    out: tuple[int, ...], source: tuple[int, ...], blocks: Blocks
) -> None:
    """Numbers written by block before the view are numbers by block behind it."""
    value = scale(out, source, blocks)
    for number in range(len(blocks)):
        first, last = blocks.bounds[number], blocks.bounds[number + 1]
        assert bool((value.narrow(blocks.dim, first, last - first) == number).all())


class Gated(nn.Module):
    """A gate and a value from one linear; `mixed` reads the halves together as well."""

    def __init__(self, *, mixed: bool = False) -> None:
        super().__init__()
        self.wide, self.mixed = nn.Linear(4, 6), mixed

    def forward(self, x: torch.Tensor) -> Any:
        wide = self.wide(x)
        gate, value = wide.chunk(2, -1)
        made = gate.sigmoid() * value
        return (made, wide.softmax(-1)) if self.mixed else made


def test_the_halves_of_a_chunk_are_blocks_of_the_weight() -> None:
    """Rows of weight and bias are scaled half by half, where nothing mixes the halves."""
    found = capture(Gated(), torch.randn(2, 4))
    blocks = {node.name: x for node, x in find_blocks(found.graph.graph, found.parameters).items()}
    names = {name: node for node, name in found.parameters.items()}
    assert blocks[names["wide.weight"]] == Blocks(0, (0, 3, 6))
    assert blocks[names["wide.bias"]] == Blocks(0, (0, 3, 6))
    mixed = capture(Gated(mixed=True), torch.randn(2, 4))
    assert not any(
        x.name in mixed.parameters for x in find_blocks(mixed.graph.graph, mixed.parameters)
    )


class Taken(nn.Module):
    """Parts of a tensor, taken in three ways."""

    def forward(self, x: torch.Tensor) -> Any:
        return x[:, 1:3] * 2, x[:, 2] * 2, x.split([1, 4], 1)[1] * 2


def test_a_part_has_its_source_and_place() -> None:
    """A slice, a select and an output of a split: the range of indices that each takes, and of what."""
    found = capture(Taken(), torch.randn(3, 5))
    parts = [
        find_part(node.args[0])
        for node in found.graph.graph.nodes
        if node.name.startswith("mul") and isinstance(node.args[0], torch.fx.Node)
    ]
    assert [(place, dim) for _, place, dim in parts] == [((1, 3), 1), ((2, 3), 1), ((1, 5), 1)]
    assert {source.name for source, _, _ in parts} == {str(found.inputs[0])}


@pytest.mark.parametrize("heads", [2, 4])
def test_parts_of_an_unbound_tensor_have_no_blocks(heads: int) -> None:
    """Its dimensions have other numbers: heads of a query aren't query and key."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4 * heads)

        def forward(self, x: torch.Tensor) -> Any:
            query, key = self.linear(x).unflatten(-1, (2, heads, 2)).unbind(2)
            first, second = query.chunk(2, dim=2)
            return first.sigmoid(), second, key

    found = capture(Heads(), torch.ones(2, 3, 8))
    blocks = find_blocks(found.graph.graph, found.parameters)
    (bounds,) = {x.bounds for node, x in blocks.items() if node.name in found.parameters}
    assert bounds == (0, 2 * heads, 4 * heads)
    assert not [node for node in blocks if is_part(node)]
