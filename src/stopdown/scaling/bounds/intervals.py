"""Tensors that were computed at every timestep, each element with a bound of its rounding error.

An interval stores a value in exact arithmetic, for all timesteps at once. Rounding in the dtypes of the
graph moves the computed value by no more than the radius. `evaluation` computes intervals.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from stopdown.numerics import CACHED_VALUES
from stopdown.scaling.bounds.values import Bound, Shape, find_largest_rows, make_bound

MOST_TERMS = 256
"""Number of squares that are summed in fp32 at a time."""


@dataclass(frozen=True)
class Interval:
    """A tensor computed at every timestep (or a constant), with a bound of its rounding error.

    Attributes:
        center: exact value; float64 or fp32 if it is floating. If `batched`, its first dimension is
            that of the timesteps.
        radius: bound of each element's error, float64, without that dimension.
        batched: whether the value depends on the timestep.
        length: bound of the 2-norm of a whole row's error, `[..., 1]`; None if only `radius` is known.
        parts: bound of each partial sum of a linear's result, `[out]`; None for other operations.
    """

    center: torch.Tensor
    radius: torch.Tensor
    batched: bool = False
    length: torch.Tensor | None = None
    parts: torch.Tensor | None = None

    @property
    def row_error(self) -> torch.Tensor:
        """Upper bound of the 2-norm of each row's rounding error, `[..., 1]`."""
        found = measure_rows(self.radius)
        return found if self.length is None else torch.minimum(found, self.length)

    @functools.cached_property
    def largest(self) -> torch.Tensor:
        """The largest magnitude of each element of `center` over the timesteps, without the radius."""
        if not self.batched:
            return self.center.abs() if self.center.dtype != torch.bool else self.center.double()
        center, shape = drop_repeated(self.center), self.center.shape[1:]
        parts = center.split(max(1, CACHED_VALUES // max(center[0].numel(), 1)))
        sizes = parts if center.is_floating_point() else [x.abs().double() for x in parts]
        return find_largest_rows(sizes).double().expand(shape)

    @functools.cached_property
    def row_norms(self) -> tuple[torch.Tensor, float]:
        """The largest 2-norm of each row over the timesteps, `[..., 1]`, and the RMS of all values."""
        shape = self.center.shape[1:] if self.batched else self.center.shape
        center = self.center if self.center.is_floating_point() else self.center.double()
        if not center.numel():
            return torch.zeros((*shape[:-1], 1) if shape else ()).double(), 0.0
        if not shape:
            return self.largest.double(), float(center.double().square().mean().sqrt())
        terms = math.gcd(shape[-1], MOST_TERMS)
        parts = drop_repeated(center).unflatten(-1, (-1, terms))
        squares = torch.linalg.vector_norm(parts, dim=-1).double().square().sum(-1, keepdim=True)
        typical = float(squares.mean() / shape[-1]) ** 0.5
        if center.dtype == torch.float32:  # errors of its sums, and underflow
            squares = squares * (1 + (terms + 8) * 2.0**-23) + shape[-1] * 2.0**-126
        norms = (squares.amax(0) if self.batched else squares).sqrt()
        return norms.expand(*shape[:-1], 1), typical

    def widen(self, more: torch.Tensor) -> Interval:
        """Return the interval with the error `more`, one bound for each element, added to its radius.

        Cached properties of the center are kept.
        """
        length = None if self.length is None else self.length + measure_rows(more)
        made = Interval(self.center, self.radius + more, self.batched, length, self.parts)
        vars(made).update({k: x for k, x in vars(self).items() if k in ("largest", "row_norms")})
        return made


def make_interval(center: torch.Tensor, *, batched: bool = False) -> Interval:
    """Make an interval, with error radius 0, of values that are known exactly, such as a constant's.

    Args:
        center: the values.
        batched: whether the first dimension is that of the timesteps.
    """
    center = center.double() if center.is_floating_point() else center
    return Interval(
        center, torch.zeros(center.shape[1:] if batched else center.shape).double(), batched
    )


def bound_interval(value: Interval, shape: Shape) -> Bound:
    """Return upper bounds of magnitudes and row norms that hold for an interval's values at every timestep.

    Args:
        shape: shape of the tensor at one timestep.
    """
    peak = value.largest.double() + value.radius
    norm, typical = value.row_norms
    if not shape:
        return make_bound(peak, shape, typical=typical)
    return make_bound(
        peak, shape, typical=typical, norm=norm + value.row_error, rows=(len(shape) - 1,)
    )


def measure_rows(values: torch.Tensor) -> torch.Tensor:
    return values.square().sum(-1, keepdim=True).sqrt() if values.dim() else values.abs()


def drop_repeated(center: torch.Tensor) -> torch.Tensor:
    """Keep one entry of each middle dimension that is expanded (stride 0), such as guidance branches,
    to save work.

    First and last dimension, timesteps and channels, are kept whole.
    """
    for dim, stride in enumerate(center.stride()):
        if stride == 0 and 0 < dim < center.dim() - 1:
            center = center.narrow(dim, 0, 1)
    return center


def find_repeated(center: torch.Tensor) -> torch.Tensor:
    """Keep one entry of each middle dimension whose entries are all equal, by stride or by value, to
    save work.
    """
    for dim in range(1, center.dim() - 1):
        first = center.narrow(dim, 0, 1)
        if center.stride(dim) == 0:
            center = first
        elif center.shape[dim] > 1 and torch.equal(first.expand_as(center), center):
            center = first.clone()
    return center
