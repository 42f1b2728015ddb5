"""Bounds of what only moves values about: views, slices, concatenations, choices, tables."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from stopdown.scaling.blocks import SPLITS, arguments, operation, shape_of
from stopdown.scaling.bound_steps import Step
from stopdown.scaling.bound_values import (
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


def keep(step: Step) -> Bound | None:
    """The result is the first input, or no larger element by element and of the same shape."""
    return step.bound(step.node.all_input_nodes[0])


def view(step: Step) -> Bound | None:
    source = step.node.args[0]
    bound = step.bound(source)
    return None if bound is None else reshape(bound, shape_of(source), step.shape)


def swap(step: Step) -> Bound | None:
    source = step.node.args[0]
    bound, rank = step.bound(source), len(shape_of(source))
    if bound is None:
        return None
    coded = torch.empty(tuple(range(2, 2 + rank)), device="meta")
    order = [size - 2 for size in step.node.target(coded, *step.node.args[1:]).shape]  # type: ignore[operator]
    return permute(bound, order)


def expand(step: Step) -> Bound | None:
    source = step.node.args[0]
    bound = step.bound(source)
    return None if bound is None else broadcast(bound, shape_of(source), step.shape)


def loosen(step: Step) -> Bound | None:
    """Every element of the result is one of the input, or an average of some, or 0."""
    source = step.node.all_input_nodes[0]
    bound = step.bound(source)
    return None if bound is None else uniform(bound.largest, step.shape, bound.typical)


def loosen_spatially(step: Step) -> Bound | None:
    """As `loosen`, channel by channel: pooling and upsampling of `[N, C, ...]`."""
    source = step.node.args[0]
    bound = step.bound(source)
    if bound is None or len(shape_of(source)) != len(step.shape):
        return loosen(step)
    before = shape_of(source)
    changed = [d for d in range(len(step.shape)) if before[d] != step.shape[d]]
    return step.made(largest_over(bound.peak, changed), bound.typical)


def loosen_tokens(step: Step) -> Bound | None:
    """As `loosen`, with the last dimension as it was where it was not touched."""
    source = step.node.args[0]
    bound, before = step.bound(source), shape_of(source)
    indices = step.given.get("indices") or ()
    touched = len(indices) >= len(before) or not step.shape or before[-1:] != step.shape[-1:]
    if bound is None or touched:
        return loosen(step)
    peak = largest_over(bound.peak, range(len(before) - 1)).reshape(
        (1,) * (len(step.shape) - 1) + (bound.peak.shape[-1],)
    )
    if bound.rows != {len(before) - 1}:
        return step.made(peak, bound.typical)
    norm = bound.norm.amax().reshape((1,) * len(step.shape))
    return step.made(peak, bound.typical, norm=norm, rows=(len(step.shape) - 1,))


def repeat(step: Step) -> Bound | None:
    """`repeat` and its kin: what stands several times is no larger; where it does is not asked."""
    source = step.node.args[0]
    bound, before = step.bound(source), shape_of(source)
    if bound is None:
        return None
    added = len(step.shape) - len(before)
    before = (1,) * added + before
    bound = broadcast(bound, shape_of(source), before)
    changed = [d for d in range(len(before)) if before[d] != step.shape[d]]
    return step.made(largest_over(bound.peak, changed), bound.typical)


def slice_(step: Step) -> Bound | None:
    source = step.node.args[0]
    bound, before = step.bound(source), shape_of(source)
    if bound is None:
        return None
    dim = int(step.given.get("dim", 0)) % len(before)
    start, stop = step.given.get("start") or 0, step.given.get("end")
    stop = before[dim] if stop is None else stop
    if not isinstance(start, int) or not isinstance(stop, int):
        return loosen(step)
    size = before[dim]
    start, stop = (min(max(x + size if x < 0 else x, 0), size) for x in (start, stop))
    bound = _behind_cat(source, dim, start, stop, step) or bound
    return take(bound, before, step.shape, dim, start, stop, step.given.get("step", 1))


def _behind_cat(source: Any, dim: int, start: int, stop: int, step: Step) -> Bound | None:
    """The bound of the one part of a concatenation that a slice takes; None when there is none."""
    while operation(source) in ("dropout", "clone", "contiguous", "to", "alias"):
        source = source.args[0]
    if operation(source) not in ("cat", "concat") or any(
        operation(user).endswith("_") for user in source.users
    ):
        return None
    given = arguments(source)
    if int(given.get("dim", 0)) % len(shape_of(source)) != dim:
        return None
    begin = 0
    for part in given["tensors"]:
        end = begin + shape_of(part)[dim]
        if begin <= start and stop <= end:
            bound = step.bound(part)
            if bound is None or bound.peak.shape[dim] > 1 or bound.norm.shape[dim] > 1:
                return None
            return bound
        begin = end
    return None


def select(step: Step) -> Bound | None:
    source = step.node.args[0]
    bound, before = step.bound(source), shape_of(source)
    dim, index = int(step.given["dim"]) % len(before), step.given["index"]
    if bound is None or not isinstance(index, int):
        return loosen(step) if bound is not None else None
    kept = (*before[:dim], 1, *before[dim + 1 :])
    index %= max(before[dim], 1)
    bound = take(bound, before, kept, dim, index, index + 1)
    return reshape(bound, kept, step.shape)


def part_of_split(step: Step) -> Bound | None:
    """One result of a chunk, split or unbind."""
    parent = step.node.args[0]
    assert isinstance(parent, Node)
    number: Any = step.node.args[1]
    source = parent.args[0]
    bound, before = step.bound(source), shape_of(source)
    if operation(parent) not in SPLITS or bound is None:
        return None
    dim = int(arguments(parent).get("dim", 0)) % len(before)
    if operation(parent) == "unbind":
        kept = (*before[:dim], 1, *before[dim + 1 :])
        return reshape(take(bound, before, kept, dim, number, number + 1), kept, step.shape)
    sizes = [shape.shape[dim] for shape in parent.meta["val"]]
    start = sum(sizes[:number])
    bound = _behind_cat(source, dim, start, start + sizes[number], step) or bound
    return take(bound, before, step.shape, dim, start, start + sizes[number])


def cat(step: Step) -> Bound | None:
    parts = list(step.given["tensors"])
    bounds = [step.bound(x) for x in parts if math.prod(shape_of(x)) or len(parts) == 1]
    if any(b is None for b in bounds):
        return None
    shapes = [shape_of(x) for x in parts if math.prod(shape_of(x)) or len(parts) == 1]
    dim = int(step.given.get("dim", 0)) % len(step.shape)
    return concatenate([b for b in bounds if b is not None], shapes, step.shape, dim)


def stack(step: Step) -> Bound | None:
    parts = list(step.given["tensors"])
    bounds = [step.bound(x) for x in parts]
    if any(b is None for b in bounds):
        return None
    dim = int(step.given.get("dim", 0)) % len(step.shape)
    kept = (*step.shape[:dim], 1, *step.shape[dim + 1 :])
    unsqueezed = [reshape(b, shape_of(x), kept) for b, x in zip(bounds, parts, strict=True) if b]
    return concatenate(unsqueezed, [kept] * len(parts), step.shape, dim)


def choose(step: Step) -> Bound | None:
    """`where` and `masked_fill`: either the one or the other; the sentinels of a mask aside."""
    names = ("self", "other", "value", "source")
    parts = [step.given[n] for n in names if step.given.get(n) is not None]
    bounds = [step.spread(x) for x in parts]
    if any(b is None for b in bounds):
        return None
    result = bounds[0]
    assert result is not None
    for bound in bounds[1:]:
        assert bound is not None
        result = join(result, bound, step.shape, step.shape)
    return result


def pad(step: Step) -> Bound | None:
    source = step.node.args[0]
    bound, before = step.bound(source), shape_of(source)
    if bound is None:
        return None
    changed = [d for d in range(len(before)) if before[d] != step.shape[d]]
    value = step.given.get("value") or 0.0
    peak = largest_over(bound.peak, changed).clamp(min=abs(float(value)))
    zeros = step.given.get("mode", "constant") == "constant" and not value
    if not zeros:
        return step.made(peak, bound.typical)
    norm = largest_over(bound.norm, changed)
    return step.made(peak, bound.typical, norm=norm, rows=bound.rows)


def embedding(step: Step) -> Bound | None:
    """Any row of the table."""
    table = step.bound(step.given["weight"])
    if table is None:
        return None
    peak, norm = table.peak.amax(0), table.norm.amax()
    ones = (1,) * (len(step.shape) - 1)
    return step.made(peak.reshape(*ones, -1), table.typical, norm=norm.reshape(*ones, 1),
                     rows=(len(step.shape) - 1,))  # fmt: skip


def to_complex(step: Step) -> Bound | None:
    """The modulus of a pair is its norm."""
    source = step.node.args[0]
    bound, before = step.bound(source), shape_of(source)
    if bound is None:
        return None
    peak = norm_over(bound, before, (len(before) - 1,)).squeeze(-1)
    return step.made(peak, bound.typical * 2**0.5)


def to_real(step: Step) -> Bound | None:
    """Neither part is larger than the modulus, and the pair is as long as it."""
    source = step.node.args[0]
    bound = step.bound(source)
    if bound is None:
        return None
    peak = bound.peak.unsqueeze(-1)
    return step.made(peak, bound.typical / 2**0.5, norm=peak, rows=(len(step.shape) - 1,))
