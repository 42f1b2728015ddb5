"""Bounds of what only moves values about: views, slices, concatenations, choices, tables."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from stopdown.bounds.rule_inputs import Operands
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
from stopdown.graph.nodes import (
    arguments,
    is_kind,
    is_split,
    operation,
    read_order,
    shape_of,
    slice_bounds,
    strip_casts,
)


def keep(op: Operands) -> Bound | None:
    """The result is the first input, or no larger element by element and of the same shape."""
    return op.bound(op.node.all_input_nodes[0])


def view(op: Operands) -> Bound | None:
    source = op.node.args[0]
    bound = op.bound(source)
    return None if bound is None else reshape(bound, shape_of(source), op.shape)


def swap(op: Operands) -> Bound | None:
    source = op.node.args[0]
    bound = op.bound(source)
    return bound if bound is None or not op.shape else permute(bound, read_order(op.node))


def expand(op: Operands) -> Bound | None:
    source = op.node.args[0]
    bound = op.bound(source)
    return None if bound is None else broadcast(bound, shape_of(source), op.shape)


def loosen(op: Operands) -> Bound | None:
    """Every element of the result is one of the input, or an average of some, or 0."""
    source = op.node.all_input_nodes[0]
    bound = op.bound(source)
    return None if bound is None else uniform(bound.largest, op.shape, bound.typical)


def loosen_spatially(op: Operands) -> Bound | None:
    """As `loosen`, channel by channel: pooling and upsampling of `[N, C, ...]`."""
    source = op.node.args[0]
    bound = op.bound(source)
    if op.given.get("divisor_override"):
        return None
    if bound is None or len(shape_of(source)) != len(op.shape):
        return loosen(op)
    before = shape_of(source)
    changed = [d for d in range(len(op.shape)) if before[d] != op.shape[d]]
    return op.made(largest_over(bound.peak, changed), bound.typical)


def loosen_tokens(op: Operands) -> Bound | None:
    """As `loosen`, with the last dimension as it was where it was not touched."""
    source = op.node.args[0]
    bound, before = op.bound(source), shape_of(source)
    indices = op.given.get("indices") or ()
    touched = len(indices) >= len(before) or not op.shape or before[-1:] != op.shape[-1:]
    if bound is None or touched:
        return loosen(op)
    peak = largest_over(bound.peak, range(len(before) - 1)).reshape(
        (1,) * (len(op.shape) - 1) + (bound.peak.shape[-1],)
    )
    if bound.rows != {len(before) - 1}:
        return op.made(peak, bound.typical)
    norm = bound.norm.amax().reshape((1,) * len(op.shape))
    return op.made(peak, bound.typical, norm=norm, rows=(len(op.shape) - 1,))


def repeat(op: Operands) -> Bound | None:
    """`repeat` and its kin: what stands several times is no larger; where it does is not asked."""
    source = op.node.args[0]
    bound, before = op.bound(source), shape_of(source)
    if bound is None:
        return None
    added = len(op.shape) - len(before)
    if added < 0:  # flattened first
        return loosen(op)
    before = (1,) * added + before
    bound = broadcast(bound, shape_of(source), before)
    changed = [d for d in range(len(before)) if before[d] != op.shape[d]]
    return op.made(largest_over(bound.peak, changed), bound.typical)


def slice_(op: Operands) -> Bound | None:
    source = op.node.args[0]
    bound, before = op.bound(source), shape_of(source)
    if bound is None:
        return None
    dim = int(op.given.get("dim", 0)) % len(before)
    indices = slice_bounds(op.node)
    if indices is None:
        return loosen(op)
    start, stop = indices
    bound = _behind_cat(source, dim, start, stop, op) or bound
    return take(bound, op.shape, dim, start, stop, op.given.get("step", 1))


def _behind_cat(source: Any, dim: int, start: int, stop: int, op: Operands) -> Bound | None:
    """The bound of the one part of a concatenation that a slice takes; None when there is none."""
    source = strip_casts(source)
    if not is_kind(source, "join") or any(operation(user).endswith("_") for user in source.users):
        return None
    given = arguments(source)
    if int(given.get("dim", 0)) % len(shape_of(source)) != dim:
        return None
    begin = 0
    for part in given["tensors"]:
        end = begin + shape_of(part)[dim]
        if begin <= start and stop <= end:
            bound = op.bound(part)
            if bound is None or bound.peak.shape[dim] > 1 or bound.norm.shape[dim] > 1:
                return None
            return bound
        begin = end
    return None


def select(op: Operands) -> Bound | None:
    source = op.node.args[0]
    bound, before = op.bound(source), shape_of(source)
    dim, index = int(op.given["dim"]) % len(before), op.given["index"]
    if bound is None or not isinstance(index, int):
        return loosen(op) if bound is not None else None
    kept = (*before[:dim], 1, *before[dim + 1 :])
    index %= max(before[dim], 1)
    bound = take(bound, kept, dim, index, index + 1)
    return reshape(bound, kept, op.shape)


def part_of_split(op: Operands) -> Bound | None:
    """One result of a chunk, split or unbind."""
    parent = op.node.args[0]
    assert isinstance(parent, Node)
    number: Any = op.node.args[1]
    source = parent.args[0]
    bound, before = op.bound(source), shape_of(source)
    if not is_split(parent) or bound is None:
        return None
    dim = int(arguments(parent).get("dim", 0)) % len(before)
    if is_kind(parent, "unbind"):
        kept = (*before[:dim], 1, *before[dim + 1 :])
        return reshape(take(bound, kept, dim, number, number + 1), kept, op.shape)
    sizes = [shape.shape[dim] for shape in parent.meta["val"]]
    start = sum(sizes[:number])
    bound = _behind_cat(source, dim, start, start + sizes[number], op) or bound
    return take(bound, op.shape, dim, start, start + sizes[number])


def cat(op: Operands) -> Bound | None:
    parts = list(op.given["tensors"])
    bounds = [op.bound(x) for x in parts if math.prod(shape_of(x)) or len(parts) == 1]
    if any(b is None for b in bounds):
        return None
    shapes = [shape_of(x) for x in parts if math.prod(shape_of(x)) or len(parts) == 1]
    dim = int(op.given.get("dim", 0)) % len(op.shape)
    return concatenate([b for b in bounds if b is not None], shapes, op.shape, dim)


def stack(op: Operands) -> Bound | None:
    parts = list(op.given["tensors"])
    bounds = [op.bound(x) for x in parts]
    if any(b is None for b in bounds):
        return None
    dim = int(op.given.get("dim", 0)) % len(op.shape)
    kept = (*op.shape[:dim], 1, *op.shape[dim + 1 :])
    unsqueezed = [reshape(b, shape_of(x), kept) for b, x in zip(bounds, parts, strict=True) if b]
    return concatenate(unsqueezed, [kept] * len(parts), op.shape, dim)


def choose(op: Operands) -> Bound | None:
    """`where` and `masked_fill`: either the one or the other; the sentinels of a mask aside."""
    names = ("self", "other", "value", "source")
    parts = [op.given[n] for n in names if op.given.get(n) is not None]
    bounds = [op.spread(x) for x in parts]
    if any(b is None for b in bounds):
        return None
    result = bounds[0]
    assert result is not None
    for bound in bounds[1:]:
        assert bound is not None
        result = join(result, bound, op.shape, op.shape)
    return result


def pad(op: Operands) -> Bound | None:
    source = op.node.args[0]
    bound, before = op.bound(source), shape_of(source)
    if bound is None:
        return None
    changed = [d for d in range(len(before)) if before[d] != op.shape[d]]
    value = op.given.get("value") or 0.0
    peak = largest_over(bound.peak, changed).clamp(min=abs(float(value)))
    zeros = op.given.get("mode", "constant") == "constant" and not value
    if not zeros:
        return op.made(peak, bound.typical)
    norm = largest_over(bound.norm, changed)
    return op.made(peak, bound.typical, norm=norm, rows=bound.rows)


def embedding(op: Operands) -> Bound | None:
    """Any row of the table."""
    table = op.bound(op.given["weight"])
    if table is None:
        return None
    peak, norm = table.peak.amax(0), table.norm.amax()
    ones = (1,) * (len(op.shape) - 1)
    return op.made(peak.reshape(*ones, -1), table.typical, norm=norm.reshape(*ones, 1),
                     rows=(len(op.shape) - 1,))  # fmt: skip


def to_complex(op: Operands) -> Bound | None:
    """The modulus of a pair is its norm."""
    source = op.node.args[0]
    bound, before = op.bound(source), shape_of(source)
    if bound is None:
        return None
    peak = norm_over(bound, before, (len(before) - 1,)).squeeze(-1)
    return op.made(peak, bound.typical * 2**0.5)


def to_real(op: Operands) -> Bound | None:
    """Neither part is larger than the modulus, and the pair is as long as it."""
    source = op.node.args[0]
    bound = op.bound(source)
    if bound is None:
        return None
    peak = bound.peak.unsqueeze(-1)
    return op.made(peak, bound.typical / 2**0.5, norm=peak, rows=(len(op.shape) - 1,))
