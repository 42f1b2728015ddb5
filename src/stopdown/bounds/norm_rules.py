"""Bounds of norms: layer, RMS and group norms, and RMS norms that are written out by hand.

A row of unit mean square is no longer than the root of its length, whatever went into it.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from stopdown.bounds.row_sums import WEIGHT_ROUNDING
from stopdown.bounds.rule_inputs import Operands
from stopdown.bounds.values import Bound, largest_over, sum_squares
from stopdown.graph.nodes import arguments, is_kind, shape_of, strip_casts


def normalise(op: Operands) -> Bound:
    """Layer and RMS norm: a row of unit mean square, so no longer than the root of its length."""
    inner, rank = list(op.given["normalized_shape"]), len(op.shape)
    dims, shape = range(rank - len(inner), rank), [1] * (rank - len(inner)) + inner
    gain, shift = _magnitudes(op, "weight", shape), _magnitudes(op, "bias", shape)
    longest = math.sqrt(math.prod(inner))
    norm = longest * largest_over(gain, dims) + sum_squares(shift.square(), op.shape, dims).sqrt()
    typical = float(gain.square().mean().sqrt())
    return op.made(longest * gain + shift, typical, norm=norm, rows=dims)


def normalise_groups(op: Operands) -> Bound:
    """Group norm: as `normalise` over the channels and places of a group, as many as the call has."""
    groups, rank = int(op.given["num_groups"]), len(op.shape)
    count = math.prod(op.shape[1:]) // groups
    shape, places = [1, op.shape[1]] + [1] * (rank - 2), math.prod(op.shape[2:])
    gain, shift = _magnitudes(op, "weight", shape), _magnitudes(op, "bias", shape)
    moved = (shift.square().sum() * places * (1 if shift.numel() > 1 else op.shape[1])).sqrt()
    norm = (math.sqrt(count * groups) * gain.amax() + moved).reshape([1] * rank)
    typical = float(gain.square().mean().sqrt())
    return op.made(math.sqrt(count) * gain + shift, typical, norm=norm, rows=range(1, rank))


def _magnitudes(op: Operands, name: str, shape: list[int]) -> torch.Tensor:
    """Those of a norm's weight or bias, in this shape or as one number in as many dimensions."""
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


def bound_written_norm(op: Operands) -> Bound | None:
    """`x * rsqrt(mean(x**2) + eps)`: no row has a larger norm than the root of its length."""
    first, other = op.given["self"], op.given["other"]
    inverse = is_kind(op.node, "divide")
    pairs = [(first, other)] if inverse else [(first, other), (other, first)]
    for value, factor in pairs:
        found = _find_mean_square(factor, inverse) if isinstance(factor, Node) else None
        if found is None or not isinstance(value, Node):
            continue
        source, dims, total = found
        if strip_casts(source) is strip_casts(value) and shape_of(value) == op.shape:
            count = 1.0 if total else math.prod(op.shape[d] for d in dims)
            norm = torch.full((1,) * len(op.shape), math.sqrt(count)).double()
            return op.made(norm, 1.0, norm=norm, rows=dims)
    return None


def _find_mean_square(node: Node, inverse: bool) -> tuple[Node, list[int], bool] | None:
    """What `(mean(y**2) + eps) ** -0.5` is taken of, over which dimensions; True for a plain norm."""
    node = strip_casts(node)
    if inverse and (is_kind(node, "expansion", "maximum") or _is_clamped_below(node)):
        return _find_mean_square(node.args[0], True)  # type: ignore[arg-type]
    if inverse and is_kind(node, "vector_norm"):
        return _read_vector_norm(node)
    if not _is_root(node, inverse):
        return None
    node = strip_casts(node.args[0])
    if is_kind(node, "add") and isinstance(node.args[1], (int, float)) and node.args[1] >= 0:
        node = strip_casts(node.args[0])
    if not is_kind(node, "mean"):
        return None
    given, square = arguments(node), strip_casts(node.args[0])
    if not given.get("dim") or not given.get("keepdim") or not _is_square(square):
        return None
    rank = len(shape_of(square))
    return square.args[0], [int(d) % rank for d in given["dim"]], False


def _is_root(node: Node, inverse: bool) -> bool:
    if is_kind(node, "power"):
        return bool(node.args[1] == (0.5 if inverse else -0.5))
    return is_kind(node, "sqrt" if inverse else "rsqrt")


def _is_clamped_below(node: Node) -> bool:
    return is_kind(node, "clamp") and arguments(node).get("max") is None


def _is_square(node: Node) -> bool:
    twice = is_kind(node, "multiply") and node.args[0] is node.args[1]
    by_power = is_kind(node, "power") and bool(node.args[1] == 2)
    return is_kind(node, "square") or twice or by_power


def _read_vector_norm(node: Node) -> tuple[Node, list[int], bool] | None:
    given, source = arguments(node), node.args[0]
    if given.get("ord") != 2 or not given.get("dim") or not given.get("keepdim"):
        return None
    rank = len(shape_of(source))
    return source, [int(d) % rank for d in given["dim"]], True  # type: ignore[return-value]
