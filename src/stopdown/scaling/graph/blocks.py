"""Find activations and parameters whose channel blocks can be scaled by separate powers of two.

`shift, scale, gate = linear(x).chunk(3)` needs three exponents, because `1 + scale` fixes that of scale
at 0 while the gate's is free. Such a demand starts at a chunk, split, unbind or slice. It is propagated
backwards, through operations that preserve the dimension, to the rows of a parameter.
`linear(cat([attention, mlp], -1))` is the mirror image: the parts of a concatenation are propagated
forwards, to the columns of a parameter. If they don't reach parameters on all paths, the whole tensor
has one exponent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from stopdown.scaling.graph.nodes import (
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
    """Consecutive ranges of indices along one dimension of a tensor, each scaled by its own power of two.

    Attributes:
        dim: the dimension, counted from 0.
        bounds: first index of every block, and the end of the last one.
    """

    dim: int
    bounds: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def covered(self, start: int, stop: int) -> range:
        """Return the numbers of the blocks that overlap the indices from `start` up to `stop`."""
        touched = [
            i for i in range(len(self)) if self.bounds[i] < stop and start < self.bounds[i + 1]
        ]
        return range(touched[0], touched[-1] + 1) if touched else range(0)


_KEEPING = ("identity", "cast", "sign")
_BY_ROW = ("linear", "convolution")
_MOST = 65


def find_blocks(graph: torch.fx.Graph, parameters: Mapping[str, str]) -> dict[Node, Blocks]:
    """Map the tensors of a graph that can be scaled block by block, parameters included, to their blocks.

    Args:
        parameters: maps placeholder names to parameter names.
    """
    wanted: dict[Node, Blocks] = {}
    for node in reversed(graph.nodes):
        if is_float(node) and (blocks := _combine(node, wanted)):
            wanted[node] = blocks
    for node in graph.nodes:
        if is_float(node):
            _offer(node, wanted)
    return _keep_producible(wanted, parameters)


def _offer(node: Node, wanted: dict[Node, Blocks]) -> None:
    """Propagate forwards which blocks of a tensor can be scaled separately: to a node's result or its
    weight.

    They come from the parts of a concatenation, or from blocks of the node's source.

    Args:
        wanted: blocks found so far, to which those of `node` or its weight are added.
    """
    given = arguments(node)
    source = given.get("self", given.get("input"))
    blocks: Blocks | None = None
    if is_kind(node, "join"):
        blocks = _read_joint(node)
    elif not isinstance(source, Node) or source not in wanted:
        return
    elif is_kind(node, *_BY_ROW):
        node, blocks = given["weight"], _find_columns(node, wanted[source])
    elif is_kind(node, *_KEEPING):
        blocks = wanted[source]
    elif is_kind(node, "reshape"):
        blocks = map_through_view(shape_of(source), shape_of(node), wanted[source])
    elif is_kind(node, "permutation"):
        blocks = Blocks(read_order(node).index(wanted[source].dim), wanted[source].bounds)
    if blocks is not None:
        wanted.setdefault(node, blocks)


def _read_joint(node: Node) -> Blocks | None:
    """Return the parts of a concatenation as blocks that can be scaled separately.

    Return None with one part or over 64, or with a part of unknown size.
    """
    dim, places = list_joined(node)
    bounds = tuple(sorted({0, *(stop for _, (_, stop) in places)}))
    is_whole = bounds[-1] == shape_of(node)[dim]
    return Blocks(dim, bounds) if is_whole and 2 < len(bounds) <= _MOST else None


def list_joined(node: Node) -> tuple[int, list[tuple[Node, tuple[int, int]]]]:
    """Return the dimension of a `cat` node, and each input with the index range that it fills in the
    result.
    """
    given = arguments(node)
    dim = int(given.get("dim", 0)) % max(len(shape_of(node)), 1)
    places, done = [], 0
    for part in given["tensors"]:
        shape = shape_of(part)
        size = shape[dim] if dim < len(shape) else 0
        places.append((part, (done, done + size)))
        done += size
    return dim, places


def _find_columns(node: Node, blocks: Blocks) -> Blocks | None:
    """Map blocks of a linear's or convolution's input channels to columns of its weight.

    Return None for grouped convolutions and for blocks of another dimension.
    """
    is_whole = arguments(node).get("groups", 1) == 1
    return Blocks(1, blocks.bounds) if is_whole and blocks.dim == _find_channels(node) else None


def _find_channels(node: Node) -> int:
    """Return the channel dimension of a linear's or convolution's input and output."""
    return len(shape_of(node)) - 1 if is_kind(node, "linear") else 1


def split_bounds(node: Node) -> tuple[int, tuple[int, ...]]:
    """Return the dimension of a chunk, split, unbind or slice, and the indices at which its parts begin
    and end.
    """
    given, shape = arguments(node), shape_of(node.args[0])
    dim = int(given.get("dim", 0)) % max(len(shape), 1)
    if is_kind(node, "slice"):
        return dim, slice_bounds(node) or (0, shape[dim])
    sizes = [1] * shape[dim]
    if not is_kind(node, "unbind"):
        sizes = [whole_size(part.shape[dim]) for part in node.meta["val"]]
    return dim, tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))


def _combine(node: Node, wanted: Mapping[Node, Blocks]) -> Blocks | None:
    """Return the blocks in which a tensor must be split so that each part which some user reads can be
    scaled separately.

    Return None if users disagree about the dimension, or if one needs a single scale for the whole tensor.

    Args:
        wanted: blocks of the nodes after this one.
    """
    demands = [_demand(user, node, wanted) for user in node.users]
    known = [x for x in demands if x is not None]
    if not known or len(known) != len(demands) or len({x.dim for x in known}) > 1:
        return None
    size = shape_of(node)[known[0].dim]
    bounds = sorted({0, size}.union(*(x.bounds for x in known)))
    return Blocks(known[0].dim, tuple(bounds)) if 2 < len(bounds) <= _MOST else None


def _demand(user: Node, node: Node, wanted: Mapping[Node, Blocks]) -> Blocks | None:
    if is_split(user) or _is_plain_slice(user):
        dim, bounds = split_bounds(user)
        parts = user.users if is_split(user) else (user,)
        inner = (x for part in parts for x in _list_inner(part, wanted))
        return Blocks(dim, tuple(sorted({*bounds, *inner})))
    if is_kind(user, "select") and isinstance(user.args[2], int):
        dim = int(user.args[1]) % len(shape_of(node))  # type: ignore[arg-type]
        if size := shape_of(node)[dim]:  # 0 for one that depends on values
            index = user.args[2] % size
            return Blocks(dim, (index, index + 1))
    if user not in wanted:
        return None
    return _pull(user, node, wanted[user])


def _is_plain_slice(node: Node) -> bool:
    return is_kind(node, "slice") and arguments(node).get("step", 1) == 1


def _list_inner(part: Node, wanted: Mapping[Node, Blocks]) -> Iterator[int]:
    """Yield where separately scaled blocks inside a part of a tensor begin and end, as indices of the
    whole tensor.
    """
    if part in wanted and not _loses_dimension(part):
        _, (start, _), dim = find_part(part)
        if wanted[part].dim == dim:
            yield from (start + bound for bound in wanted[part].bounds)


def find_part(node: Node) -> tuple[Node, tuple[int, int], int]:
    """Return the source of a slice, select or getitem node, the range of indices taken, and the dimension.

    For a select by an index that depends on data, the range is the whole dimension.
    """
    source = node.args[0]
    assert isinstance(source, Node)
    if is_kind(node, "select"):
        dim = int(arguments(node)["dim"]) % len(shape_of(source))
        size, index = shape_of(source)[dim], arguments(node)["index"]
        if not isinstance(index, int):
            return source, (0, size), dim
        return source, (index % max(size, 1), index % max(size, 1) + 1), dim
    if is_kind(node, "slice"):
        dim, bounds = split_bounds(node)
        return source, (bounds[0], bounds[1]), dim
    parent = source.args[0]
    assert isinstance(parent, Node)
    dim, bounds = split_bounds(source)
    index = int(node.args[1])  # type: ignore[arg-type]
    return parent, (bounds[index], bounds[index + 1]), dim


def _pull(user: Node, node: Node, blocks: Blocks) -> Blocks | None:
    """Map the blocks of a result, each scaled by its own power of two, to the blocks that one input
    must have.

    Return None if the operation mixes elements of different blocks.
    """
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
        return Blocks(0, blocks.bounds) if blocks.dim == _find_channels(user) else None
    if is_kind(user, "multiply", "divide") and not isinstance(given["other"], Node):
        return blocks
    return None


def map_through_view(
    out: tuple[int, ...], source: tuple[int, ...], blocks: Blocks
) -> Blocks | None:
    """Map blocks of a reshaped tensor to a dimension of the tensor before the reshape.

    Return None if no block boundary there corresponds.

    Args:
        out: shape after the reshape, in which `blocks` are given.
        source: shape before it.
    """
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
    """Remove tensors whose blocks can't be scaled separately by scaling rows or columns of parameters."""
    kept = dict(wanted)
    while True:
        lost = [node for node in kept if not _is_producible(node, kept, parameters)]
        if not lost:
            return kept
        for node in lost:
            del kept[node]


def _is_producible(node: Node, kept: Mapping[Node, Blocks], parameters: Mapping[str, str]) -> bool:
    if not all(_takes(user, node, kept) for user in node.users):
        return False
    if node.op == "placeholder":
        return node.name in parameters and len(_list_read(node, kept)) == len(kept[node])
    if is_kind(node, "join"):
        return kept[node] == _read_joint(node)
    if is_part(node):
        return _is_part_of(node, kept)
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
    return all(x in kept and _pull(node, x, kept[node]) == kept[x] for x in floats)


def _list_read(node: Node, kept: Mapping[Node, Blocks]) -> set[int]:
    """Return which blocks of a parameter the graph reads, by number; a block may be a range of rows or
    columns.

    If a table of positions is read in part, the caller gives all of it one exponent, as a call of
    another size may read more.
    """
    return {block for user in node.users for block in _list_read_by(user, node, kept)}


def _list_read_by(user: Node, node: Node, kept: Mapping[Node, Blocks]) -> Iterable[int]:
    blocks = kept[node]
    if user in kept and is_kind(user, *_KEEPING, "reshape", "permutation"):
        return _list_read(user, kept)
    if not is_kind(user, "slice", "select"):
        return range(len(blocks))
    _, (start, stop), dim = find_part(user)
    if dim != blocks.dim:
        return range(len(blocks))
    inner = kept.get(user)
    if inner is None or inner.dim != dim:
        return blocks.covered(start, stop)
    ends = [start + bound for bound in inner.bounds]
    read = _list_read(user, kept)
    return {block for i in read for block in blocks.covered(ends[i], ends[i + 1])}


def is_part(node: Node) -> bool:
    """Return whether a node is a slice, a select, or one result of a chunk, split or unbind."""
    if is_kind(node, "slice", "select"):
        return True
    return is_kind(node, "part") and bool(node.args) and is_split(node.args[0])


def _loses_dimension(part: Node) -> bool:
    """Return whether a part lacks the dimension along which it was taken, so that its later ones have
    other numbers.
    """
    return is_kind(part, "select") or is_kind(part.args[0], "unbind")


def has_known_indices(node: Node) -> bool:
    """Return whether the indices that a slice or select takes are constants, not computed from data.

    If they aren't, `find_part` returns the whole range.
    """
    if is_kind(node, "select"):
        return isinstance(arguments(node)["index"], int)
    return not is_kind(node, "slice") or slice_bounds(node) is not None


def _is_part_of(node: Node, kept: Mapping[Node, Blocks]) -> bool:
    """Return whether a slice's blocks are blocks of the tensor it is taken from, so that both can share
    exponents.

    Every block boundary of the slice must be one of that tensor.
    """
    source, (start, _), dim = find_part(node)
    if _loses_dimension(node) or source not in kept or kept[source].dim != dim:
        return False
    inner = {start + bound for bound in kept[node].bounds}
    return kept[node].dim == dim and inner <= {*kept[source].bounds}


def _takes(user: Node, node: Node, kept: Mapping[Node, Blocks]) -> bool:
    """Return whether a user of a tensor still computes the right result if each block has another scale.

    It does if it splits the tensor, passes its blocks on, or multiplies each block by columns of its own.
    """
    if is_split(user) or is_kind(user, "slice", "select"):
        return True
    given = arguments(user)
    if is_kind(user, *_BY_ROW) and (node is given["input"] or kept[node].dim == 1):
        source = kept.get(given["input"])
        columns = None if source is None else _find_columns(user, source)
        return columns is not None and kept.get(given["weight"]) == columns
    return user in kept and _pull(user, node, kept[user]) == kept[node]
