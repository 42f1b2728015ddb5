"""Bounds of what only moves values about: views, slices, concatenations, choices, tables."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch.fx import Node

from stopdown.bounds.rule_inputs import Operands, UnboundedError
from stopdown.bounds.values import (
    Bound,
    broadcast,
    concatenate,
    join,
    largest_over,
    norm_over,
    permute,
    reshape,
    take,
    uniform,
)
from stopdown.graph.blocks import list_joined, split_bounds
from stopdown.graph.nodes import (
    is_kind,
    is_split,
    operation,
    read_order,
    shape_of,
    slice_bounds,
    strip_casts,
)


def keep(op: Operands) -> Bound:
    """The result is the first input, or no larger element by element and of the same shape."""
    return op.bound(op.node.all_input_nodes[0])


def copied(op: Operands) -> Bound:
    """What is written over a value, as large as that is."""
    return op.spread(op.node.args[1])


def view(op: Operands) -> Bound:
    return reshape(op.source, op.before, op.shape)


def swap(op: Operands) -> Bound:
    return permute(op.source, read_order(op.node)) if op.shape else op.source


def expand(op: Operands) -> Bound:
    return broadcast(op.source, op.before, op.shape)


def loosen(op: Operands) -> Bound:
    """Every element of the result is one of the input, or an average of some, or 0."""
    bound = keep(op)
    return uniform(bound.largest, op.shape, bound.typical)


def loosen_spatially(op: Operands) -> Bound:
    """As `loosen`, channel by channel: pooling and upsampling of `[N, C, ...]`."""
    if op.given.get("divisor_override"):
        raise UnboundedError
    if len(op.before) != len(op.shape):
        return loosen(op)
    return op.made(largest_over(op.source.peak, _list_changed(op)), op.source.typical)


def _list_changed(op: Operands) -> list[int]:
    """The dimensions whose size is another after the operation."""
    pairs = zip(op.before, op.shape, strict=True)
    return [dim for dim, (before, after) in enumerate(pairs) if before != after]


def loosen_tokens(op: Operands) -> Bound:
    """As `loosen`, with the last dimension as it was where it was not touched."""
    bound, last = op.source, len(op.before) - 1
    indices = op.given.get("indices") or ()
    if len(indices) > last or not op.shape or op.before[-1:] != op.shape[-1:]:
        return loosen(op)
    ones = (1,) * (len(op.shape) - 1)
    peak = largest_over(bound.peak, range(last)).reshape(*ones, -1)
    if bound.rows != {last}:
        return op.made(peak, bound.typical)
    norm = bound.norm.amax().reshape(*ones, 1)
    return op.made(peak, bound.typical, norm=norm, rows=(len(ones),))


def repeat(op: Operands) -> Bound:
    """`repeat` and its kin: what stands several times is no larger; where it does is not asked."""
    added = len(op.shape) - len(op.before)
    if added < 0:  # flattened first
        return loosen(op)
    before = (1,) * added + op.before
    bound = broadcast(op.source, op.before, before)
    changed = [d for d in range(len(before)) if before[d] != op.shape[d]]
    return op.made(largest_over(bound.peak, changed), bound.typical)


def slice_(op: Operands) -> Bound:
    indices = slice_bounds(op.node)
    if indices is None:
        return loosen(op)
    dim = int(op.given.get("dim", 0)) % len(op.before)
    return _take_part(op, op.node.args[0], dim, *indices, op.given.get("step", 1))


def _take_part(op: Operands, source: Any, dim: int, start: int, stop: int, step: int = 1) -> Bound:
    """The bound of a slice: that of the one part of a concatenation that it takes, where there is one."""
    bound = op.bound(source)
    bound = _find_joined(strip_casts(source), dim, start, stop, op) or bound
    return take(bound, op.shape, dim, start, stop, step)


def _find_joined(source: Any, dim: int, start: int, stop: int, op: Operands) -> Bound | None:
    if not is_kind(source, "join") or any(operation(user).endswith("_") for user in source.users):
        return None
    joined, places = list_joined(source)
    for part, (begin, end) in places if joined == dim else ():
        if begin <= start and stop <= end:
            bound = op.find(part)
            is_split = bound is None or bound.peak.shape[dim] > 1 or bound.norm.shape[dim] > 1
            return None if is_split else bound
    return None


def select(op: Operands) -> Bound:
    dim, index = int(op.given["dim"]) % len(op.before), op.given["index"]
    if not isinstance(index, int):
        return loosen(op)
    return _take_one(op, op.node.args[0], dim, index % max(op.before[dim], 1))


def _take_one(op: Operands, source: Any, dim: int, index: int) -> Bound:
    before = shape_of(source)
    kept = (*before[:dim], 1, *before[dim + 1 :])
    return reshape(take(op.bound(source), kept, dim, index, index + 1), kept, op.shape)


def part_of_split(op: Operands) -> Bound:
    """One result of a chunk, split or unbind."""
    parent, number = op.node.args[:2]
    if not is_split(parent):
        raise UnboundedError
    assert isinstance(parent, Node)
    assert isinstance(number, int)
    dim, bounds = split_bounds(parent)
    if is_kind(parent, "unbind"):
        return _take_one(op, parent.args[0], dim, number)
    return _take_part(op, parent.args[0], dim, *bounds[number : number + 2])


def cat(op: Operands) -> Bound:
    parts = list(op.given["tensors"])
    parts = [x for x in parts if math.prod(shape_of(x)) or len(parts) == 1]
    dim = int(op.given.get("dim", 0)) % len(op.shape)
    return concatenate([op.bound(x) for x in parts], [shape_of(x) for x in parts], op.shape, dim)


def stack(op: Operands) -> Bound:
    parts = list(op.given["tensors"])
    dim = int(op.given.get("dim", 0)) % len(op.shape)
    kept = (*op.shape[:dim], 1, *op.shape[dim + 1 :])
    unsqueezed = [reshape(op.bound(x), shape_of(x), kept) for x in parts]
    return concatenate(unsqueezed, [kept] * len(parts), op.shape, dim)


def choose(op: Operands) -> Bound:
    """`where` and `masked_fill`: either the one or the other; the sentinels of a mask aside."""
    names = ("self", "other", "value", "source")
    bounds = [op.spread(op.given[n]) for n in names if op.given.get(n) is not None]
    return functools.reduce(lambda one, other: join(one, other, op.shape, op.shape), bounds)


def pad(op: Operands) -> Bound:
    bound, changed, value = op.source, _list_changed(op), op.given.get("value") or 0.0
    peak = largest_over(bound.peak, changed).clamp(min=abs(float(value)))
    if op.given.get("mode", "constant") != "constant" or value:
        return op.made(peak, bound.typical)
    norm = largest_over(bound.norm, changed)
    return op.made(peak, bound.typical, norm=norm, rows=bound.rows)


def embedding(op: Operands) -> Bound:
    """Any row of the table."""
    table, ones = op.bound(op.given["weight"]), (1,) * (len(op.shape) - 1)
    peak, norm = table.peak.amax(0).reshape(*ones, -1), table.norm.amax().reshape(*ones, 1)
    return op.made(peak, table.typical, norm=norm, rows=(len(ones),))


def to_complex(op: Operands) -> Bound:
    """The modulus of a pair is its norm."""
    peak = norm_over(op.source, op.before, (len(op.before) - 1,)).squeeze(-1)
    return op.made(peak, op.source.typical * 2**0.5)


def to_real(op: Operands) -> Bound:
    """Neither part is larger than the modulus, and the pair is as long as it."""
    peak = op.source.peak.unsqueeze(-1)
    return op.made(peak, op.source.typical / 2**0.5, norm=peak, rows=(len(op.shape) - 1,))
