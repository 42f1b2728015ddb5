"""Upper bounds of one operation's result from bounds of its inputs: one rule per operation.

A rule receives a `BoundedOperation` and returns the bound of the exact result for the inputs that the
operation really receives. `propagation` adds the rounding of the result. A rule raises `UnboundedError`
if there is no bound. `docs/certificates.md` has a proof of two lines for each.

Not covered: operations without a rule. Their results have no bound, and neither has what is computed
from these, up to the next norm or saturating function.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from stopdown.number_formats import find_format
from stopdown.scaling.bounds.evaluation import FLOOR, ROUNDING
from stopdown.scaling.bounds.known_values import BoundedOperation, UnboundedError
from stopdown.scaling.bounds.row_sums import WEIGHT_ROUNDING
from stopdown.scaling.bounds.values import (
    Bound,
    broadcast,
    choose,
    concatenate,
    inflate,
    largest_over,
    make_bound,
    norm_over,
    permute,
    reshape,
    sum_squares,
    take,
    uniform,
)
from stopdown.scaling.graph.blocks import find_part, has_known_indices, is_part, list_joined
from stopdown.scaling.graph.nodes import (
    arguments,
    has_kind,
    is_float,
    is_kind,
    is_range_clamp,
    list_casts,
    list_mixed,
    read_order,
    shape_of,
    strip_casts,
)

# norms: a row of unit mean square has at most the root of its length as 2-norm, for any input


def bound_normalise(op: BoundedOperation) -> Bound:
    """Bound the result of a layer or RMS norm, for any input: a row of unit mean square has the root of
    its size as 2-norm.
    """
    inner, rank = list(op.given["normalized_shape"]), len(op.shape)
    dims, shape = range(rank - len(inner), rank), [1] * (rank - len(inner)) + inner
    gain, shift = _magnitudes(op, "weight", shape), _magnitudes(op, "bias", shape)
    longest = math.sqrt(math.prod(inner))
    norm = longest * largest_over(gain, dims) + sum_squares(shift.square(), op.shape, dims).sqrt()
    typical = float(gain.square().mean().sqrt())
    return op.make_bound(longest * gain + shift, typical, norm=norm, rows=dims)


def bound_normalise_groups(op: BoundedOperation) -> Bound:
    """Bound the result of a group norm, for any input: a group of unit mean square has the root of its
    size as 2-norm.

    A group has channels and positions. So the bound depends on the number of positions, which is that
    of the captured call.
    """
    groups, rank = int(op.given["num_groups"]), len(op.shape)
    count = math.prod(op.shape[1:]) // groups
    shape, places = [1, op.shape[1]] + [1] * (rank - 2), math.prod(op.shape[2:])
    gain, shift = _magnitudes(op, "weight", shape), _magnitudes(op, "bias", shape)
    moved = (shift.square().sum() * places * (1 if shift.numel() > 1 else op.shape[1])).sqrt()
    norm = (math.sqrt(count * groups) * gain.amax() + moved).reshape([1] * rank)
    typical = float(gain.square().mean().sqrt())
    return op.make_bound(math.sqrt(count) * gain + shift, typical, norm=norm, rows=range(1, rank))


def _magnitudes(op: BoundedOperation, name: str, shape: list[int]) -> torch.Tensor:
    """Return the magnitudes of a norm's weight or bias, float64, in `shape` or as one number of that rank.

    They are inf if unknown. A missing weight counts as 1, a missing bias as 0.

    Args:
        name: `"weight"` or `"bias"`.
    """
    given = op.given.get(name)
    if not isinstance(given, Node):
        size = torch.full((1,), 1.0 if name == "weight" else 0.0).double()
    elif (found := op.known.load(given)) is not None:
        size = found.double().abs().reshape(-1)
        size = size * (1 + WEIGHT_ROUNDING) + op.known.floor(given) * float(size.max())
    else:
        bound = op.find(given)
        size = torch.full((1,), math.inf if bound is None else bound.largest).double()
    return size.reshape(shape if size.numel() > 1 else [1] * len(shape))


def find_written_norm(op: BoundedOperation) -> Bound | None:
    """Bound an RMS norm that code writes out, as `x * rsqrt(mean(x**2) + eps)`; return None for other
    operations.

    No row of the result has a larger 2-norm than the root of its length. A divisor that is a 2-norm among
    subnormal numbers of its dtype is rounded by up to a third: two elements of the smallest number become
    a row of (1, 1).
    """
    first, other = op.given["self"], op.given["other"]
    inverse = has_kind(op.node, "divide")
    pairs = [(first, other)] if inverse else [(first, other), (other, first)]
    for value, factor in pairs:
        found = _find_mean_square(factor, inverse) if isinstance(factor, Node) else None
        if found is None or not isinstance(value, Node):
            continue
        source, dims, total = found
        origin = strip_casts(source)
        if origin is not strip_casts(value) or shape_of(value) != op.shape:
            continue
        ends = (value, factor)
        if op.known is None or all(op.is_intact(x, origin) for x in ends):
            count = 1.0 if total else math.prod(op.shape[d] for d in dims)
            peak = torch.full((1,) * len(op.shape), math.sqrt(count)).double()
            norm = peak * (math.sqrt(2) if total and _may_be_subnormal(factor) else 1)
            return op.make_bound(peak, 1.0, norm=norm, rows=dims)
    return None


def _find_mean_square(node: Node, inverse: bool) -> tuple[Node, list[int], bool] | None:
    """Recognise the factor `(mean(y**2) + eps) ** -0.5` of a written-out RMS norm; return None for
    other values.

    One whose `eps` is lost in its dtype isn't recognised: squares become 0 there, and the result Inf.

    Args:
        inverse: whether the node is a divisor instead.

    Returns:
        `y`, the dimensions of the mean, and True if the divisor is a 2-norm: a sum of squares without a
        mean.
    """
    node = strip_casts(node)
    if inverse and (is_kind(node, "expansion", "maximum") or _is_clamped_below(node)):
        return _find_mean_square(node.args[0], True)  # type: ignore[arg-type]
    if inverse and is_kind(node, "vector_norm"):
        return read_vector_norm(node)
    if not _is_root(node, inverse):
        return None
    total = strip_casts(node.args[0])
    if not is_kind(total, "add") or not isinstance(total.args[1], (int, float)):
        return None
    node = strip_casts(total.args[0])
    if not is_kind(node, "mean"):
        return None
    given, square = arguments(node), strip_casts(node.args[0])
    if not given.get("dim") or not given.get("keepdim") or not _is_square(square):
        return None
    # a square and its mean are rounded by at most half of the smallest number each
    steps = [_find_smallest(x) for x in (total, total.args[0], node, node.args[0], square)]
    if _round(total.args[1], total) < 2 * max(steps):
        return None
    rank = len(shape_of(square))
    return square.args[0], [int(d) % rank for d in given["dim"]], False


def _is_root(node: Node, inverse: bool) -> bool:
    if is_kind(node, "power"):
        return bool(node.args[1] == (0.5 if inverse else -0.5))
    return is_kind(node, "sqrt" if inverse else "rsqrt")


def _is_clamped_below(node: Node) -> bool:
    return is_kind(node, "clamp") and arguments(node).get("max") is None


def _may_be_subnormal(divisor: Node) -> bool:
    """Return whether a 2-norm, or its lower limit, can be so small that its dtype holds few bits of it."""
    steps, floor = [_find_smallest(divisor)], 0.0
    while not is_kind(divisor, "vector_norm"):
        if is_kind(divisor, "clamp"):
            limit = arguments(divisor).get("min")
            floor = max(floor, _round(limit, divisor)) if isinstance(limit, (int, float)) else floor
        divisor = divisor.args[0]  # type: ignore[assignment]
        steps.append(_find_smallest(divisor))
    return floor * ROUNDING[torch.float16] < max(steps)


def _find_smallest(node: Any) -> float:
    """Return the smallest number above 0 of a tensor's dtype."""
    known = find_format(node.meta["val"].dtype) if is_float(node) else None
    return known.smallest if known is not None else 0.0


def _round(number: float, node: Node) -> float:
    """Return a constant as the dtype of a tensor holds it."""
    return float(torch.tensor(number, dtype=node.meta["val"].dtype))


def _is_square(node: Node) -> bool:
    twice = is_kind(node, "multiply") and node.args[0] is node.args[1]
    by_power = is_kind(node, "power") and bool(node.args[1] == 2)
    return is_kind(node, "square") or twice or by_power


def read_vector_norm(node: Node) -> tuple[Node, list[int], bool] | None:
    """Return the source and dimensions of a 2-norm that is used as a divisor, and True; None for other
    norms.

    True says that squares are summed, not averaged (`_find_mean_square`). `keepdim` must be set.
    """
    given, source = arguments(node), node.args[0]
    if given.get("ord") != 2 or not given.get("dim") or not given.get("keepdim"):
        return None
    rank = len(shape_of(source))
    return source, [int(d) % rank for d in given["dim"]], True  # type: ignore[return-value]


# elementwise operations


def bound_add(op: BoundedOperation) -> Bound:
    """Bound a sum by the triangle inequality, `|a + k b| <= |a| + |k| |b|`, for elements and for row
    norms.
    """
    first, other = op.spread(op.given["self"]), op.spread(op.given["other"])
    factor = abs(float(op.given.get("alpha", 1) or 1))
    peak = first.peak + factor * other.peak
    typical = math.hypot(first.typical, factor * other.typical)
    dims = first.rows if isinstance(op.given["self"], Node) else other.rows
    norm = norm_over(first, op.shape, dims) + factor * norm_over(other, op.shape, dims)
    return op.make_bound(peak, typical, norm=norm, rows=dims)


def bound_multiply(op: BoundedOperation) -> Bound:
    """Bound an elementwise product; a row's norm is at most one factor's norm times the other's largest
    element.
    """
    if (normed := find_written_norm(op)) is not None:
        return normed
    first, other = op.spread(op.given["self"]), op.spread(op.given["other"])
    dims = first.rows if len(first.rows) >= len(other.rows) else other.rows
    norm = torch.minimum(
        norm_over(first, op.shape, dims) * largest_over(other.peak, dims),
        norm_over(other, op.shape, dims) * largest_over(first.peak, dims),
    )
    typical = first.typical * other.typical
    return op.make_bound(first.peak * other.peak, typical, norm=norm, rows=dims)


def bound_divide(op: BoundedOperation) -> Bound:
    """Bound a quotient whose divisor is a number, is clamped from below, is a norm, or is the sum of a
    mask.

    Other divisors may be 0.

    Raises:
        UnboundedError: for other divisors.
    """
    divisor = op.given["other"]
    if isinstance(divisor, Node):
        if (found := find_written_norm(op) or _bound_masked_mean(op)) is not None:
            return found
        least = strip_casts(divisor)
        divisor = _find_least(least) if op.is_intact(divisor, least) else None
    if op.given.get("rounding_mode") is not None or not divisor:
        raise UnboundedError
    bound, factor = op.spread(op.given["self"]), 1 / abs(float(divisor))
    return replace(
        bound, peak=bound.peak * factor, norm=bound.norm * factor, typical=bound.typical * factor
    )


def _find_least(node: Node) -> float | None:
    """Return the least value of a divisor that is clamped from below.

    Return None for other divisors, and if fp16 represents the limit as a subnormal number.
    """
    if not is_kind(node, "clamp") or arguments(node).get("max") is not None:
        return None
    least = arguments(node).get("min")
    return float(least) if isinstance(least, (int, float)) and least >= 2.0**-14 else None


def _bound_masked_mean(op: BoundedOperation) -> Bound | None:
    """Bound the mean over unmasked elements, `sum(x m) / sum(m)` with a mask `m` of zeros and ones, by
    those of `x`.

    Return None for other divisions.
    """
    top, below = strip_casts(op.given["self"]), strip_casts(op.given["other"])
    if not (is_kind(top, "sum") and is_kind(below, "sum")):
        return None
    product, mask, given = strip_casts(top.args[0]), below.args[0], arguments(top)
    rank, before = len(shape_of(product)), shape_of(product)
    alike = all(given.get(key) == arguments(below).get(key) for key in ("dim", "keepdim"))
    is_product = is_kind(product, "multiply") and mask in product.args
    if not is_product or not given.get("dim") or not alike or len(shape_of(mask)) != rank:
        return None
    if any(shape_of(mask)[int(d) % rank] != before[int(d) % rank] for d in given["dim"]):
        return None  # one mask for several elements, which is summed less often than they are
    if not op.is_intact(op.given["self"], product) or not op.is_intact(op.given["other"], mask):
        return None
    value = product.args[1 if product.args[0] is mask else 0]
    bound = op.find(value)
    if bound is None or not _is_mask(op, mask) or shape_of(value) != before:
        return None
    dims = [int(d) % rank for d in given["dim"]]
    kept = tuple(1 if d in dims else size for d, size in enumerate(before))
    peak = largest_over(bound.peak, dims) * (1 + math.prod(before[d] for d in dims) * 2.0**-22)
    summed = reshape(make_bound(peak, kept, typical=bound.typical), kept, shape_of(top))
    return summed if shape_of(top) == op.shape else None


def _is_mask(op: BoundedOperation, node: Node) -> bool:
    """Return whether a node is a mask: booleans, or integers with a known limit, perhaps cast or
    reshaped.
    """
    while is_kind(node, "reshape", "expansion", "cast"):
        node = node.args[0]  # type: ignore[assignment]
    held = node.meta.get("val")
    floating = not isinstance(held, torch.Tensor) or held.is_floating_point()
    return not floating and op.find(node) is not None


def bound_shrink(op: BoundedOperation) -> Bound:
    """Bound the result of a function with `|f(x)| <= min(|x|, 1)`, such as `tanh`."""
    bound = op.find(op.node.args[0])
    return bound_saturate(op) if bound is None else replace(bound, peak=bound.peak.clamp(max=1.0))


def bound_saturate(op: BoundedOperation) -> Bound:
    """Bound the result of a function with `|f(x)| <= 1` for every input, such as `cos`."""
    return uniform(1.0, op.shape, 0.5)


def bound_softmax(op: BoundedOperation) -> Bound:
    """Bound a softmax's result: neither an element nor the 2-norm over its dimension exceeds 1."""
    if not op.shape:
        return uniform(1.0, op.shape, 1.0)
    dim = int(op.given["dim"]) % len(op.shape)
    one = torch.ones((1,) * len(op.shape)).double()
    return op.make_bound(one, 1 / max(op.shape[dim], 1), norm=one, rows=(dim,))


def bound_power(op: BoundedOperation) -> Bound:
    exponent = op.given["exponent"]
    if not isinstance(exponent, (int, float)) or exponent < 0:
        raise UnboundedError
    return op.make_bound(op.source.peak**exponent, op.source.typical**exponent)


def bound_root(op: BoundedOperation) -> Bound:
    return op.make_bound(op.source.peak.sqrt(), op.source.typical**0.5)


def bound_exponential(op: BoundedOperation) -> Bound:
    if op.source.largest > 700:
        raise UnboundedError
    return op.make_bound(op.source.peak.exp(), 1.0)


def bound_subtract_from(op: BoundedOperation) -> Bound:
    number, factor = op.given["other"], abs(float(op.given.get("alpha", 1)))
    if not isinstance(number, (int, float)):
        raise UnboundedError
    typical = math.hypot(factor * op.source.typical, number)
    return op.make_bound(factor * op.source.peak + abs(number), typical)


def bound_clamp(op: BoundedOperation) -> Bound:
    """Bound a clamp's result by its limits and its input; a clamp at fp16's maximum counts as a copy."""
    if is_range_clamp(op.node):
        return op.source
    numbers = [op.given.get(name) for name in ("min", "max")]
    if not all(x is None or isinstance(x, (int, float)) for x in numbers):
        raise UnboundedError
    given = [float(x) for x in numbers if x is not None]
    sizes = [abs(x) for x in given]
    if len(sizes) == 2 and op.find(op.given["self"]) is None:
        return uniform(max(sizes), op.shape, 0.5 * max(sizes))
    if len(sizes) == 2:
        least = 0.0 if given[0] <= 0 <= given[1] else min(sizes)
        return op.make_bound(op.source.peak.clamp(min=least, max=max(sizes)), op.source.typical)
    return op.make_bound(op.source.peak.clamp(min=max(sizes, default=0.0)), op.source.typical)


def bound_total(op: BoundedOperation) -> Bound:
    """Bound a sum over dimensions by the sum of its elements' largest magnitudes."""
    return _reduce(op, mean=False)


def bound_mean(op: BoundedOperation) -> Bound:
    """Bound a mean over dimensions by the mean of its elements' largest magnitudes."""
    return _reduce(op, mean=True)


def _reduce(op: BoundedOperation, *, mean: bool) -> Bound:
    bound, before = op.source, op.before
    if not before:
        return bound
    given = op.given.get("dim")
    dims = [int(d) % len(before) for d in ([given] if isinstance(given, int) else given or ())]
    dims = dims or list(range(len(before)))
    peak, kept = bound.peak, list(before)
    for dim in dims:
        count, kept[dim] = before[dim], 1
        whole = peak.shape[dim] == 1
        peak = peak * count if whole else peak.sum(dim, keepdim=True)
        peak = peak / max(count, 1) if mean else peak
    count = math.prod(before[d] for d in dims)
    made = make_bound(peak, tuple(kept), typical=bound.typical * (1.0 if mean else count**0.5))
    return reshape(made, tuple(kept), op.shape)


def bound_polar(op: BoundedOperation) -> Bound:
    return op.spread(op.given["abs"])


def bound_zeros(op: BoundedOperation) -> Bound:
    return uniform(0.0, op.shape)


def bound_fill(op: BoundedOperation) -> Bound:
    return op.spread(next(op.given[x] for x in ("fill_value", "value", "s") if x in op.given))


def bound_ones(op: BoundedOperation) -> Bound:
    return uniform(1.0, op.shape)


# operations that only move values: views, slices, concatenations, choices, tables


def bound_same(op: BoundedOperation) -> Bound:
    """Bound the result of a view, or of another operation that makes no element larger, as its first
    input.

    Raises:
        UnboundedError: for a leaky ReLU whose slope is above 1, and for a dropout in training, which
            divides by the share that it keeps.
    """
    if abs(op.given.get("negative_slope") or 0) > 1 or op.given.get("train"):
        raise UnboundedError
    return op.bound(op.node.all_input_nodes[0])


def bound_copied(op: BoundedOperation) -> Bound:
    """Bound a tensor that `copy_` overwrites by the bound of its new content."""
    return op.spread(op.node.args[1])


def bound_reshape(op: BoundedOperation) -> Bound:
    if "dtype" in op.given:  # the same bits read as another number
        raise UnboundedError
    return reshape(op.source, op.before, op.shape)


def bound_permute(op: BoundedOperation) -> Bound:
    return permute(op.source, read_order(op.node)) if op.shape else op.source


def bound_expand(op: BoundedOperation) -> Bound:
    return broadcast(op.source, op.before, op.shape)


def bound_any(op: BoundedOperation) -> Bound:
    """Bound a result by the largest input element, if it consists of input elements, means of them, or
    numbers that are filled in.
    """
    bounds = [op.bound(x) for x in op.given.get("sequences") or op.node.all_input_nodes[:1]]
    largest = max(abs(op.given.get("padding_value") or 0.0), *(x.largest for x in bounds))
    return uniform(largest, op.shape, max(x.typical for x in bounds))


def bound_places(op: BoundedOperation) -> Bound:
    """Bound the result of pooling or upsampling `[N, C, ...]`, channel by channel: elements are copied
    or averaged.
    """
    if op.given.get("divisor_override"):
        raise UnboundedError
    if len(op.before) != len(op.shape):
        return bound_any(op)
    return op.make_bound(largest_over(op.source.peak, list_mixed(op.node)), op.source.typical)


def bound_tokens(op: BoundedOperation) -> Bound:
    """Bound the result of indexing or gathering by the largest elements of the input.

    The bound is channel by channel if the last dimension isn't indexed.
    """
    bound, last = op.source, len(op.before) - 1
    indices, dim = op.given.get("indices") or (), op.given.get("dim")
    moved = len(indices) > last or (dim is not None and int(dim) % max(last + 1, 1) == last)
    if moved or not op.shape or op.before[-1:] != op.shape[-1:]:
        return bound_any(op)
    ones = (1,) * (len(op.shape) - 1)
    peak = largest_over(bound.peak, range(last)).reshape(*ones, -1)
    if bound.rows != {last}:
        return op.make_bound(peak, bound.typical)
    norm = bound.norm.amax().reshape(*ones, 1)
    return op.make_bound(peak, bound.typical, norm=norm, rows=(len(ones),))


def bound_repeat(op: BoundedOperation) -> Bound:
    """Bound the result of `repeat` and similar operations: repeating an element doesn't change its
    magnitude.
    """
    added = len(op.shape) - len(op.before)
    if added < 0 or isinstance(op.given.get("repeats"), Node):  # flattened first, or data-dependent
        return bound_any(op)
    before = (1,) * added + op.before
    bound = broadcast(op.source, op.before, before)
    changed = [d for d in range(len(before)) if before[d] != op.shape[d]]
    return op.make_bound(largest_over(bound.peak, changed), bound.typical)


def bound_part(op: BoundedOperation) -> Bound:
    """Bound a slice, a select, or one result of a chunk, split or unbind.

    A slice that lies within one part of a concatenation has that part's bound.
    """
    if not is_part(op.node):
        raise UnboundedError
    if not has_known_indices(op.node):
        return bound_any(op)
    source, (start, stop), dim = find_part(op.node)
    bound, before = op.bound(source), shape_of(source)
    if is_kind(op.node, "select") or is_kind(op.node.args[0], "unbind"):
        kept = (*before[:dim], 1, *before[dim + 1 :])
        return reshape(take(bound, kept, dim, start, stop), kept, op.shape)
    joined = _find_joined(strip_casts(source), dim, start, stop, op)
    if joined is not None:
        casts = list_casts(source)
        floor = FLOOR * bound.largest if torch.float16 in casts else 0.0
        relative = sum(2 * ROUNDING.get(dtype, 0.0) for dtype in casts)
        floor = floor / max(joined.largest, 1e-300)
        bound = inflate(joined, relative, floor, before)
    return take(bound, op.shape, dim, start, stop, op.given.get("step", 1))


def _find_joined(
    source: Any, dim: int, start: int, stop: int, op: BoundedOperation
) -> Bound | None:
    if not is_kind(source, "join") or not op.is_intact(op.node.args[0], source):
        return None
    joined, places = list_joined(source)
    for part, (begin, end) in places if joined == dim else ():
        if begin <= start and stop <= end:
            bound = op.find(part)
            is_split = bound is None or bound.peak.shape[dim] > 1 or bound.norm.shape[dim] > 1
            return None if is_split else bound
    return None


def bound_cat(op: BoundedOperation) -> Bound:
    parts = [x for x in op.given["tensors"] if math.prod(shape_of(x))]
    dim = int(op.given.get("dim", 0)) % len(op.shape)
    return concatenate([op.bound(x) for x in parts], [shape_of(x) for x in parts], op.shape, dim)


def bound_stack(op: BoundedOperation) -> Bound:
    parts = list(op.given["tensors"])
    dim = int(op.given.get("dim", 0)) % len(op.shape)
    kept = (*op.shape[:dim], 1, *op.shape[dim + 1 :])
    unsqueezed = [reshape(op.bound(x), shape_of(x), kept) for x in parts]
    return concatenate(unsqueezed, [kept] * len(parts), op.shape, dim)


def bound_choose(op: BoundedOperation) -> Bound:
    """Bound the result of `where` or `masked_fill` by both alternatives; a mask's fill value (-inf)
    counts as 0.

    If the mask differs within a row, the row has elements of both alternatives.
    """
    names = ("self", "other", "value", "source")
    bounds = [op.spread(op.given[n]) for n in names if op.given.get(n) is not None]
    mask = shape_of(op.given.get("condition", op.given.get("mask")))
    mixed = {len(op.shape) - 1 - d for d, size in enumerate(reversed(mask)) if size > 1}
    return functools.reduce(lambda one, other: choose(one, other, op.shape, mixed), bounds)


def bound_pad(op: BoundedOperation) -> Bound:
    bound, changed, value = op.source, list_mixed(op.node), op.given.get("value") or 0.0
    peak = largest_over(bound.peak, changed).clamp(min=abs(float(value)))
    if op.given.get("mode", "constant") != "constant" or value:
        return op.make_bound(peak, bound.typical)
    norm = largest_over(bound.norm, changed)
    return op.make_bound(peak, bound.typical, norm=norm, rows=bound.rows)


def bound_embedding(op: BoundedOperation) -> Bound:
    """Bound an embedding's result, for any index, by the rows of its table."""
    table, ones = op.bound(op.given["weight"]), (1,) * (len(op.shape) - 1)
    peak, norm = table.peak.amax(0).reshape(*ones, -1), table.norm.amax().reshape(*ones, 1)
    return op.make_bound(peak, table.typical, norm=norm, rows=(len(ones),))


def bound_complex(op: BoundedOperation) -> Bound:
    """Bound a complex tensor's modulus by the 2-norm of its real and imaginary parts
    (`view_as_complex`).
    """
    peak = norm_over(op.source, op.before, (len(op.before) - 1,)).squeeze(-1)
    return op.make_bound(peak, op.source.typical * 2**0.5)


def bound_real(op: BoundedOperation) -> Bound:
    """Bound a complex tensor's real and imaginary parts (`view_as_real`) by its modulus, which bounds
    their 2-norm too.
    """
    peak = op.source.peak.unsqueeze(-1)
    return op.make_bound(peak, op.source.typical / 2**0.5, norm=peak, rows=(len(op.shape) - 1,))
