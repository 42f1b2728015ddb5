"""Compute activations that depend on constants and the timestep alone at every timestep, instead of
bounding them.

Exact values are tighter than bounds. They are computed in float64, and products with large weights in fp32;
an error radius covers that. Activations whose operation has no rule here are bounded like all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from stopdown.numerics import multiply_matrices
from stopdown.operations import kind_of
from stopdown.scaling.bounds.intervals import (
    Interval,
    drop_repeated,
    find_repeated,
    make_interval,
    measure_rows,
)
from stopdown.scaling.bounds.known_values import KnownValues
from stopdown.scaling.bounds.row_sums import is_exact_in_fp16, multiply_rows
from stopdown.scaling.bounds.singular_values import count_work, measure_sigma
from stopdown.scaling.graph.nodes import (
    arguments,
    find_slope,
    has_trait,
    is_float,
    is_kind,
    operation,
)

ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-22}
"""Relative error of one operation by the dtype of its result; each is at least twice the unit roundoff."""

FLOOR = 2.0**-12
"""Allowance for values that are subnormal in fp16, relative to a tensor's largest magnitude."""

MOST_ELEMENTS = 1 << 24

SMALL_WEIGHT = 1 << 21
"""Products with a weight of at most this many values are computed in float64."""

MOST_LENGTH_WORK = 1 << 35
"""The 2-norm of an error is bounded through matrices whose Gram matrix takes no more multiplications
than this."""


def writes_in_place(node: Node) -> bool:
    """Return whether an operation writes into one of its inputs, as `add_` does."""
    name = operation(node)
    return name.endswith("_") and not name.startswith("__") and name != "detach_"


def evaluate(node: Node, known: KnownValues) -> Any:
    """Compute a node's result at every timestep, if all of its inputs were computed so; else return None.

    The result is an `Interval` (values with an error radius), or a list for an operation with several
    results.
    """
    held = {x: known.held.get(x) for x in node.all_input_nodes}
    sources = [x for x, value in held.items() if isinstance(value, (Interval, list))]
    values: list[Any] = [held[x] for x in sources]
    if is_kind(node, "part"):
        number: Any = node.args[1]
        return values[0][number] if isinstance(values[0], list) else None
    if any(isinstance(x, list) for x in values) or writes_in_place(node) or is_kind(node, "blank"):
        return None
    if arguments(node).get("train") or (is_kind(node, "reshape") and "dtype" in arguments(node)):
        return None  # a dropout in training; the same bits read as another number
    if len(sources) < len(node.all_input_nodes):
        is_linear = is_kind(node, "linear") and bool(values)
        return _apply_linear(node, values[0], known) if is_linear else None
    rule = _choose_rule(node, values)
    return None if rule is None else rule(node, dict(zip(sources, values, strict=True)))


Rule = Callable[[Node, Mapping[Node, Interval]], Any]


def _choose_rule(node: Node, values: list[Interval]) -> Rule | None:
    value = node.meta.get("val")
    made = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    if any(x.numel() > MOST_ELEMENTS for x in made):
        return None
    if isinstance(value, torch.Tensor) and value.is_complex():
        return None
    if is_kind(node, "cast"):
        return _cast
    if has_trait(node, "rearranges"):
        return _move
    kind = kind_of(operation(node))
    if is_float(node):  # keep integers: they may be indices
        if find_slope(node) is not None:
            return _apply_smooth
        if kind in _RULES:
            return _RULES[kind]
    known = all(not bool(x.radius.any()) for x in values)
    if kind in _CONSTANTS or (known and kind not in _UNKNOWN):
        return _compute_known
    return None


def _run(node: Node, values: Mapping[Node, Interval], part: str = "center") -> Any:
    """Run an operation on its inputs' exact values at every timestep, or on their error radii or
    largest magnitudes.

    It runs in float64, or in fp32 if that is accurate enough.

    Args:
        values: interval of each input.
        part: field of the intervals to run it on: `center`, `radius` or `largest`.
    """
    nodes = list(values)
    batched = [part == "center" and values[n].batched for n in nodes]
    tensors = [getattr(values[n], part) for n in nodes]
    if not _does_in_fp32(node):
        tensors = [x.double() if x.dtype == torch.float32 else x for x in tensors]

    def call(*given: torch.Tensor) -> Any:
        named = dict(zip(nodes, given, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: named[n])
        args, kwargs = pytree.tree_map(_widen, (args, kwargs))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    if not any(batched):
        return call(*tensors)
    return torch.vmap(call, in_dims=tuple(0 if b else None for b in batched))(*tensors)


def _run_by_element(node: Node, values: Mapping[Node, Interval]) -> torch.Tensor:
    """Run an elementwise operation on its inputs' exact values, once for entries that broadcasting
    repeats.
    """
    if len(values) > 1:
        made = _run(node, values)
    else:
        ((source, value),) = values.items()
        made = _run(node, {source: replace(value, center=drop_repeated(value.center))})
        made = made.expand(value.center.shape)
    return made


def _does_in_fp32(node: Node) -> bool:
    """Return whether an operation may be computed in fp32 here without float64's accuracy.

    It may if its errors are 0, or small beside the allowance for rounding.
    """
    if has_trait(node, "rearranges"):
        return True
    numbers = [x for x in arguments(node).values() if isinstance(x, (int, float))]
    exact = all(float(torch.tensor(x, dtype=torch.float32)) == x for x in numbers)
    held = node.meta.get("val")  # a kernel's random seed has none
    once = is_kind(node, "add", "subtract", "multiply") and exact
    return once and isinstance(held, torch.Tensor) and held.dtype in ROUNDING


def _widen(value: Any) -> Any:
    """Adapt an argument for float64 on the host: floating dtypes become float64, devices the CPU."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _wrap(values: Mapping[Node, Interval], center: Any, radius: Any) -> Any:
    batched = any(x.batched for x in values.values())
    if isinstance(center, (tuple, list)):
        return [Interval(c, r, batched) for c, r in zip(center, radius, strict=True)]
    return Interval(center, radius, batched)


def _move(node: Node, values: Mapping[Node, Interval]) -> Any:
    floats = {n: x for n, x in values.items() if x.center.is_floating_point()}
    center = _run(node, values)
    if len(floats) < len(values):  # the others are indices or masks, which are exact
        if any(bool(x.radius.any()) for x in floats.values()):
            return None
        return _known(node, values, center)
    radius = _run(node, {n: Interval(x.center, x.radius) for n, x in values.items()}, "radius")
    peak = _run(node, values, "largest")
    if not isinstance(radius, torch.Tensor):
        made = _wrap(values, center, radius)
        for one, largest in zip(made, peak, strict=True):
            vars(one)["largest"] = largest
        return made
    if any(x.batched for x in values.values()):
        center = find_repeated(drop_repeated(center)).expand(center.shape)
    made = _wrap(values, center, radius.abs())
    vars(made)["largest"] = peak.abs()
    return made


def _known(node: Node, values: Mapping[Node, Interval], center: Any) -> Any:
    batched = any(x.batched for x in values.values())
    if isinstance(center, torch.Tensor):
        return _round(node, make_interval(center, batched=batched))
    if isinstance(center, (tuple, list)):
        return [make_interval(x, batched=batched) for x in center]
    return None


def _compute_known(node: Node, values: Mapping[Node, Interval]) -> Any:
    return _known(node, values, _run(node, values))


def _round(node: Node, value: Interval) -> Interval:
    """Add to an interval's radius the error of rounding the result to the node's dtype.

    A cast rounds once, other operations are taken to round twice.
    """
    held = node.meta.get("val")
    if not isinstance(held, torch.Tensor) or not value.center.is_floating_point():
        return value
    relative = ROUNDING.get(held.dtype, 0.0) / (2 if is_kind(node, "cast") else 1)
    peak = value.largest + value.radius
    floor = float(peak.max()) * FLOOR if held.dtype == torch.float16 and peak.numel() else 0.0
    return value.widen(relative * peak + floor)


def _cast(node: Node, values: Mapping[Node, Interval]) -> Any:
    value, held = values[node.args[0]], node.meta["val"]  # type: ignore[index]
    if held.is_floating_point():
        center = value.center if value.center.is_floating_point() else value.center.double()
        made = Interval(center, value.radius, value.batched, value.length)
        return made if _is_held(made, held.dtype) else _round(node, made)
    if value.center.is_floating_point() and bool(value.radius.any()):
        return None
    return Interval(value.center.to(held.dtype), value.radius, value.batched)


def _is_held(value: Interval, dtype: torch.dtype) -> bool:
    """Return whether casting an interval's values to a dtype adds no error: they are exact and the
    dtype holds them.
    """
    center = drop_repeated(value.center) if value.batched else value.center
    return not bool(value.radius.any()) and torch.equal(center.to(dtype).to(center.dtype), center)


def _apply_smooth(node: Node, values: Mapping[Node, Interval]) -> Any:
    (value,) = values.values()
    slope = find_slope(node)
    assert slope is not None
    length = None if value.length is None else slope * value.length
    center = _run_by_element(node, values)
    return _round(node, Interval(center, slope * value.radius, value.batched, length))


def _apply_exp(node: Node, values: Mapping[Node, Interval]) -> Any:
    (value,) = values.values()
    made = Interval(_run_by_element(node, values), torch.zeros_like(value.radius), value.batched)
    center = made.center
    return _round(node, Interval(center, made.largest * torch.expm1(value.radius), value.batched))


def _operands(node: Node, values: Mapping[Node, Interval]) -> list[Interval]:
    given = arguments(node)
    made = []
    for name in ("self", "other"):
        held = given[name]
        made.append(values[held] if isinstance(held, Node) else make_interval(torch.tensor(held)))
    return made


def _apply_sum(node: Node, values: Mapping[Node, Interval]) -> Any:
    if arguments(node).get("alpha", 1) not in (1, -1):
        return None
    first, other = _operands(node, values)
    made = _finish(node, values, first.radius + other.radius)
    if first.radius.shape == other.radius.shape and first.radius.dim():
        made = replace(made, length=first.row_error + other.row_error)
    return _round(node, made)


def _finish(node: Node, values: Mapping[Node, Interval], radius: torch.Tensor) -> Interval:
    """Compute an elementwise result's exact values, and return them with a given error radius.

    Args:
        radius: largest error of each element due to the inputs; rounding of the result isn't in it.
    """
    center = _run_by_element(node, values)
    batched = any(x.batched for x in values.values())
    return Interval(center, radius.expand(center.shape[1:] if batched else center.shape), batched)


def _apply_product(node: Node, values: Mapping[Node, Interval]) -> Any:
    first, other = _operands(node, values)
    radius = first.largest * other.radius + other.largest * first.radius
    return _round(node, _finish(node, values, radius + first.radius * other.radius))


def _apply_quotient(node: Node, values: Mapping[Node, Interval]) -> Any:
    first, other = _operands(node, values)
    if bool(other.radius.any()) or other.batched or arguments(node).get("rounding_mode"):
        return None
    return _round(node, _finish(node, values, first.radius / other.center.abs()))


_RULES: dict[str, Rule] = {
    "add": _apply_sum,
    "subtract": _apply_sum,
    "multiply": _apply_product,
    "divide": _apply_quotient,
    "exponential": _apply_exp,
}
_UNKNOWN = ("assertion", "random")
"""Kinds of operations that return nothing, or something else each time."""

_CONSTANTS = ("constant", "counting", "filled")


def _apply_linear(node: Node, value: Any, known: KnownValues) -> Any:
    given = arguments(node)
    weight = known.load(given["weight"]) if isinstance(given["weight"], Node) else None
    if not isinstance(value, Interval) or weight is None or not isinstance(given["input"], Node):
        return None
    bias = known.load(given["bias"]) if isinstance(given.get("bias"), Node) else None
    if any(find_slope(x) is not None for x in node.users):  # its exponent will be close to 0
        known.narrow_floor(given["weight"])
    few = find_repeated(value.center)
    flat = few.reshape(-1, few.shape[-1])  # one product for all timesteps
    is_small = weight.numel() <= SMALL_WEIGHT
    wide = torch.float64 if is_small else torch.promote_types(weight.dtype, torch.float32)
    factor = (weight.cpu() if is_small else weight).to(wide)  # float64 runs on the host
    center = multiply_matrices(flat.to(factor.device, wide), factor).cpu()
    if not math.isfinite(float(center.sum().float())):
        return None  # fp32 may overflow here
    center = (center if bias is None else center.add_(bias.to(wide))).reshape(*few.shape[:-1], -1)
    made = _bound_errors(node, value, weight, bias, known.floor(given["weight"]))
    center = center.expand(*value.center.shape[:-1], -1)
    return _round(node, replace(made, center=center))


def _bound_errors(
    node: Node,
    value: Interval,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    floor: float,
) -> Interval:
    """Bound the errors of a linear's output: those inherited from its input, and those of its own
    arithmetic.

    Its own come from rounding its weights (none if fp16 represents them), its bias and its sums. A
    large product is evaluated in fp32, which adds an error.

    Args:
        value: the linear's input.
        floor: allowance for the weight's subnormals in fp16, relative to its largest magnitude.

    Returns:
        An interval with these errors; its center is still the input's, to be replaced by the caller.
    """
    before, shape = value.radius.shape[:-1], (*value.radius.shape[:-1], -1)
    rounding = ROUNDING.get(node.meta["val"].dtype, 0.0)
    largest = (value.largest + value.radius).reshape(-1, weight.shape[1])
    columns = torch.cat([largest, value.radius.reshape(-1, weight.shape[1])]).T
    ones = torch.ones_like(columns[:, :1])
    found = multiply_rows(weight, magnitudes=columns, squares=ones, floor=floor)
    sums, carried = (x.T.reshape(shape) for x in found.magnitudes.chunk(2, dim=1))
    size = torch.zeros(1).double() if bias is None else bias.double().abs()
    held = rounding == ROUNDING[torch.float16] and is_exact_in_fp16(weight)
    products = 1 if weight.numel() <= SMALL_WEIGHT else 2  # the model's fp32 product, and this one
    own = ((0.0 if held else rounding) + products * found.plain_error) * sums
    own = own + (rounding + 2.0**-23) * size
    own = own + found.slack * largest.sum(1).reshape(*before, 1)
    carried = torch.minimum(carried, found.squares[:, 0].sqrt() * value.row_error)
    length = None
    if count_work(weight) <= MOST_LENGTH_WORK and weight.shape[0] <= 4 * weight.shape[1]:
        length = measure_sigma(weight) * value.row_error + measure_rows(own)
    parts = (sums + own + size).reshape(-1, weight.shape[0]).amax(0)
    return Interval(value.center, carried + own, value.batched, length, parts)
