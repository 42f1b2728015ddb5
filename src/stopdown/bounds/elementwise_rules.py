"""How large the result of each operation can be, given bounds of its inputs: one rule per operation.

A rule gets a `Operands` and returns the bound of the exact result on the inputs that the operation
really gets; rounding is added by `bounds`. Where there is none it raises `UnboundedError`.
`docs/certificates.md` has a proof of two lines for each.

**Catches** the operations that work element by element, by the names in `bounds.rule_names`.
**Does not catch** an operation without a rule: what it gives has no bound, and neither has what
follows, up to the next norm or saturating function.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.fx import Node

from stopdown.bounds.norm_rules import bound_written_norm
from stopdown.bounds.rule_inputs import Operands, UnboundedError
from stopdown.bounds.values import Bound, largest_over, make_bound, norm_over, reshape, uniform
from stopdown.graph.nodes import arguments, is_kind, is_range_clamp, shape_of, strip_casts


def add(op: Operands) -> Bound:
    """`|a + k b| <= |a| + |k| |b|`, for elements and for norms."""
    first, other = op.spread(op.given["self"]), op.spread(op.given["other"])
    factor = abs(float(op.given.get("alpha", 1) or 1))
    peak = first.peak + factor * other.peak
    typical = math.hypot(first.typical, factor * other.typical)
    dims = first.rows if isinstance(op.given["self"], Node) else other.rows
    norm = norm_over(first, op.shape, dims) + factor * norm_over(other, op.shape, dims)
    return op.made(peak, typical, norm=norm, rows=dims)


def multiply(op: Operands) -> Bound:
    """Elements: the product of the bounds. Rows: the norm of one times the largest of the other."""
    if (normed := bound_written_norm(op)) is not None:
        return normed
    first, other = op.spread(op.given["self"]), op.spread(op.given["other"])
    dims = first.rows if len(first.rows) >= len(other.rows) else other.rows
    norm = torch.minimum(
        norm_over(first, op.shape, dims) * largest_over(other.peak, dims),
        norm_over(other, op.shape, dims) * largest_over(first.peak, dims),
    )
    typical = first.typical * other.typical
    return op.made(first.peak * other.peak, typical, norm=norm, rows=dims)


def divide(op: Operands) -> Bound:
    """By a number, or by what is clamped to be no smaller than one; by a norm; by a mask's sum."""
    divisor = op.given["other"]
    if isinstance(divisor, Node):
        if (found := bound_written_norm(op) or _bound_masked_mean(op)) is not None:
            return found
        divisor = _find_least(divisor)
    if op.given.get("rounding_mode") is not None or not divisor:
        raise UnboundedError
    bound, factor = op.spread(op.given["self"]), 1 / abs(float(divisor))
    return replace(
        bound, peak=bound.peak * factor, norm=bound.norm * factor, typical=bound.typical * factor
    )


def _find_least(node: Node) -> float | None:
    """The number that a clamp keeps a value from falling below; None without one that fp16 can hold."""
    node = strip_casts(node)
    least = arguments(node).get("min") if is_kind(node, "clamp") else None
    return float(least) if isinstance(least, (int, float)) and least >= 2.0**-14 else None


def _bound_masked_mean(op: Operands) -> Bound | None:
    """`sum(x m) / sum(m)` with a mask `m` of zeros and ones: a mean of some of the values."""
    top, below = strip_casts(op.given["self"]), strip_casts(op.given["other"])
    if not (is_kind(top, "sum") and is_kind(below, "sum")):
        return None
    product, mask, given = strip_casts(top.args[0]), below.args[0], arguments(top)
    rank, before = len(shape_of(product)), shape_of(product)
    alike = all(given.get(key) == arguments(below).get(key) for key in ("dim", "keepdim"))
    is_product = is_kind(product, "multiply") and mask in product.args
    if not is_product or not given.get("dim") or not alike:
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


def _is_mask(op: Operands, node: Node) -> bool:
    """True for truth values, and for whole numbers that are bounded: those are masks."""
    while is_kind(node, "reshape", "expansion", "cast"):
        node = node.args[0]  # type: ignore[assignment]
    held = node.meta.get("val")
    floating = not isinstance(held, torch.Tensor) or held.is_floating_point()
    return not floating and op.find(node) is not None


def shrink(op: Operands) -> Bound:
    """`|f(x)| <= min(|x|, 1)`."""
    bound = op.find(op.node.args[0])
    return saturate(op) if bound is None else replace(bound, peak=bound.peak.clamp(max=1.0))


def saturate(op: Operands) -> Bound:
    """`|f(x)| <= 1` whatever the input."""
    return uniform(1.0, op.shape, 0.5)


def softmax(op: Operands) -> Bound:
    """Weights of a mean: none above 1, and neither is their norm."""
    dim = int(op.given["dim"]) % len(op.shape)
    one = torch.ones((1,) * len(op.shape)).double()
    return op.made(one, 1 / max(op.shape[dim], 1), norm=one, rows=(dim,))


def power(op: Operands) -> Bound:
    exponent = op.given["exponent"]
    if not isinstance(exponent, (int, float)) or exponent < 0:
        raise UnboundedError
    return op.made(op.source.peak**exponent, op.source.typical**exponent)


def root(op: Operands) -> Bound:
    return op.made(op.source.peak.sqrt(), op.source.typical**0.5)


def exponential(op: Operands) -> Bound:
    if op.source.largest > 700:
        raise UnboundedError
    return op.made(op.source.peak.exp(), 1.0)


def subtract_from(op: Operands) -> Bound:
    number = op.given["other"]
    if not isinstance(number, (int, float)):
        raise UnboundedError
    return op.made(op.source.peak + abs(number), math.hypot(op.source.typical, number))


def clamp(op: Operands) -> Bound:
    """Between two numbers nothing is larger than the larger one; at fp16's maximum it never bites."""
    if is_range_clamp(op.node):
        return op.source
    numbers = [op.given.get(name) for name in ("min", "max")]
    if not all(x is None or isinstance(x, (int, float)) for x in numbers):
        raise UnboundedError
    sizes = [abs(float(x)) for x in numbers if x is not None]
    if len(sizes) == 2 and op.find(op.given["self"]) is None:
        return uniform(max(sizes), op.shape, 0.5 * max(sizes))
    if len(sizes) == 2:
        return op.made(op.source.peak.clamp(max=max(sizes)), op.source.typical)
    return op.made(op.source.peak.clamp(min=max(sizes, default=0.0)), op.source.typical)


def total(op: Operands) -> Bound:
    """A sum over dimensions: of the peaks."""
    return _reduce(op, mean=False)


def mean(op: Operands) -> Bound:
    """A mean is no larger than the largest of what it is taken of."""
    return _reduce(op, mean=True)


def _reduce(op: Operands, *, mean: bool) -> Bound:
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


def polar(op: Operands) -> Bound:
    return op.spread(op.given["abs"])


def zeros(op: Operands) -> Bound:
    return uniform(0.0, op.shape)


def fill(op: Operands) -> Bound:
    return op.spread(op.given.get("fill_value", op.given.get("value", 1.0)))


def ones(op: Operands) -> Bound:
    return uniform(1.0, op.shape)
