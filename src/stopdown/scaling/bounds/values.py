"""Bounds that hold for every input: the largest magnitude per channel and the 2-norm per row of a tensor.

The tensors of a `Bound` broadcast to the value's shape. They can therefore differ by channel, token or
head, or be a single number. `docs/certificates.md` has the argument. All arithmetic is in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

Shape = tuple[int, ...]

MOST_ENTRIES = 1 << 19
"""A bound with more entries than this is reduced to maxima over its longest dimensions, channels last."""


BASIS = 16
"""A table over timesteps `[T, d]` with more rows than this is factored into this many basis rows and a
remainder."""

TIMESTEPS_AT_ONCE = 16
"""Number of timesteps of such a table that are processed together."""


@dataclass(frozen=True)
class Bound:
    """Upper bounds of one tensor's magnitudes and row norms that hold for every input.

    Attributes:
        peak: upper bound of each element's magnitude. float64, of the value's rank; each size is 1 or
            the value's.
        norm: upper bound of the 2-norm over the dimensions `rows`, in which it has size 1; otherwise as
            `peak`. It also bounds the norm of every part of a row.
        rows: dimensions of a row, counted from 0.
        typical: estimate of the root mean square. It only sets prices; nothing that is proved uses it.
    """

    peak: torch.Tensor
    norm: torch.Tensor
    rows: frozenset[int]
    typical: float

    @property
    def largest(self) -> float:
        """The largest entry of `peak`: no element of the value exceeds it."""
        return float(self.peak.max()) if self.peak.numel() else 0.0


@dataclass(frozen=True)
class AffineRow:
    """Rows of activations of the form `n * gain + table[t] + v`, with `d` channels, at a timestep `t`.

    `n` is a norm's output; `n` and `v` are unknown and only bounded.

    Attributes:
        radius: upper bound of the 2-norm of `n`.
        gain: factor of each channel, `[d]` float64, not negative.
        table: shift at each timestep, `[T, d]`, or `[1, d]` if it is constant; float64 or fp32.
        rest: upper bound of the magnitude of each element of `v`, `[d]` float64.
    """

    radius: float
    gain: torch.Tensor
    table: torch.Tensor
    rest: torch.Tensor

    @functools.cached_property
    def largest(self) -> torch.Tensor:
        """Largest magnitude of the shift `table` in each channel, over all timesteps: `[d]` float64."""
        return find_largest_rows(self.table.split(TIMESTEPS_AT_ONCE)).double()

    @functools.cached_property
    def basis(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Factors of the shift `table`, `coefficients [T, k] @ rows [k, d]`, with an error bound `[d]`.

        Multiplying a weight by `k` rows is cheaper than by the shifts at all `T` timesteps.
        """
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
    """Return the largest magnitude in each column `[d]` of a table `[T, d]` that is passed in parts of
    its rows.
    """
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
    """Make a bound of a tensor from its elements' largest magnitudes and, if known, its rows' 2-norms.

    Without a norm, that of a row of peaks over the last dimension is used. Peaks are capped at the norm
    of their row.

    Args:
        peak: largest magnitudes; each size is 1 or that of `shape`.
        shape: shape of the tensor.
        typical: estimated root mean square.
        norm: bound of the 2-norm over the dimensions `rows`.
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
    """Make a bound in which every element of a tensor has the same largest magnitude.

    Args:
        typical: estimated root mean square; None for `magnitude`.
    """
    peak = torch.full((1,) * len(shape), float(magnitude), dtype=torch.float64)
    return make_bound(peak, shape, typical=magnitude if typical is None else typical)


def unsized(magnitude: float, typical: float, rank: int) -> Bound:
    """Make a bound with one largest magnitude for a tensor whose sizes depend on data; it has no row norms.

    Args:
        typical: estimated root mean square.
        rank: number of dimensions.
    """
    peak = torch.full((1,) * rank, float(magnitude), dtype=torch.float64)
    return Bound(peak, peak, frozenset(), min(typical, float(magnitude)))


def collapse(bound: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Reduce a tensor of upper bounds to `MOST_ENTRIES` by maxima over its longest dimensions, to save
    memory.

    Channels (the last dimension) are reduced last.
    """
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
    """Return the elementwise minimum of two tensors of upper bounds, reduced to `MOST_ENTRIES` by
    `collapse`.

    Entries that would be reduced at once aren't computed: along a dimension where one of the two does
    not vary, the largest minimum is the minimum of the largest.
    """
    while math.prod(sizes := _broadcast_sizes(first.shape, other.shape)) > MOST_ENTRIES:
        dim = _choose_collapsed(sizes, len(shape) - 1)
        if first.shape[dim] > 1 and other.shape[dim] > 1:
            break
        first, other = (x.amax(dim, keepdim=True) for x in (first, other))
    return collapse(torch.minimum(first, other), shape)


def _broadcast_sizes(first: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the sizes to which two tensors of one rank broadcast.

    `torch.broadcast_shapes` takes a twelfth of the time of all bounds (torch 2.13.0, 2026-11-29).
    """
    return [b if a == 1 else a for a, b in zip(first, other, strict=True)]


def sum_squares(squares: torch.Tensor, shape: Shape, dims: Iterable[int]) -> torch.Tensor:
    """Sum squares over dimensions of a tensor of `shape`; a size 1 entry that is broadcast counts
    repeatedly.

    The dimensions keep size 1.
    """
    for dim in dims:
        repeated = squares.shape[dim] == 1
        squares = squares * shape[dim] if repeated else squares.sum(dim, keepdim=True)
    return squares


def norm_over(bound: Bound, shape: Shape, dims: Iterable[int]) -> torch.Tensor:
    """Return an upper bound of a tensor's 2-norm over the given dimensions, from its peaks and row norms.

    The result has size 1 in these dimensions.
    """
    dims = frozenset(dims)
    by_peak = sum_squares(bound.peak**2, shape, dims).sqrt()
    by_norm = sum_squares(bound.norm**2, shape, dims - bound.rows).sqrt()
    return torch.minimum(by_peak, by_norm)


def largest_over(bound: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """Return the maximum of a tensor over the given dimensions, which keep size 1."""
    for dim in dims:
        bound = bound.amax(dim, keepdim=True)
    return bound


def broadcast(bound: Bound, shape: Shape, target: Shape) -> Bound:
    """Return the bound that a tensor of `shape` has after it is broadcast to the shape `target`."""
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
    """Widen a bound by the error that rounding the tensor to its dtype may add.

    Args:
        relative: error relative to each element.
        floor: error of every element relative to the tensor's largest one.
        shape: shape of the tensor.
    """
    slack = floor * bound.largest
    width = math.sqrt(math.prod(shape[dim] for dim in bound.rows))
    return replace(
        bound,
        peak=bound.peak * (1 + relative) + slack,
        norm=bound.norm * (1 + relative) + slack * width,
    )


def choose(first: Bound, second: Bound, shape: Shape, mixed: Collection[int]) -> Bound:
    """Return a bound of a tensor whose elements each come from one of two tensors of its shape, as after
    `where`.

    Args:
        mixed: dimensions along which elements of both may alternate.
    """
    typical, dims = max(first.typical, second.typical), first.rows & second.rows
    peak = torch.maximum(first.peak, second.peak)
    if not dims:
        return make_bound(peak, shape, typical=typical)
    one, two = norm_over(first, shape, dims), norm_over(second, shape, dims)
    norm = torch.hypot(one, two) if dims.intersection(mixed) else torch.maximum(one, two)
    return make_bound(peak, shape, typical=typical, norm=norm, rows=dims)


def join(
    first: Bound, second: Bound, shape: Shape, other: Shape, cut: Collection[int] | None
) -> Bound:
    """Return a bound of a tensor after a write into a view of the same storage.

    Args:
        first: bound of the tensor before.
        second: bound of what was written.
        shape: shape of the tensor.
        other: shape of the view.
        cut: dimensions along which the view's elements may have other places in the tensor; None if
            nothing is known of their places.
    """
    typical = max(first.typical, second.typical)
    if cut is None or len(shape) != len(other):
        return make_bound(first.peak.clamp(min=second.largest), shape, typical=typical)
    cut = {*cut, *(dim for dim in range(len(shape)) if shape[dim] != other[dim])}
    peak = torch.maximum(first.peak, largest_over(second.peak, cut))
    dims = first.rows & second.rows
    if not dims or cut & dims:
        return make_bound(peak, shape, typical=typical)
    ours = norm_over(first, shape, dims)
    norm = torch.maximum(ours, largest_over(norm_over(second, other, dims), cut))
    return make_bound(peak, shape, typical=typical, norm=norm, rows=dims)


def reshape(bound: Bound, shape: Shape, target: Shape) -> Bound:
    """Return the bound that a tensor of `shape` has after it is viewed in the shape `target`."""
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
    """Reshape a tensor of upper bounds as the tensor that it bounds is reshaped, but keep broadcast
    sizes 1.

    Args:
        tensor: upper bounds; each size is 1 or that of `shape`.
        groups: dimensions before and after that correspond, from `group_dims`.
    """
    sizes, pieces = list(tensor.shape), list[int]()
    for source, result in groups:
        whole = math.prod(shape[d] for d in source)
        is_one = whole != 1 and all(tensor.shape[d] == 1 for d in source)
        for d in () if is_one else source:
            sizes[d] = shape[d]
        pieces += [1 if is_one else target[d] for d in result]
    return tensor.expand(sizes).reshape(pieces)


def group_dims(shape: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """Pair the dimensions that a reshape splits or joins: shortest runs of `shape` and `target` with
    equal products.
    """
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
    """Return the bound of a tensor after `permute`: its dimension `i` was dimension `order[i]`."""
    places = {old: new for new, old in enumerate(order)}
    return replace(
        bound,
        peak=bound.peak.permute(*order),
        norm=bound.norm.permute(*order),
        rows=frozenset(places[d] for d in bound.rows),
    )


def take(bound: Bound, target: Shape, dim: int, start: int, stop: int, op: int = 1) -> Bound:
    """Return the bound of the slice `start:stop:op` of a tensor along one dimension; `target` is the
    slice's shape.
    """
    peak, norm = (_slice(x, dim, start, stop, op) for x in (bound.peak, bound.norm))
    return make_bound(peak, target, typical=bound.typical, norm=norm, rows=bound.rows)


def _slice(tensor: torch.Tensor, dim: int, start: int, stop: int, op: int) -> torch.Tensor:
    index = [slice(None)] * tensor.dim()
    index[dim] = slice(start, stop, op) if tensor.shape[dim] > 1 else slice(None)
    return tensor[tuple(index)]


def concatenate(bounds: Sequence[Bound], shapes: Sequence[Shape], target: Shape, dim: int) -> Bound:
    """Return the bound of the concatenation of tensors along `dim`.

    Args:
        bounds, shapes: bound and shape of each tensor.
        target: shape of the result.
    """
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
    """Concatenate tensors of upper bounds along `dim`, or return their maximum if the result would be
    too large.
    """
    sizes = [max(t.shape[d] for t in tensors) for d in range(len(target))]
    sizes[dim] = target[dim]
    if math.prod(sizes) > MOST_ENTRIES or (dim != len(target) - 1 and target[dim] > 4096):
        return functools.reduce(torch.maximum, [t.amax(dim, keepdim=True) for t in tensors])
    parts = [
        tensor.expand([shape[dim] if d == dim else size for d, size in enumerate(sizes)])
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]
    return torch.cat(parts, dim)
