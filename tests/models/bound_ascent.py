"""Inputs that try to exceed a bound: drawn at random, then pushed up the gradient of one value.

A captured call runs in float64 as a graph, so that every value can be compared with its bound, by
channel and by row. `climb` picks a value, follows the sign of the gradient of its largest ratio to the
bound, and reports whatever exceeds its own on the way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from models.rescaling_models import make_example, scale_weights
from stopdown.fold_names import name_parameters
from stopdown.module_calls.call_inputs import name_inputs
from stopdown.scaling.bounds.input_limits import state_limits
from stopdown.scaling.bounds.known_values import Bounds, InputLimits
from stopdown.scaling.bounds.propagation import bound_call
from stopdown.scaling.exponents.problem import split_values
from stopdown.scaling.graph.capture import Capture, capture_call, module_path
from stopdown.scaling.graph.nodes import is_float, is_range_clamp, operation, shape_of
from stopdown.scaling.graph.range_measurement import find_masked

SLACK = 1e-9
"""Of a comparison in float64."""

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Bounded:
    """A call, its graph and its bounds."""

    capture: Capture
    bounds: Bounds
    limits: InputLimits
    tensors: Mapping[str, torch.Tensor]
    names: Mapping[str, str]
    inputs: Mapping[str, torch.Tensor]

    def list_nodes(self) -> list[Node]:
        """The values that have a bound and can be compared with it."""
        masked = find_masked(self.capture)
        return [
            node
            for node in self.capture.graph.graph.nodes
            if self.bounds.values.get(node.name) is not None
            and node.op == "call_function"
            and is_float(node)
            and node not in masked
            and math.prod(shape_of(node))
        ]


def bound_example(name: str, way: str | None = None, bits: int = 0, seed: int = 0) -> list[Bounded]:
    """The calls of a class of the rescale table, with their bounds."""
    module, calls = make_example(name, seed)
    if way is not None:
        scale_weights(module, way, bits)
    return [bound_one(module, *call) for call in calls]


def bound_one(
    module: torch.nn.Module, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Bounded:
    """One call of a module with its bounds."""
    capture = capture_call(call, args, kwargs, dtype=torch.float16)
    tensors = {name: x.detach() for name, x in name_parameters(module).items()}
    limits = state_limits(capture, args, kwargs)
    bounds = bound_call(capture, tensors.__getitem__, limits, split_values(capture))
    named = dict(zip(capture.inputs, name_inputs(args, kwargs), strict=True))
    names = {placeholder: name for placeholder, (name, _) in named.items()}
    inputs = {placeholder: x for placeholder, (_, x) in named.items()}
    return Bounded(capture, bounds, limits, tensors, names, inputs)


class GraphRun(torch.fx.Interpreter):
    """Runs a captured graph in one floating dtype and keeps every value."""

    def __init__(self, bounded: Bounded, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype):
        super().__init__(bounded.capture.graph, garbage_collect_values=False)
        self.bounded, self.inputs, self.dtype = bounded, inputs, dtype
        self.seen: dict[Node, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "placeholder":
            return self._load(n)
        if operation(n).startswith("_assert"):
            return None
        if n.op != "call_function" or operation(n).startswith("sym_"):
            return super().run_node(n)
        if is_range_clamp(n):
            self.seen[n] = self.env[n.args[0]]
            return self.seen[n]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = torch.utils._pytree.tree_map(self._cast, (args, kwargs))
        result = n.target(*args, **kwargs)
        if "empty" in operation(n):
            result = result.zero_()
        if operation(n) == "to" and isinstance(result, torch.Tensor):
            result = result.clone()  # a cast makes a copy, also where both are run in one dtype
        if isinstance(result, torch.Tensor) and is_float(n):
            self.seen[n] = result
        return result

    def _load(self, node: Node) -> torch.Tensor:
        capture = self.bounded.capture
        if node.name in capture.parameters:
            found = self.bounded.tensors[capture.parameters[node.name]]
        elif node.name in capture.constants:
            found = capture.constants[node.name]
        else:
            found = self.inputs[node.name]
        return self._cast_tensor(found)

    def _cast_tensor(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_complex():
            return x.to(torch.complex128)
        return x.to(self.dtype) if x.is_floating_point() else x

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            return value.to(self.dtype)
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return self.dtype
        return value


def draw_inputs(bounded: Bounded, rng: random.Random) -> dict[str, torch.Tensor]:
    """Inputs within the limits: noise of several sizes, corners, one hot channel; any timestep."""
    torch.manual_seed(rng.getrandbits(31))
    return {
        placeholder: _draw(bounded, placeholder, like, rng)
        for placeholder, like in bounded.inputs.items()
    }


def _draw(
    bounded: Bounded, placeholder: str, like: torch.Tensor, rng: random.Random
) -> torch.Tensor:
    limits, name = bounded.limits, bounded.names[placeholder]
    if placeholder in limits.fixed or like.dtype == torch.bool:
        return like
    if placeholder in limits.timesteps:
        steps = limits.timesteps[placeholder]
        value = float(steps.values[rng.randrange(len(steps.values))])
        value = min(max(value + rng.uniform(-1, 1) * steps.radius, 0), float(steps.values[-1]))
        return torch.full_like(like, value)
    if not like.is_floating_point():
        return torch.randint(1, 64, like.shape) if name == "input_ids" else like
    limit = limits.largest[placeholder]
    limit = 1e4 if math.isinf(limit) else limit
    return _draw_floats(like, limit, rng)


def _draw_floats(like: torch.Tensor, limit: float, rng: random.Random) -> torch.Tensor:
    way = rng.randrange(4)
    if way == 0:
        return torch.randn(like.shape).sign() * limit
    if way == 1:
        hot = torch.zeros(like.shape)
        hot.flatten()[rng.randrange(like.numel())] = limit
        return hot
    size = limit * rng.choice([1e-3, 0.02, 0.3, 1.0])
    return (torch.randn(like.shape) * size).clamp(-limit, limit)


def list_excesses(bounded: Bounded, seen: Mapping[Node, torch.Tensor], nodes: list[Node]
                  ) -> Iterator[str]:  # fmt: skip
    """What exceeds its bound, by element or by row."""
    for node in nodes:
        bound, value = bounded.bounds.values[node.name], seen[node].detach()
        assert bound is not None
        size = value.abs().double()
        over = size - bound.peak * (1 + SLACK)
        if bool((over > 0).any()):
            worst = float((size / bound.peak.clamp(min=1e-300)).max())
            yield f"{_place(bounded, node)}: an element is {worst:.4g} times its bound"
        norm = size.square().sum(tuple(bound.rows), keepdim=True).sqrt() if bound.rows else size
        if bool((norm > bound.norm * (1 + SLACK)).any()):
            worst = float((norm / bound.norm.clamp(min=1e-300)).max())
            yield f"{_place(bounded, node)}: a row is {worst:.4g} times its bound"


def _place(bounded: Bounded, node: Node) -> str:
    return f"{bounded.capture.component}:{module_path(node)} ({operation(node)}, {node.name})"


def climb(
    bounded: Bounded,
    rng: random.Random,
    steps: int,
    best: dict[str, float] | None = None,
    *,
    last: bool = False,
) -> list[str]:
    """Draw inputs, then follow the gradient of one value's ratio to its bound; what exceeds its own.

    Args:
        steps: evaluations.
        best: node name to the largest magnitude seen, filled on the way.
        last: climb towards the last value instead of any.
    """
    nodes = bounded.list_nodes()
    target = nodes[-1] if last else rng.choice(nodes)
    inputs = draw_inputs(bounded, rng)
    moved = [
        name
        for name, x in inputs.items()
        if x.is_floating_point() and math.isfinite(bounded.limits.largest.get(name, math.inf))
        and name not in bounded.limits.fixed and name not in bounded.limits.timesteps
    ]  # fmt: skip
    found: list[str] = []
    for step in range(steps):
        leaves = {name: inputs[name].double().requires_grad_() for name in moved}
        run = GraphRun(bounded, {**inputs, **leaves}, torch.float64)
        with torch.set_grad_enabled(bool(moved) and step < steps - 1):
            run.run()
        found += list_excesses(bounded, run.seen, nodes)
        _note(best, run.seen, nodes)
        if not moved or step == steps - 1:
            inputs = draw_inputs(bounded, rng)
            continue
        inputs.update(_push(bounded, run.seen[target], target, leaves, rng))
    return found


def _push(
    bounded: Bounded,
    value: torch.Tensor,
    target: Node,
    leaves: Mapping[str, torch.Tensor],
    rng: random.Random,
) -> dict[str, torch.Tensor]:
    bound = bounded.bounds.values[target.name]
    assert bound is not None
    if not value.requires_grad:
        return {name: x.detach() for name, x in leaves.items()}
    try:
        ratio = (value.abs() / bound.peak.clamp(min=1e-300)).max()
    except RuntimeError as error:  # a view of what is overwritten later has no gradient to follow
        if "modified inplace" not in str(error):
            raise
        return {name: x.detach() for name, x in leaves.items()}
    slopes = torch.autograd.grad(ratio, list(leaves.values()), allow_unused=True)
    pushed = {}
    for (name, leaf), slope in zip(leaves.items(), slopes, strict=True):
        limit = bounded.limits.largest[name]
        step = limit * rng.choice([0.02, 0.2, 1.0, 2.0])
        up = torch.zeros_like(leaf) if slope is None else slope.nan_to_num().sign() * step
        pushed[name] = (leaf.detach() + up).clamp(-limit, limit)
    return pushed


def _note(
    best: dict[str, float] | None, seen: Mapping[Node, torch.Tensor], nodes: list[Node]
) -> None:
    if best is None:
        return
    for node in nodes:
        size = float(seen[node].detach().abs().max())
        best[node.name] = max(best.get(node.name, 0.0), size)


def run_in_fp16(bounded: Bounded, inputs: Mapping[str, torch.Tensor]) -> list[str]:
    """One run of the graph in the dtypes that it has, fp16 roundings and all; what exceeds its bound."""
    run = _Plain(bounded, inputs, torch.float16)
    with torch.no_grad():
        run.run()
    nodes = [x for x in bounded.list_nodes() if bool(run.seen[x].isfinite().all())]
    return list(list_excesses(bounded, run.seen, nodes))


class _Plain(GraphRun):
    """Runs a graph as it was captured."""

    def _cast(self, value: Any) -> Any:
        return value

    def _load(self, node: Node) -> torch.Tensor:
        found = super()._load(node)
        held = node.meta["val"]
        kept = node.name in self.bounded.capture.parameters
        if kept and held.dtype == torch.float32:
            found = self.bounded.tensors[self.bounded.capture.parameters[node.name]]
        elif not kept and node.name in self.inputs:
            found = self.inputs[node.name]
        return found.to(held.dtype) if held.is_floating_point() else found


def bound_module(module: nn.Module, *args: torch.Tensor) -> Bounded:
    """A module called with the given arguments, with its bounds."""
    return bound_one(module.eval().requires_grad_(False), module, args, {})


class Cut(nn.Module):
    """Keeps as many rows as a picture has places: a product of sizes, which is no value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        height, width = sizes.tolist()
        return self.norm(self.inner(x)[:, : height * width])


__all__ = ["Bounded", "Cut", "bound_example", "bound_module", "climb", "draw_inputs", "run_in_fp16"]
