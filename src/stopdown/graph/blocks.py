"""Which values carry several exponents: the parts of a chunked linear, block of rows by block.

`shift, scale, gate = linear(x).chunk(3)` wants three exponents, because `1 + scale` leaves no
choice while the gate is free. The demand starts at a chunk, split, unbind or slice and travels
against the data through operations that keep a dimension recognisable, up to the rows of a
parameter. Where it does not arrive at parameters all the way, the value keeps one exponent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from stopdown.graph.nodes import (
    arguments,
    is_float,
    is_kind,
    is_split,
    read_order,
    shape_of,
    slice_bounds,
    whole_size,
)


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of a value along one dimension.

    Attributes:
        dim: the dimension, counted from 0.
        bounds: start of every block and the end of the last one.
    """

    dim: int
    bounds: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def covered(self, start: int, stop: int) -> range:
        """The blocks that a range of indices touches."""
        touched = [
            i for i in range(len(self)) if self.bounds[i] < stop and start < self.bounds[i + 1]
        ]
        return range(touched[0], touched[-1] + 1) if touched else range(0)


_KEEPING = ("identity", "cast", "sign")
_BY_ROW = ("linear", "convolution")


def find_blocks(graph: torch.fx.Graph, parameters: Mapping[str, str]) -> dict[Node, Blocks]:
    """The values of a graph, parameters included, that carry one exponent for each block."""
    wanted: dict[Node, Blocks] = {}
    for node in reversed(graph.nodes):
        if is_float(node) and (blocks := _combine(node, wanted)):
            wanted[node] = blocks
    return _keep_producible(wanted, parameters)


def split_bounds(node: Node) -> tuple[int, tuple[int, ...]]:
    """Dimension and bounds of the parts that a chunk, split, unbind or slice makes of its input."""
    given, shape = arguments(node), shape_of(node.args[0])
    dim = int(given.get("dim", 0)) % max(len(shape), 1)
    if is_kind(node, "slice"):
        return dim, slice_bounds(node) or (0, shape[dim])
    sizes = [1] * shape[dim]
    if not is_kind(node, "unbind"):
        sizes = [whole_size(part.shape[dim]) for part in node.meta["val"]]
    return dim, tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))


def _combine(node: Node, wanted: Mapping[Node, Blocks]) -> Blocks | None:
    """What all users of a value demand of it together; None when one of them wants it whole."""
    demands = [_demand(user, node, wanted) for user in node.users]
    known = [x for x in demands if x is not None]
    if not known or len(known) != len(demands) or len({x.dim for x in known}) > 1:
        return None
    size = shape_of(node)[known[0].dim]
    bounds = sorted({0, size}.union(*(x.bounds for x in known)))
    return Blocks(known[0].dim, tuple(bounds)) if 2 < len(bounds) <= 65 else None


def _demand(user: Node, node: Node, wanted: Mapping[Node, Blocks]) -> Blocks | None:
    if is_split(user) or (is_kind(user, "slice") and arguments(user).get("step", 1) == 1):
        dim, bounds = split_bounds(user)
        return Blocks(dim, bounds)
    if is_kind(user, "select") and isinstance(user.args[2], int):
        dim = int(user.args[1]) % len(shape_of(node))  # type: ignore[arg-type]
        index = user.args[2] % shape_of(node)[dim]
        return Blocks(dim, (index, index + 1))
    if user not in wanted:
        return None
    return _pull(user, node, wanted[user])


def _pull(user: Node, node: Node, blocks: Blocks) -> Blocks | None:
    """Blocks of an operation's output as blocks of one of its inputs; None when they are lost."""
    given = arguments(user)
    if is_kind(user, *_KEEPING):
        return blocks
    if is_kind(user, "reshape"):
        return map_through_view(shape_of(user), shape_of(node), blocks)
    if is_kind(user, "permutation"):
        return Blocks(read_order(user)[blocks.dim], blocks.bounds)
    if is_kind(user, "add", "subtract"):
        dim = blocks.dim - (len(shape_of(user)) - len(shape_of(node)))
        fits = dim >= 0 and shape_of(node)[dim] == shape_of(user)[blocks.dim]
        return Blocks(dim, blocks.bounds) if fits else None
    if is_kind(user, *_BY_ROW) and node in (given.get("weight"), given.get("bias")):
        rows = len(shape_of(user)) - 1 if is_kind(user, "linear") else 1
        return Blocks(0, blocks.bounds) if blocks.dim == rows else None
    if is_kind(user, "multiply", "divide") and not isinstance(given["other"], Node):
        return blocks
    return None


def map_through_view(
    out: tuple[int, ...], source: tuple[int, ...], blocks: Blocks
) -> Blocks | None:
    """Blocks of a reshaped value as blocks of what it was before; None when they do not align."""
    if math.prod(out) != math.prod(source):
        return None
    stride = math.prod(out[blocks.dim + 1 :])
    for dim, size in enumerate(source):
        inner = math.prod(source[dim + 1 :])
        bounds = [bound * stride for bound in blocks.bounds]
        aligned = math.prod(source[:dim]) == math.prod(out[: blocks.dim])
        if size > 1 and aligned and bounds[-1] == size * inner:
            fits = all(bound % inner == 0 for bound in bounds)
            return Blocks(dim, tuple(bound // inner for bound in bounds)) if fits else None
    return None


def _keep_producible(
    wanted: Mapping[Node, Blocks], parameters: Mapping[str, str]
) -> dict[Node, Blocks]:
    """Drop the demands that do not come from parameters, until what is left supports itself."""
    kept = dict(wanted)
    while True:
        lost = [node for node in kept if not _is_producible(node, kept, parameters)]
        if not lost:
            return kept
        for node in lost:
            del kept[node]


def _is_producible(node: Node, kept: Mapping[Node, Blocks], parameters: Mapping[str, str]) -> bool:
    if node.op == "placeholder":
        return node.name in parameters and all(_takes(user, node, kept) for user in node.users)
    given = arguments(node)
    if is_kind(node, *_BY_ROW):
        sources = [given["weight"], given.get("bias")]
    elif is_kind(
        node, *_KEEPING, "reshape", "permutation", "add", "subtract", "multiply", "divide"
    ):
        sources = [given[key] for key in ("self", "input", "other") if key in given]
    else:
        return False
    floats = [x for x in sources if is_float(x)]
    users = all(_takes(user, node, kept) for user in node.users)
    return users and all(x in kept and _pull(node, x, kept[node]) == kept[x] for x in floats)


def _takes(user: Node, node: Node, kept: Mapping[Node, Blocks]) -> bool:
    """True when a user splits a value or carries its blocks on."""
    if is_split(user) or is_kind(user, "slice", "select"):
        return True
    return user in kept and _pull(user, node, kept[user]) == kept[node]
