"""Estimate how much accuracy a module loses to fp16's subnormals, from measured magnitudes and without
a trial run.

Exponents keep most activations from being too small. The result of a sigmoid or a softmax has none:
`sigmoid(-14.5)` is 5e-7, for which fp16 has three bits. How much of that error reaches an output
depends on later operations: a product preserves the relative error, a sum with a larger value hides it.
So the error of each activation is propagated through the graph by typical sizes.

**Catches** fp16 activations without an exponent whose typical size is too small for fp16.

**Does not catch** small elements among large ones in the same tensor; errors that cancel or add up in
step; activations that were not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from stopdown.errors import TrialError
from stopdown.number_formats import FP16
from stopdown.operations import find_operation
from stopdown.scaling.exponents.linear_system import ZERO
from stopdown.scaling.exponents.problem import MeasuredCall, list_outputs, state_problem
from stopdown.scaling.graph.nodes import arguments, is_float, operation, shape_of
from stopdown.scaling_records import ResidualStream

MOST_LOST = 2.0**-8
"""Largest relative error of an output that is accepted: the largest that bf16 causes by rounding a
value."""

ROUNDED = FP16.smallest / math.sqrt(12)
"""Typical error of rounding a number in fp16's subnormal range."""


def check_underflow(
    module: torch.nn.Module, calls: Sequence[MeasuredCall], stream: ResidualStream | None
) -> None:
    """Reject a module if activations that are too small for fp16 would cost its outputs more accuracy
    than bf16 does.

    Args:
        calls: captured calls with measured magnitudes.
        stream: casts that keep the residual stream in fp32; None for none.

    Raises:
        TrialError: if so; the error names the activation and its typical size.
    """
    problem = state_problem(module, calls, multiplies=True, stream=stream)
    fixed: list[dict[str, str]] = [{} for _ in calls]
    for limit in problem.list_fp16_limits(()):
        if not limit.weight and problem.system.find(limit.unknown) == ZERO:
            fixed[limit.source[0]][limit.source[1]] = limit.place
    for call, places in zip(calls, fixed, strict=True):
        error, name = _propagate_errors(call, places)
        if error > MOST_LOST:
            raise TrialError(
                f"{places[name]} is about {_read_size(call, name):.2g}, where fp16 has few bits: an output "
                f"would be {error:.1%} off.",
                expected="What fp16 rounds costs an output no more than bf16 does.",
                remedy="Run it in bf16.",
            )


def _propagate_errors(call: MeasuredCall, fixed: Mapping[str, str]) -> tuple[float, str]:
    """Propagate underflow errors through a graph; return an output's largest relative error, and its
    cause's name.

    Args:
        fixed: maps the name of each fp16 activation that can't be scaled to its place.
    """
    errors: dict[Node, tuple[float, str]] = {}
    for node in call.capture.graph.graph.nodes:
        if not is_float(node):
            continue
        terms = [
            _pass_error_on(call, node, x, *errors[x]) for x in node.all_input_nodes if x in errors
        ]
        largest = max(terms, default=(0.0, ""))
        found = math.hypot(*(x for x, _ in terms)), largest[1]
        if node.name in fixed and (size := _read_size(call, node.name)):
            found = max(found, (ROUNDED / size, node.name))
        errors[node] = min(found[0], 1.0), found[1]
    outputs = list_outputs(call.capture.graph.graph.output_node())[: call.capture.outputs]
    return max((errors[x] for x in outputs if x in errors), default=(0.0, ""))


def _pass_error_on(
    call: MeasuredCall, node: Node, source: Node, error: float, name: str
) -> tuple[float, str]:
    """Return the relative error that an error in one operand causes in a node's result, and where the
    error began.

    Args:
        source: the operand.
        error: its relative error.
        name: name of the node that caused it.
    """
    found, given = find_operation(operation(node)), arguments(node)
    rule = () if found is None else found.exponent.split()
    if not rule or not error:
        return error, name
    share = 1.0
    reached, size = _read_size(call, node.name), _read_size(call, source.name)
    if rule[0] in ("add", "alike", "pinned"):
        share = size / reached if reached else 1.0
    elif "+bias" in rule and given.get("bias") is not None and source is not given["bias"]:
        weight = given.get("weight")
        terms = math.prod(shape_of(weight)[1:]) if isinstance(weight, Node) else 1
        product = size * _read_size(call, getattr(weight, "name", "")) * math.sqrt(terms)
        share = product / reached if reached else 1.0
    return error * min(share, 1.0), name


def _read_size(call: MeasuredCall, name: Any) -> float:
    """Return the measured root mean square of a node's result; 0 if it was not measured."""
    return max((part.rms for part in call.ranges.get(name, ())), default=0.0)
