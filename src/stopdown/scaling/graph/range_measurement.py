"""Measure the magnitudes of every activation and weight of a captured call, by running its graph in fp32.

Scales are then chosen from these so that fp16 doesn't overflow. The graph was captured in the dtype in
which the module will run. Here all its 16-bit dtypes are replaced by fp32, so that nothing overflows or
underflows. Activations with fill values of a mask (the smallest fp16 number, or -inf) are measured without
these.

Not covered: intermediate values inside a fused kernel (attention scores), and inputs larger than the
given ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from stopdown.errors import ScalingError
from stopdown.fold_names import name_parameters
from stopdown.mapped_weights import find_stored
from stopdown.number_formats import FP16, NEAR_FP16_END
from stopdown.numerics import HALVES, summarise_magnitudes
from stopdown.scaling.graph.blocks import Blocks
from stopdown.scaling.graph.capture import Capture, flatten_call, module_path
from stopdown.scaling.graph.nodes import (
    arguments,
    has_trait,
    is_float,
    is_kind,
    is_range_clamp,
    operation,
    read_magnitude,
)

_FP32_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Range:
    """Magnitudes of an activation or weight, or of one block of its channels, before scaling.

    Attributes:
        amax: largest magnitude.
        rms: root mean square.
        least: smallest positive magnitude.
        certain: True if `amax` is a proven bound for all inputs; False if it was measured.
        bound: proven bound for all inputs if `amax` was measured; infinite if there is none.
        least_stored: the proven bound holds only if `amax` is at least this after scaling, as smaller
            values would be subnormal in fp16.
        unbounded: measured because no rule returns a bound, so the activation may be NaN as well as Inf.
    """

    amax: float
    rms: float
    least: float
    certain: bool = False
    least_stored: float = 0.0
    bound: float = math.inf
    unbounded: bool = False

    @property
    def largest(self) -> float:
        """The largest magnitude for any input; infinite if unknown."""
        return self.amax if self.certain else self.bound

    def merged(self, other: Range) -> Range:
        """Return a range that covers both, for two calls of one graph; of the RMS it has the smaller
        positive one.
        """
        sizes = [x for x in (self.rms, other.rms) if x > 0]
        least = min((x for x in (self.least, other.least) if x > 0), default=0.0)
        certain = self.certain and other.certain
        stored = max(self.least_stored, other.least_stored)
        amax, bound = max(self.amax, other.amax), max(self.bound, other.bound)
        unbounded = self.unbounded or other.unbounded
        return Range(amax, min(sizes, default=0.0), least, certain, stored, bound, unbounded)


Ranges = Mapping[str, tuple[Range, ...]]
"""Maps each node name to the ranges of the value's blocks: to a single range if the value has one
exponent."""


def run_capture(
    capture: Capture,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    blocks: Mapping[Node, Blocks],
    kept_clamps: frozenset[Node] = frozenset(),
    known: Ranges | None = None,
) -> tuple[dict[str, tuple[Range, ...]], tuple[torch.Tensor, ...]]:
    """Run a captured call in fp32; return the magnitudes of all activations and parameters, and the
    outputs.

    The outputs are those of the 16-bit graph, computed in fp32. They differ from those of the module in
    fp32 if the model has code that only runs in fp16: a kept clamp.

    Args:
        blocks: activations and parameters whose blocks of channels get separate exponents, and so ranges.
        kept_clamps: clamps at fp16's maximum that belong to the model; others are skipped.
        known: ranges of an earlier call, whose weights are not measured again.

    Returns:
        The ranges by node name, one for each block, and the call's output tensors.

    Raises:
        ScalingError: if the number of tensors is not that of the capture, or if an input, a weight or
            an output has NaN or Inf in fp32.

    Cost: one forward in fp32, one pass and one host read for each value. Weights that are still in
    files are loaded for one operation at a time.
    """
    tensors = flatten_call(args, kwargs)
    if len(tensors) != len(capture.inputs):
        raise ScalingError(
            f"{len(tensors)} tensors were given to a call that was captured with "
            f"{len(capture.inputs)}.",
            remedy="Capture each kind of call separately.",
        )
    runner = _Runner(capture, module, dict(zip(capture.inputs, tensors, strict=True)))
    runner.blocks, runner.kept_clamps, runner.known = blocks, kept_clamps, known or {}
    with torch.no_grad(), _leaving_vmap():
        outputs = runner.run()
    return runner.ranges, outputs


@contextlib.contextmanager
def _leaving_vmap() -> Iterator[None]:
    """Close, after an error, the `vmap` levels that PyTorch left open when a graph failed inside them."""
    before = torch._C._functorch.maybe_current_level() or 0
    try:
        yield
    finally:
        while (torch._C._functorch.maybe_current_level() or 0) > before:
            torch._C._functorch._vmap_decrement_nesting()


def merge_ranges(first: Ranges, second: Ranges) -> dict[str, tuple[Range, ...]]:
    """Merge the measured ranges of two calls of one graph into ranges that cover both."""
    both = {
        name: tuple(a.merged(b) for a, b in zip(parts, second[name], strict=True))
        for name, parts in first.items()
    }
    return {**second, **both}


def find_masked(capture: Capture) -> frozenset[Node]:
    """Return the nodes whose values contain an attention mask's fill values, such as -inf or fp16's
    minimum.

    Their magnitudes have to be measured without these elements.
    """
    masked: set[Node] = set()
    for node in capture.graph.graph.nodes:
        if has_trait(node, "unmasks") or is_range_clamp(node) or not is_float(node):
            continue
        if bool(find_sentinels(capture.constants.get(node.name)).any()):
            masked.add(node)
        numbers = [x for x in arguments(node).values() if isinstance(x, (int, float))]
        sentinel = any(abs(x) >= NEAR_FP16_END and not read_magnitude(node, x) for x in numbers)
        if sentinel or masked & set(node.all_input_nodes):
            masked.add(node)
    return frozenset(masked)


def find_sentinels(constant: Any) -> torch.Tensor:
    """Return a boolean mask of a constant's elements that are -inf or a format's lowest number, as in
    masks.

    The result has the constant's shape; it is empty if the constant is no floating tensor.
    """
    if not isinstance(constant, torch.Tensor) or not constant.is_floating_point():
        return torch.zeros(0, dtype=torch.bool)
    lowest = torch.tensor([torch.finfo(x).min for x in (*HALVES, torch.float32)] + [-math.inf])
    return torch.isin(constant.float(), lowest.to(constant.device))


def find_saturating(graph: torch.fx.Graph, ranges: Ranges) -> frozenset[Node]:
    """Return the activations that may overflow to Inf without changing a result, since only `tanh` or
    the like reads them.

    One is the cube inside a tanh-approximated GELU, which overflows fp16 from 41 on. Before the saturating
    function, numbers may multiply such an activation, and others in range may be added to it.
    """
    harmless: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.users and all(_saturates(user, node, harmless, ranges) for user in node.users):
            harmless.add(node)
    return frozenset(harmless)


def _saturates(user: Node, node: Node, harmless: set[Node], ranges: Ranges) -> bool:
    if has_trait(user, "saturates"):
        return True
    others = [x for x in user.all_input_nodes if x is not node]
    if user not in harmless or not is_kind(user, "multiply", "add"):
        return False
    if is_kind(user, "multiply"):
        return not others
    return all(part.amax < FP16.largest for x in others for part in ranges.get(x.name, ()))


@dataclass(frozen=True)
class _Weight:
    """Stands for a parameter that is still in a file, in place of a tensor; each operation that reads
    it loads it.
    """

    node: Node


class _Runner(torch.fx.Interpreter):
    """Interpreter that runs a captured graph in fp32 and records the magnitudes of each node's result."""

    blocks: Mapping[Node, Blocks]
    kept_clamps: frozenset[Node]
    known: Ranges

    def __init__(
        self, capture: Capture, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(capture.graph)
        self.extra_traceback = False  # else errors would contain the graph's node
        self.capture, self.tensors = capture, tensors
        self.named = name_parameters(module)
        devices = (x.device for x in tensors.values() if isinstance(x, torch.Tensor) and x.dim())
        self.device = next(devices, None)  # where offloaded weights are loaded
        self.masked = find_masked(capture)
        self.ranges: dict[str, tuple[Range, ...]] = {}

    def run_node(self, n: Node) -> Any:
        is_known = n.op == "placeholder" and n.name not in self.tensors and n.name in self.known
        held = self.named.get(self.capture.parameters.get(n.name, ""))
        waits = held is not None and find_stored(held) is not None
        if is_known and waits:
            self.ranges[n.name] = self.known[n.name]
            return _Weight(n)
        result = self._load(n) if n.op == "placeholder" else self._compute(n)
        if is_float(n) and isinstance(result, torch.Tensor):
            self.ranges[n.name] = self.known[n.name] if is_known else self._measure(n, result)
        return _Weight(n) if waits else result

    def _load(self, node: Node) -> Any:
        if node.name in self.capture.parameters:
            found = self.named[self.capture.parameters[node.name]]
        elif node.name in self.capture.constants:
            found = self.capture.constants[node.name]
        else:
            found = self.tensors[node.name].clone()  # some code writes into its arguments
        if isinstance(found, torch.Generator):
            return found.clone_state()  # leaves the caller's generator alone
        if (stored := find_stored(found)) is not None:
            found = stored.read(self.device or found.device)
        found = found.detach() if self.device is None else found.detach().to(self.device)
        return found.float() if found.dtype in HALVES else found

    def _compute(self, node: Node) -> Any:
        if is_kind(node, "assertion"):
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        args, kwargs = pytree.tree_map_only(_Weight, lambda x: self._load(x.node), (args, kwargs))
        if is_range_clamp(node) and node not in self.kept_clamps:
            return args[0]
        if node.op != "call_function":
            return getattr(self, node.op)(node.target, args, kwargs)
        args, kwargs = pytree.tree_map(_widen, (args, kwargs))
        if is_kind(node, "row_norm", "group_norm"):
            self._check_squares(node, args[0])
        result = _call(node.target, args, kwargs)
        return result.zero_() if is_kind(node, "blank") else result

    def _measure(self, node: Node, value: torch.Tensor) -> tuple[Range, ...]:
        split = self.blocks.get(node)
        if split is None:
            return (self._measure_part(node, value),)
        parts = value.split([b - a for a, b in zip(split.bounds, split.bounds[1:], strict=False)],
                            dim=split.dim)  # fmt: skip
        return tuple(self._measure_part(node, part) for part in parts)

    def _measure_part(self, node: Node, value: torch.Tensor) -> Range:
        value = _gather_examples(value)
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        if node in self.masked:
            value = value[value > -NEAR_FP16_END / 2]
        amax, rms, least, bad = summarise_magnitudes(value)
        if bad and (node.op == "placeholder" or any(x.op == "output" for x in node.users)):
            raise ScalingError(
                f"{self._name(node)} holds {bad} values that are NaN or Inf in fp32 already.",
                expected="Exponents can only be found for a model that is right in fp32.",
                remedy="Check the weights on disk and the arguments of the call.",
            )
        return Range(amax, rms, least)

    def _check_squares(self, node: Node, value: torch.Tensor) -> None:
        """Raise an error if a norm's sum of squares is Inf in fp32, since the norm would return its
        bias alone.
        """
        known = self.ranges.get(node.all_input_nodes[0].name, ())
        if max((x.amax for x in known), default=0.0) ** 2 * value.numel() < _FP32_LARGEST:
            return
        given = arguments(node)
        if is_kind(node, "row_norm"):
            size = math.prod(given["normalized_shape"])
        else:
            size = value[0].numel() // int(given["num_groups"])
        value = _gather_examples(value)
        rows = value.double().reshape(-1, size)
        if float(rows.square().sum(-1).max()) > _FP32_LARGEST:
            raise ScalingError(
                f"{self._name(node)} squares values of up to {float(value.abs().max()):.2g}, and their "
                "sum is Inf in fp32 already.",
                expected="Exponents can only be found for a model that is right in fp32.",
                remedy="Check the weights on disk and the arguments of the call.",
            )

    def _name(self, node: Node) -> str:
        if node.name in self.capture.parameters:
            return f"The weight {self.capture.parameters[node.name]}"
        if node.op == "placeholder":
            return f"The input {node.name}"
        return f"{self.capture.component}:{module_path(node)} ({operation(node)})"


def _gather_examples(value: torch.Tensor) -> torch.Tensor:
    """Return the values of all examples of a `vmap` region, which are in the first dimension of the
    result; outside of a region, the tensor itself.
    """
    while torch._C._functorch.is_batchedtensor(value):
        place = torch._C._functorch.maybe_get_bdim(value)
        value = torch._C._functorch.get_unwrapped(value).movedim(place, 0)
    return value


def _call(target: Any, args: Any, kwargs: Any) -> Any:
    """Call an operation on fp32 tensors, or in bf16 if its kernel accepts only 16-bit dtypes (flash
    attention).
    """
    try:
        return target(*args, **kwargs)
    except RuntimeError:
        if getattr(target, "namespace", "aten") == "aten":
            raise
    given = _replace_dtype((args, kwargs), torch.float32, torch.bfloat16)
    return _replace_dtype(target(*given[0], **given[1]), torch.bfloat16, torch.float32)


def _replace_dtype(tree: Any, old: torch.dtype, new: torch.dtype) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(new) if x.dtype == old else x, tree)


def _widen(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in HALVES else value


def log2_of(magnitude: float) -> float:
    """Return the binary logarithm of a magnitude; -inf for 0."""
    return math.log2(magnitude) if magnitude > 0 else -math.inf
