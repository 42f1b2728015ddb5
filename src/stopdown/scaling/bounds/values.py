"""What is known of a value for every input: a largest magnitude by channel, and a norm by row.

A `Bound` has tensors that broadcast to the value's shape, so it says as much by channel, token or
head as there is to say and costs as little as one number. `docs/certificates.md` has the argument.
All arithmetic is in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

Shape = tuple[int, ...]

MOST_ENTRIES = 1 << 19
"""A bound is kept by channel, not by token, where it would have more entries than this."""


BASIS = 16
"""A table over timesteps is taken apart into so many rows and what they leave over."""

TIMESTEPS_AT_ONCE = 16
"""Rows of such a table that are looked at together."""


@dataclass(frozen=True)
class Bound:
    """A bound of one value that holds for every input.

    Attributes:
        peak: float64, of the value's rank, each size 1 or the value's: no element is larger.
        norm: as `peak`, of size 1 in the dimensions `rows`: no 2-norm over those dimensions is
            larger; a part of a row has no larger norm than the row.
        rows: dimensions counted from 0.
        typical: a guess of the root mean square; it sets prices and promises nothing.
    """

    peak: torch.Tensor
    norm: torch.Tensor
    rows: frozenset[int]
    typical: float

    @property
    def largest(self) -> float:
        """The largest magnitude of any element."""
        return float(self.peak.max()) if self.peak.numel() else 0.0


@dataclass(frozen=True)
class AffineRow:
    """A row that is `n * gain + table[t] + v`, for one timestep `t` of the table's.

    Attributes:
        radius: the 2-norm of `n` is at most this.
        gain: `[d]` float64, not negative.
        table: `[T, d]` or `[1, d]`, float64 or fp32.
        rest: `[d]` float64: no element of `v` is larger.
    """

    radius: float
    gain: torch.Tensor
    table: torch.Tensor
    rest: torch.Tensor

    @functools.cached_property
    def largest(self) -> torch.Tensor:
        """`[d]`: the largest magnitude of each channel of the table."""
        return find_largest_rows(self.table.split(TIMESTEPS_AT_ONCE)).double()

    @functools.cached_property
    def basis(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The table as `coefficients @ rows`, and the largest magnitude that is left, by channel."""
        if len(self.table) <= BASIS:
            ones = torch.eye(len(self.table), dtype=torch.float64)
            return ones, self.table.double(), torch.zeros_like(self.rest)
        picked = torch.linspace(0, len(self.table) - 1, BASIS).round().long()
        rows = torch.linalg.qr(self.table[picked].double().T).Q.T.to(self.table.dtype)
        coefficients = self.table @ rows.T
        pairs = zip(*(x.split(TIMESTEPS_AT_ONCE) for x in (self.table, coefficients)), strict=True)
        held = torch.empty(TIMESTEPS_AT_ONCE, rows.shape[1], dtype=rows.dtype)
        left = find_largest_rows(
            torch.mm(factors, rows, out=held[: len(part)]).sub_(part) for part, factors in pairs
        ).double()
        coefficients, rows = coefficients.double(), rows.double()
        magnitudes = coefficients.abs().amax(0) @ rows.abs() + self.largest
        return coefficients, rows, left + (BASIS + 4) * 2.0**-24 * magnitudes


def find_largest_rows(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude by column of a bound's table, in parts that fit a processor's cache."""
    ends = [torch.maximum(part.amax(0), part.amin(0).neg()) for part in parts]
    return torch.stack(ends).amax(0).abs()


AffineRows = tuple[AffineRow, ...]


def make_bound(
    peak: torch.Tensor,
    shape: Shape,
    *,
    typical: float,
    norm: torch.Tensor | None = None,
    rows: Iterable[int] = (),
) -> Bound:
    """Make a bound from a peak and, where one is known, a norm over some dimensions.

    Without a norm, that of a row of peaks is taken. Peaks are reduced to the norm of their row.
    """
    peak = collapse(peak.double(), shape)
    dims = frozenset(rows) if norm is not None else frozenset({len(shape) - 1} if shape else ())
    derived = sum_squares(peak**2, shape, dims).sqrt()
    if norm is None:
        norm = derived
    else:
        norm = torch.minimum(collapse(norm.double(), shape), derived)
        norm = largest_over(norm, dims)
        peak = _take_smaller(peak, norm, shape)
    return Bound(peak, norm, dims, min(typical, float(peak.max()) if peak.numel() else 0.0))


def uniform(magnitude: float, shape: Shape, typical: float | None = None) -> Bound:
    """Make a bound with one magnitude for every element."""
    peak = torch.full((1,) * len(shape), float(magnitude), dtype=torch.float64)
    return make_bound(peak, shape, typical=magnitude if typical is None else typical)


def unsized(magnitude: float, typical: float, rank: int) -> Bound:
    """Make a bound with one magnitude, and no norms of rows, for a value of unknown sizes."""
    peak = torch.full((1,) * rank, float(magnitude), dtype=torch.float64)
    return Bound(peak, peak, frozenset(), min(typical, float(magnitude)))


def collapse(bound: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Reduce a bound to `MOST_ENTRIES`: take the largest of tokens, frames or rows, not of channels."""
    while bound.numel() > MOST_ENTRIES:
        bound = bound.amax(_choose_collapsed(bound.shape, len(shape) - 1), keepdim=True)
    return bound


def _choose_collapsed(sizes: Sequence[int], channel: int) -> int:
    others = [
        (size, -abs(dim - channel), dim)
        for dim, size in enumerate(sizes)
        if dim != channel and size > 1
    ]
    return max(others)[2] if others else channel


def _take_smaller(first: torch.Tensor, other: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return `collapse(torch.minimum(first, other))` without computing entries that are collapsed at once.

    Along a dimension where one of the two does not vary, the largest minimum is the minimum of the largest.
    """
    while math.prod(sizes := torch.broadcast_shapes(first.shape, other.shape)) > MOST_ENTRIES:
        dim = _choose_collapsed(sizes, len(shape) - 1)
        if first.shape[dim] > 1 and other.shape[dim] > 1:
            break
        first, other = (x.amax(dim, keepdim=True) for x in (first, other))
    return collapse(torch.minimum(first, other), shape)


def sum_squares(squares: torch.Tensor, shape: Shape, dims: Iterable[int]) -> torch.Tensor:
    """Sum squares over dimensions; an entry of size 1 counts for every index of its dimension."""
    for dim in dims:
        repeated = squares.shape[dim] == 1
        squares = squares * shape[dim] if repeated else squares.sum(dim, keepdim=True)
    return squares


def norm_over(bound: Bound, shape: Shape, dims: Iterable[int]) -> torch.Tensor:
    """Return a bound of the 2-norm over the given dimensions, which have size 1 in it."""
    dims = frozenset(dims)
    by_peak = sum_squares(bound.peak**2, shape, dims).sqrt()
    by_norm = sum_squares(bound.norm**2, shape, dims - bound.rows).sqrt()
    return torch.minimum(by_peak, by_norm)


def largest_over(bound: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """Return the largest entries over dimensions, which keep size 1."""
    for dim in dims:
        bound = bound.amax(dim, keepdim=True)
    return bound


def broadcast(bound: Bound, shape: Shape, target: Shape) -> Bound:
    """Return the bound of a value that is broadcast to another shape."""
    added = len(target) - len(shape)
    shape = (1,) * added + shape
    rows = frozenset(dim + added for dim in bound.rows)
    norm = bound.norm.reshape((1,) * added + bound.norm.shape)
    for dim in rows:
        if shape[dim] == 1 and target[dim] > 1:
            norm = norm * math.sqrt(target[dim])
    return replace(bound, peak=bound.peak.reshape((1,) * added + bound.peak.shape), norm=norm,
                   rows=rows)  # fmt: skip


def inflate(bound: Bound, relative: float, floor: float, shape: Shape) -> Bound:
    """Add room for one rounding: relative to each element, and to the largest one of the tensor."""
    slack = floor * bound.largest
    width = math.sqrt(math.prod(shape[dim] for dim in bound.rows))
    return replace(
        bound,
        peak=bound.peak * (1 + relative) + slack,
        norm=bound.norm * (1 + relative) + slack * width,
    )


def join(first: Bound, second: Bound, shape: Shape, other: Shape) -> Bound:
    """Return the bound of a value that is the first one or, in some part of it, the second.

    Args:
        shape: shape of the first.
        other: shape of the second, which is a part of the first or a view of it.
    """
    typical = max(first.typical, second.typical)
    if len(shape) != len(other):
        return make_bound(first.peak.clamp(min=second.largest), shape, typical=typical)
    cut = [dim for dim in range(len(shape)) if shape[dim] != other[dim]]
    peak = torch.maximum(first.peak, largest_over(second.peak, cut))
    dims = first.rows & second.rows
    if not dims or set(cut) & dims:
        return make_bound(peak, shape, typical=typical)
    ours = norm_over(first, shape, dims)
    norm = torch.maximum(ours, largest_over(norm_over(second, other, dims), cut))
    return make_bound(peak, shape, typical=typical, norm=norm, rows=dims)


def reshape(bound: Bound, shape: Shape, target: Shape) -> Bound:
    """Return the bound of a value that is viewed in another shape."""
    groups = group_dims(shape, target)
    norm, rows = bound.norm, set[int]()
    for source, result in groups:
        inside = [d in bound.rows for d in source if shape[d] > 1]
        if any(inside) and not all(inside):
            norm = sum_squares(norm**2, shape, [d for d in source if d not in bound.rows]).sqrt()
        if any(inside):
            rows |= {d for d in result if target[d] > 1}
    peak, norm = (_regroup(x, groups, shape, target) for x in (bound.peak, norm))
    return make_bound(peak, target, typical=bound.typical, norm=norm, rows=rows)


def _regroup(
    tensor: torch.Tensor, groups: list[tuple[list[int], list[int]]], shape: Shape, target: Shape
) -> torch.Tensor:
    """Reshape a bound's entries; a group of dimensions that shares one number still does."""
    sizes, pieces = list(tensor.shape), list[int]()
    for source, result in groups:
        whole = math.prod(shape[d] for d in source)
        is_one = whole != 1 and all(tensor.shape[d] == 1 for d in source)
        for d in () if is_one else source:
            sizes[d] = shape[d]
        pieces += [1 if is_one else target[d] for d in result]
    return tensor.expand(sizes).reshape(pieces)


def group_dims(shape: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """Group the dimensions of two shapes into runs that hold the same elements."""
    groups, i, j = list[tuple[list[int], list[int]]](), 0, 0
    while i < len(shape) or j < len(target):
        a, b = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(target))
        while (left := math.prod(shape[a:i])) != (right := math.prod(target[b:j])):
            if i == len(shape) and j == len(target):
                break
            is_left = i < len(shape) and (left < right or j == len(target))
            i, j = i + is_left, j + (not is_left)
        groups.append(([*range(a, i)], [*range(b, j)]))
    return groups


def permute(bound: Bound, order: Sequence[int]) -> Bound:
    """Return the bound of a permuted value, whose dimension `i` was dimension `order[i]`."""
    places = {old: new for new, old in enumerate(order)}
    return replace(
        bound,
        peak=bound.peak.permute(*order),
        norm=bound.norm.permute(*order),
        rows=frozenset(places[d] for d in bound.rows),
    )


def take(bound: Bound, target: Shape, dim: int, start: int, stop: int, op: int = 1) -> Bound:
    """Return the bound of a slice along one dimension; `op` is the slice's step."""
    peak, norm = (_slice(x, dim, start, stop, op) for x in (bound.peak, bound.norm))
    return make_bound(peak, target, typical=bound.typical, norm=norm, rows=bound.rows)


def _slice(tensor: torch.Tensor, dim: int, start: int, stop: int, op: int) -> torch.Tensor:
    index = [slice(None)] * tensor.dim()
    index[dim] = slice(start, stop, op) if tensor.shape[dim] > 1 else slice(None)
    return tensor[tuple(index)]


def concatenate(bounds: Sequence[Bound], shapes: Sequence[Shape], target: Shape, dim: int) -> Bound:
    """Return the bound of values that are concatenated along a dimension."""
    typical = max(b.typical for b in bounds)
    peak = _cat([b.peak for b in bounds], shapes, target, dim)
    dims = frozenset.intersection(*(b.rows for b in bounds))
    if not dims:
        return make_bound(peak, target, typical=typical)
    norms = [norm_over(b, s, dims) for b, s in zip(bounds, shapes, strict=True)]
    if dim in dims:
        norm = functools.reduce(torch.add, [x**2 for x in norms]).sqrt()
    else:
        norm = _cat(norms, shapes, target, dim)
    return make_bound(peak, target, typical=typical, norm=norm, rows=dims)


def _cat(
    tensors: Sequence[torch.Tensor], shapes: Sequence[Shape], target: Shape, dim: int
) -> torch.Tensor:
    """Concatenate bounds where the result stays small; else return the largest of them."""
    sizes = [max(t.shape[d] for t in tensors) for d in range(len(target))]
    sizes[dim] = target[dim]
    if math.prod(sizes) > MOST_ENTRIES or (dim != len(target) - 1 and target[dim] > 4096):
        return functools.reduce(torch.maximum, [t.amax(dim, keepdim=True) for t in tensors])
    parts = [
        tensor.expand([shape[dim] if d == dim else size for d, size in enumerate(sizes)])
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]
    return torch.cat(parts, dim)
