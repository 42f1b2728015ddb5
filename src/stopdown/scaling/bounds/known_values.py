"""What is known of the values of a captured call, and what a rule of a bound is given of it.

Weights are asked for one at a time, where the graph first needs them, so a checkpoint can be read from
disk as it goes and no model has to be built.
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
"""A parameter of at most this many values is looked at element by element wherever it is used."""

Load = Callable[[str], torch.Tensor]
"""Gives a parameter or buffer by its name, as it is stored."""


def bring_home(load: Load) -> Load:
    """Load weights to the host, where all bounds are."""
    return lambda name: load(name).cpu()


@dataclass(frozen=True)
class Timesteps:
    """The timesteps that a schedule can ask for.

    Attributes:
        values: `[T]`.
        radius: no timestep is further than this from one of them; 0 where they are all there are.
    """

    values: torch.Tensor
    radius: float = 0.0


@dataclass(frozen=True)
class InputLimits:
    """What the inputs of a call can be, by the name of its placeholder.

    Attributes:
        largest: magnitude that no element of a floating input exceeds; inf for no limit.
        timesteps: of inputs that hold one.
        fixed: inputs that are always the same.
    """

    largest: Mapping[str, float] = field(default_factory=dict)
    timesteps: Mapping[str, Timesteps] = field(default_factory=dict)
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Bounds:
    """What was found for one captured call.

    Attributes:
        values: node name to its bound; None where there is none.
        ranges: node name to the ranges of its blocks, as `run_capture` gives them; values
            without a bound are not there.
        scores: `component:path` of attention to the bound of its scores.
        exact, rowed: names of nodes that were known for every timestep, or by rows behind a norm.
    """

    values: dict[str, Bound | None] = field(default_factory=dict)
    ranges: dict[str, tuple[Range, ...]] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    exact: set[str] = field(default_factory=set)
    rowed: set[str] = field(default_factory=set)


class KnownValues:
    """What is known so far of each value of a captured call; weights are read when they are asked for."""

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
        self.found = Bounds()

    def bound(self, value: Any) -> Bound | None:
        """Return the bound of a node or a parameter; None if it has none."""
        held = self.held.get(value)
        if isinstance(held, Bound):
            return held
        if isinstance(held, Interval):
            return bound_interval(held, shape_of(value))
        if value.name in self.capture.parameters:
            return self._bound_parameter(value)
        return None if is_float(value) else self._bound_whole(value)

    def _bound_whole(self, node: Node) -> Bound | None:
        """Return the bound of integers or booleans, such as a mask or a view of one; None for others."""
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
        """Load a parameter's stored values, or those of a part of one; return None for other nodes."""
        name = self.capture.parameters.get(node.name)
        if name is None:
            return self._load_part(node)
        if self._last is None or self._last[0] != name:
            self._last = None  # let the one before go first
            self._last = (name, self._load(name).detach())
        if node.name not in self.found.ranges:
            self._measure_parameter(node, self._last[1])
        return self._last[1]

    def _load_part(self, node: Any) -> torch.Tensor | None:
        """Load one part of a parameter that code splits before it multiplies (`nn.MultiheadAttention`).

        Return None for other nodes.
        """
        if node.target is not operator.getitem or not is_split(node.args[0]):
            return None
        split, number = node.args
        if split.args[0].name not in self.capture.parameters:
            return None
        whole: Any = self.load(split.args[0])
        part: torch.Tensor = split.target(whole, *split.args[1:], **split.kwargs)[number]
        largest = measure_amax(part)
        self._shares[node] = split.args[0], measure_amax(whole) / largest if largest else 1.0
        return part

    def find_largest(self, node: Node) -> float | None:
        """Return the largest magnitude of a loaded parameter; None for a part of one."""
        ranges = self.found.ranges.get(node.name) if node.name in self.capture.parameters else None
        found = max((x.amax for x in ranges or ()), default=math.nan)
        return found if math.isfinite(found) else None

    def floor(self, node: Node) -> float:
        """Return the room for a parameter's subnormals in fp16, relative to its largest magnitude.

        The room of a part is known once it is loaded. It is that of the whole, relative to the part's
        largest magnitude.
        """
        if node in self._shares:
            whole, share = self._shares[node]
            return self.floor(whole) * share
        name = self.capture.parameters.get(node.name)
        if name in self._loose:
            return LOOSE_WEIGHT_FLOOR
        return NARROW_WEIGHT_FLOOR if name in self._narrow else WEIGHT_FLOOR

    def narrow_floor(self, node: Node) -> None:
        """Reduce the room for a loaded parameter's subnormals, if its values are large enough."""
        name, ranges = self.capture.parameters.get(node.name), self.found.ranges.get(node.name)
        least = 2.0**-25 / NARROW_WEIGHT_FLOOR
        if name is None or name in self._loose or not ranges:
            return
        if min(x.amax for x in ranges) >= 2 * least:
            self._narrow.add(name)
            self.found.ranges[node.name] = tuple(replace(x, least_stored=least) for x in ranges)

    def affine_rows(self, node: Node) -> AffineRows:
        """Return the affine rows of a value behind a norm; () if they are not known."""
        return self.rows.get(node, ())

    def exact(self, node: Node) -> Interval | None:
        """Return the interval of a value that is known up to rounding; None for others."""
        held = self.held.get(node)
        return held if isinstance(held, Interval) else None

    def _bound_parameter(self, node: Node) -> Bound | None:
        tensor = self.load(node)
        if tensor is None or not tensor.is_floating_point():
            return None
        tensor = tensor.cpu()  # of a linear's weight only products are asked for
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
            amax, rms, least, _ = summarise_magnitudes(part)
            ranges.append(Range(amax, rms, least, certain=True, least_stored=least_stored))
        self.found.ranges[node.name] = tuple(ranges)


def _measure_table(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Measure the largest magnitude of each column, the longest row, and the root mean square.

    The first two are float64 of the tensor's rank, with size 1 in all dimensions but the last, and in all.
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
    """An argument has no bound, or the rule has none for such arguments."""


@dataclass
class BoundedOperation:
    """One operation whose result is to be bounded.

    Attributes:
        known: what is known of the values before it.
        parts: what a rule knows of the parts of the result's sums, where the bound of the result is
            none of theirs; it broadcasts to the result.
    """

    node: Node
    known: KnownValues
    parts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.given: dict[str, Any] = arguments(self.node)
        self.shape: Shape = shape_of(self.node)
        self.before: Shape = shape_of(self.node.args[0]) if self.node.args else ()

    @functools.cached_property
    def source(self) -> Bound:
        """The bound of the first argument, whose shape is `before`."""
        return self.bound(self.node.args[0])

    def find(self, value: Any) -> Bound | None:
        """Return the bound of a node, or the magnitude of a number as a bound; None if there is none."""
        if isinstance(value, (int, float)):
            return uniform(read_magnitude(self.node, value), ())
        return self.known.bound(value) if isinstance(value, Node) else None

    def bound(self, value: Any) -> Bound:
        """Return the bound of an argument.

        Raises:
            UnboundedError: it has none.
        """
        found = self.find(value)
        if found is None:
            raise UnboundedError
        return found

    def spread(self, value: Any) -> Bound:
        """Return the bound of an argument, broadcast to the result's shape."""
        return broadcast(self.bound(value), shape_of(value), self.shape)

    def load(self, name: str) -> torch.Tensor | None:
        """Load the stored values of an argument by its name; return None if it is no parameter."""
        given = self.given.get(name)
        return self.known.load(given) if isinstance(given, Node) else None

    def made(self, peak: torch.Tensor, typical: float, **more: Any) -> Bound:
        """Make a bound of the result."""
        return make_bound(peak, self.shape, typical=typical, **more)


Rule = Callable[[BoundedOperation], Bound]
"""Raises `UnboundedError` where the result has no bound."""
