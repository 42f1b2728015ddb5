"""Bounds, computed values and loaded weights while bounds are propagated through a captured call.

Rules for single operations (`rules`) receive a view of this state. Weights are loaded one at a time, when
the graph first needs them. So a checkpoint can be read from disk in that order, and no model has to be
built.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from stopdown.errors import InputError
from stopdown.mapped_weights import Load
from stopdown.numerics import CACHED_VALUES, measure_amax, summarise_magnitudes
from stopdown.scaling.bounds.intervals import Interval, bound_interval
from stopdown.scaling.bounds.row_sums import LOOSE_WEIGHT_FLOOR, NARROW_WEIGHT_FLOOR, WEIGHT_FLOOR
from stopdown.scaling.bounds.values import (
    AffineRows,
    Bound,
    Shape,
    broadcast,
    inflate,
    make_bound,
    uniform,
)
from stopdown.scaling.graph.blocks import Blocks
from stopdown.scaling.graph.capture import Capture
from stopdown.scaling.graph.nodes import (
    arguments,
    is_float,
    is_kind,
    is_split,
    read_magnitude,
    shape_of,
)
from stopdown.scaling.graph.range_measurement import Range

SMALL = 1 << 16
"""A parameter with at most this many values has a bound for each element."""


@dataclass(frozen=True)
class Timesteps:
    """Timesteps that a sampler's schedule may contain, for which bounds are to hold.

    Attributes:
        values: `[T]`.
        radius: largest distance of a timestep from the nearest of the values; 0 if these are all.
    """

    values: torch.Tensor
    radius: float = 0.0


@dataclass(frozen=True)
class InputLimits:
    """Assumptions about a call's inputs on which bounds rest, by placeholder name.

    Attributes:
        largest: upper bound of the magnitude of a floating input's elements; inf for no limit.
        timesteps: possible values of inputs that hold a timestep.
        fixed: values of inputs that are the same in all calls.
    """

    largest: Mapping[str, float] = field(default_factory=dict)
    timesteps: Mapping[str, Timesteps] = field(default_factory=dict)
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Bounds:
    """Upper bounds of all activations of one captured call, for every allowed input.

    Attributes:
        limits: assumptions about the inputs.
        values: maps each node name to its bound; None if it has none.
        ranges: maps each node name to the ranges of its blocks, as in `run_capture`'s result; nodes
            without a bound are missing.
        scores: maps `component:path` of an attention to the bound of its scores.
        exact: names of nodes whose values were computed at every timestep.
        rowed: names of nodes whose rows are known as `n * gain + table[t] + rest`.
    """

    limits: InputLimits
    values: dict[str, Bound | None] = field(default_factory=dict)
    ranges: dict[str, tuple[Range, ...]] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    exact: set[str] = field(default_factory=set)
    rowed: set[str] = field(default_factory=set)


class KnownValues:
    """Lookup of bounds, computed values and weights while a graph is walked; weights are loaded on
    demand.
    """

    def __init__(
        self,
        capture: Capture,
        load: Load,
        limits: InputLimits,
        blocks: Mapping[Node, Blocks],
        loose: frozenset[str],
    ) -> None:
        self.capture, self.limits, self.blocks = capture, limits, blocks
        self._load, self._loose = load, loose
        self._narrow: set[str] = set()
        self._last: tuple[str, torch.Tensor] | None = None
        self._shares: dict[Node, tuple[Node, float]] = {}
        self.held: dict[Node, Any] = {}
        self.rows: dict[Node, AffineRows] = {}
        self.overwritten: set[Node] = set()
        self.found = Bounds(limits)

    def bound(self, value: Any) -> Bound | None:
        """Return upper bounds of the magnitudes of a node's result, or of a parameter; None if there
        are none.
        """
        held = self.held.get(value)
        if isinstance(held, Bound):
            return held
        if isinstance(held, Interval):
            return bound_interval(held, shape_of(value))
        if value.name in self.capture.parameters:
            return None if value in self.overwritten else self._bound_parameter(value)
        return None if is_float(value) else self._bound_integers(value)

    def _bound_integers(self, node: Node) -> Bound | None:
        """Bound whole numbers and booleans: a mask, an index with a known limit, or a view of one.

        Return None if nothing is known.
        """
        tensor = node.meta.get("val")
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bool:
            return uniform(1.0, shape_of(node))
        if node.name in self.limits.largest:
            return uniform(self.limits.largest[node.name], shape_of(node))
        moves = is_kind(node, "reshape", "expansion", "cast", "slice", "repetition")
        if not moves or not isinstance(node.args[0], Node):
            return None
        source = self.bound(node.args[0])
        return None if source is None else uniform(source.largest, shape_of(node))

    def load(self, node: Node) -> torch.Tensor | None:
        """Load the stored values of the parameter at a placeholder, or of a part that code splits off one.

        Return None for other nodes, and for a parameter that the code has overwritten. The previously
        loaded parameter is freed.
        """
        if node in self.overwritten:
            return None
        name = self.capture.parameters.get(node.name)
        if name is None:
            return self._load_part(node)
        if self._last is None or self._last[0] != name:
            self._last = None  # free the previous one first
            self._last = (name, self._load(name).detach())
        if node.name not in self.found.ranges:
            self._measure_parameter(node, self._last[1])
        return self._last[1]

    def _load_part(self, node: Any) -> torch.Tensor | None:
        """Load the values of one part of a parameter that code splits before use, as
        `nn.MultiheadAttention` does.

        Return None if the node isn't such a part.
        """
        if node.target is not operator.getitem or not is_split(node.args[0]):
            return None
        split, number = node.args
        if split.args[0].name not in self.capture.parameters:
            return None
        whole: Any = self.load(split.args[0])
        if whole is None:
            return None
        part: torch.Tensor = split.target(whole, *split.args[1:], **split.kwargs)[number]
        largest = measure_amax(part)
        self._shares[node] = split.args[0], measure_amax(whole) / largest if largest else 1.0
        return part

    def find_largest(self, node: Node) -> float | None:
        """Return the largest magnitude of a parameter that was loaded; None for a part of a parameter."""
        ranges = self.found.ranges.get(node.name) if node.name in self.capture.parameters else None
        found = max((x.amax for x in ranges or ()), default=math.nan)
        return found if math.isfinite(found) else None

    def floor(self, node: Node) -> float:
        """Return the error to allow for fp16 subnormals in a weight, relative to its largest magnitude.

        A part of a parameter has to be loaded first. Its allowance is that of the whole parameter,
        relative to the part's largest magnitude.
        """
        if node in self._shares:
            whole, share = self._shares[node]
            return self.floor(whole) * share
        name = self.capture.parameters.get(node.name)
        if name in self._loose:
            return LOOSE_WEIGHT_FLOOR
        return NARROW_WEIGHT_FLOOR if name in self._narrow else WEIGHT_FLOOR

    def narrow_floor(self, node: Node) -> None:
        """Reduce the error allowed for a weight's fp16 subnormals, which tightens bounds, if its values
        are large enough.

        The weight must have been loaded, and no larger allowance been asked for.
        """
        name, ranges = self.capture.parameters.get(node.name), self.found.ranges.get(node.name)
        least = 2.0**-25 / NARROW_WEIGHT_FLOOR
        if name is None or name in self._loose or not ranges:
            return
        if min(x.amax for x in ranges) >= 2 * least:
            self._narrow.add(name)
            self.found.ranges[node.name] = tuple(replace(x, least_stored=least) for x in ranges)

    def affine_rows(self, node: Node) -> AffineRows:
        """Return what is known of an activation's rows, as `n * gain + table[t] + rest`; () if nothing is.

        `n` is a norm's output and `t` the timestep.
        """
        return self.rows.get(node, ())

    def exact(self, node: Node) -> Interval | None:
        """Return an activation's values at every timestep, if they were computed; None if it is only
        bounded.
        """
        held = self.held.get(node)
        return held if isinstance(held, Interval) else None

    def _bound_parameter(self, node: Node) -> Bound | None:
        tensor = self.load(node)
        if tensor is None or not tensor.is_floating_point():
            return None
        tensor = tensor.cpu()  # linears only use products of their weights
        shape = tuple(tensor.shape)
        if tensor.numel() > SMALL and shape:
            sizes, norm, rms = _measure_table(tensor)
            bound = make_bound(sizes, shape, typical=rms, norm=norm, rows=(len(shape) - 1,))
        else:
            sizes = tensor.double().abs()
            rms = float(tensor.float().square().mean().sqrt()) if tensor.numel() else 0.0
            bound = make_bound(sizes, shape, typical=rms) if shape else uniform(
                float(sizes), (), rms)  # fmt: skip
        return inflate(bound, 2.0**-10, self.floor(node), shape)

    def _measure_parameter(self, node: Node, tensor: torch.Tensor) -> None:
        split = self.blocks.get(node)
        parts = [tensor]
        if split is not None:
            sizes = [b - a for a, b in zip(split.bounds, split.bounds[1:], strict=False)]
            parts = list(tensor.split(sizes, dim=split.dim))
        ranges, least_stored = [], 2.0**-25 / self.floor(node)
        for part in parts:
            if not part.is_floating_point():
                return
            amax, rms, least, bad = summarise_magnitudes(part)
            name = self.capture.parameters[node.name]
            if bad and name not in self.capture.kept_buffers:
                raise InputError(
                    f"{name} of {self.capture.component} holds NaN or Inf ({bad} of {part.numel()}).",
                    expected="Bounds are computed from finite weights; these give NaN in any precision.",
                    remedy="Download or save the model again. If it is stored in bf16, load it in bf16 or "
                    "fp32: in fp16 its largest weights may be Inf.",
                )
            ranges.append(Range(amax, rms, least, certain=True, least_stored=least_stored))
        self.found.ranges[node.name] = tuple(ranges)


def _measure_table(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Measure the largest magnitude of each column, the largest 2-norm of a row, and the root mean square.

    The first two are float64 of the tensor's rank: `[1, ..., columns]` and `[1, ..., 1]`. Rows are the last
    dimension.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    sizes, longest, squares = torch.zeros(rows.shape[1]), torch.zeros(1), torch.zeros(1).double()
    for part in rows.split(max(1, CACHED_VALUES // rows.shape[1])):
        wide = part.to(torch.float32, copy=True).abs_()
        sizes = torch.maximum(sizes, wide.amax(0))
        lengths = wide.square_().sum(-1)
        longest = torch.maximum(longest, lengths.amax(0))
        squares += lengths.double().sum()
    one = (1,) * (tensor.dim() - 1)
    norm = longest.sqrt().double() * (1 + 2.0**-12)
    rms = math.sqrt(float(squares) / tensor.numel())
    return sizes.double().reshape(*one, -1), norm.reshape(*one, 1), rms


class UnboundedError(Exception):
    """Raised by a rule if an argument has no upper bound, or if the rule has none for these arguments."""


@dataclass
class BoundedOperation:
    """One operation whose result is to be bounded, with access to its arguments' bounds: the input of a
    rule.

    Attributes:
        node: node of the operation.
        known: bounds of the values before it.
        parts: set by a rule whose bound of the result doesn't hold for its partial sums: a bound of
            these, which broadcasts to the result.
        is_length_read: whether some bound rests on the length of the result's rows.
    """

    node: Node
    known: KnownValues
    parts: torch.Tensor | None = None
    is_length_read: bool = True

    def __post_init__(self) -> None:
        self.given: dict[str, Any] = arguments(self.node)
        self.shape: Shape = shape_of(self.node)
        self.before: Shape = shape_of(self.node.args[0]) if self.node.args else ()

    @functools.cached_property
    def source(self) -> Bound:
        """The bound of the operation's first argument."""
        return self.bound(self.node.args[0])

    def find(self, value: Any) -> Bound | None:
        """Return the upper bound of an argument, a node or a number; None if it has none."""
        if isinstance(value, (int, float)):
            return uniform(read_magnitude(self.node, value), ())
        return self.known.bound(value) if isinstance(value, Node) else None

    def bound(self, value: Any) -> Bound:
        """Return the upper bound of an argument's magnitudes, for a rule that can't do without.

        Raises:
            UnboundedError: if the argument has no bound.
        """
        found = self.find(value)
        if found is None:
            raise UnboundedError
        return found

    def spread(self, value: Any) -> Bound:
        """Return the upper bound of an argument, broadcast to the shape of the operation's result.

        Raises:
            UnboundedError: if the argument has no bound.
        """
        return broadcast(self.bound(value), shape_of(value), self.shape)

    def is_intact(self, last: Any, first: Any) -> bool:
        """Return whether what operations computed is still there: nothing was written in place into their
        results.

        A rule that recognises several operations asks this, as it takes each for what it computed.

        Args:
            last, first: the last operation, and the one that is reached from there by first arguments.
        """
        while last is not first and last not in self.known.overwritten:
            last = last.args[0]
        return last not in self.known.overwritten

    def load(self, name: str) -> torch.Tensor | None:
        """Load the stored values of the argument with this name; return None if the argument is no
        parameter.
        """
        given = self.given.get(name)
        return self.known.load(given) if isinstance(given, Node) else None

    def make_bound(self, peak: torch.Tensor, typical: float, **more: Any) -> Bound:
        """Make a bound of the operation's result, in its shape, as a rule's return value.

        Args:
            peak: largest magnitude of each element, of the result's rank.
            typical: estimated root mean square.
            more: `norm` and `rows` of `values.make_bound`: a bound of row norms, and a row's dimensions.
        """
        return make_bound(peak, self.shape, typical=typical, **more)


Rule = Callable[[BoundedOperation], Bound]
"""Returns the bound of an operation's result, or raises `UnboundedError`."""
