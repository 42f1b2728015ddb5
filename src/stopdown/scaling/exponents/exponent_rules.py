"""Equations between the exponents of an operation's inputs and outputs: one rule per operation.

A tensor with the exponent e is stored multiplied by 2**e. A rule receives a `PlacedOperation` and adds
equations to a system. Three kinds cover most of ATen: *homogeneous* (a factor on the inputs comes out
unchanged), *product* (factors multiply), *pinned* (the operation is only right on unscaled values, so
its exponents are fixed at 0: exp, softmax, gelu, comparisons with a number). Norms, powers, attention
and clamps have rules of their own. An operation without a rule is pinned and reported, never guessed.

Not covered: an eps that is a literal in the code: the sum that contains it is pinned.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from stopdown.operations import find_operation
from stopdown.scaling.exponents.linear_system import ZERO, System
from stopdown.scaling.graph.nodes import (
    arguments,
    is_float,
    is_kind,
    is_range_clamp,
    is_split,
    operation,
)


class CallUnknowns(Protocol):
    """Interface by which rules look up the unknown exponents of a call; `problem.CallStatement` has it."""

    system: System

    def unknown(self, node: Node, block: int | None, user: Node) -> int:
        """Return the unknown exponent of a node's value, or of one of its blocks, as its user reads it."""

    def eps_unknown(self, node: Node, value: float | None) -> int | None:
        """Return the unknown exponent of an eps attribute with this value in a node's module, else None."""

    def clamp_unknown(self, node: Node, value: float) -> int | None:
        """Return the unknown exponent of the lower limit of a node's clamp; None if it can't scale."""

    def keeps_clamp(self, node: Node) -> bool:
        """Return whether a clamp at fp16's maximum belongs to the model and isn't an overflow guard."""

    def keep_from_zero(self, node: Node) -> None:
        """Keep the 16-bit argument of a root or reciprocal from underflowing to 0."""


@dataclass
class PlacedOperation:
    """One operation of a captured call, or one block of it: the input of a rule.

    Attributes:
        node: node of the operation.
        block: number of the block of its output, or of its weight's columns; None if neither has
            several exponents.
        around: unknown exponents of the call.
    """

    node: Node
    block: int | None
    around: CallUnknowns

    def __post_init__(self) -> None:
        self.given: dict[str, Any] = arguments(self.node)
        self.system = self.around.system

    @property
    def out(self) -> int:
        """Unknown exponent of the result."""
        return self.around.unknown(self.node, self.block, self.node)

    def of(self, value: Any) -> int:
        """Return the unknown exponent of an argument; `ZERO` unless it is a floating tensor."""
        return self.around.unknown(value, self.block, self.node) if is_float(value) else ZERO

    def floats(self) -> list[Node]:
        """List the floating tensors among the arguments."""
        return [x for x in self.node.all_input_nodes if is_float(x)]

    def tensors(self, *names: str) -> list[int]:
        """Return the unknown exponents of the named tensor arguments, skipping those that are None."""
        return [self.of(self.given[name]) for name in names if self.given.get(name) is not None]

    def pin(self) -> None:
        """Fix the exponents of the inputs and of the result at 0."""
        self.system.pin(*(self.of(x) for x in self.floats()))
        if is_float(self.node):
            self.system.pin(self.out)


Rule = Callable[[PlacedOperation], None]


def keep_first(op: PlacedOperation) -> None:
    """Equate the result's exponent with that of the first floating input."""
    floats = op.floats()
    if is_float(op.node) and floats:
        op.system.equate(op.out, op.of(floats[0]))
    elif floats and _dtype(op.node) is not torch.bool:
        op.pin()


def length(op: PlacedOperation) -> None:
    """Equate the exponents of a vector norm and its input.

    Orders other than 1, 2 and infinity fix them at 0.
    """
    order = op.given.get("ord", op.given.get("p"))
    if order in (None, 1, 2, math.inf, -math.inf):
        keep_first(op)
    else:
        op.pin()


def parts(op: PlacedOperation) -> None:
    """Equate a single result's exponent with the first floating input's; `pick` handles several results."""
    if is_float(op.node):
        keep_first(op)


def keep_all(op: PlacedOperation) -> None:
    """Equate the exponents of the result and of every floating input."""
    op.system.equate(op.out, *(op.of(x) for x in op.floats()))


def scatter(op: PlacedOperation) -> None:
    """Give all tensors of a scatter one exponent.

    It is 0 if the scatter writes a number other than 0, or reduces in another way than by adding.
    """
    if op.given.get("reduce") not in (None, "add") or op.given.get("value"):
        op.pin()
    else:
        keep_all(op)


def free(op: PlacedOperation) -> None:
    """State no equation, as the result is no floating tensor or contains only zeros."""


def pinned_source(op: PlacedOperation) -> None:
    """Fix the exponent of a tensor that is created from numbers, such as by `arange`, at 0."""
    if is_float(op.node):
        op.system.pin(op.out)


def product(*words: str) -> Rule:
    """Return the rule of a product, whose exponent is the sum of those of the named inputs.

    `+bias` names an input with the result's exponent, `!angle` one that is fixed at 0.
    """
    named = {sign: [x.lstrip("+!") for x in words if x[0] == sign] for sign in "+!"}
    factors = [x for x in words if x[0] not in named]

    def rule(op: PlacedOperation) -> None:
        if is_float(op.node):
            op.system.relate((op.out, -1), *((op.of(op.given[name]), 1) for name in factors))
            op.system.equate(op.out, *op.tensors(*named["+"]))
            op.system.pin(*op.tensors(*named["!"]))

    return rule


def multiply_all(op: PlacedOperation) -> None:
    """Equate the result's exponent with the sum of all inputs' exponents (einsum)."""
    op.system.relate((op.out, -1), *((op.of(x), 1) for x in op.given["tensors"]))


def quotient(op: PlacedOperation) -> None:
    """Equate a quotient's exponent with the difference of its operands'; fix all at 0 if it rounds."""
    if op.given.get("rounding_mode") is not None:
        return op.pin()
    terms = (op.of(op.given["self"]), 1), (op.of(op.given["other"]), -1)
    return op.system.relate((op.out, -1), *terms)


def add(op: PlacedOperation) -> None:
    """Equate the exponents of a sum and its terms.

    An added number that can't be scaled like an eps fixes them at 0.
    """
    first, other = op.given["self"], op.given["other"]
    if not is_float(op.node):
        return
    if isinstance(other, Node) and isinstance(first, Node):
        op.system.equate(op.out, op.of(first), op.of(other))
    elif other == 0:
        op.system.equate(op.out, op.of(first))
    else:
        _add_number(op, first, other)


def _add_number(op: PlacedOperation, first: Any, number: Any) -> None:
    eps = op.around.eps_unknown(op.node, number) if isinstance(number, float) else None
    if eps is None:
        op.pin()
    else:
        op.system.equate(op.out, op.of(first), eps)


def subtract_from(op: PlacedOperation) -> None:
    """Fix the exponents of `number - x` and `x` at 0, unless the number is 0."""
    if op.given["other"] == 0:
        op.system.equate(op.out, op.of(op.given["self"]))
    else:
        op.pin()


def power(op: PlacedOperation) -> None:
    """Equate the exponent of `x ** n` with n times that of `x`; fix both at 0 unless 2 n is an integer."""
    exponent = op.given.get("exponent")
    if not isinstance(exponent, (int, float)) or exponent * 2 != int(exponent * 2):
        return op.pin()
    if exponent < 0:
        op.around.keep_from_zero(op.given["self"])
    terms = (op.of(op.given["self"]), int(exponent * 2)), (op.out, -2)
    return op.system.relate(*terms)


def fixed_power(halves: str) -> Rule:
    """Return the rule of `x ** (halves / 2)`: rsqrt, sqrt, reciprocal, square."""
    twice = int(halves)

    def rule(op: PlacedOperation) -> None:
        if twice < 0:
            op.around.keep_from_zero(op.given["self"])
        op.system.relate((op.of(op.given["self"]), twice), (op.out, -2))

    return rule


def norm(op: PlacedOperation) -> None:
    """Relate the exponents of an eps and the input of a layer, group or RMS norm: eps scales by the square.

    Without an eps that can be scaled, the input's exponent is fixed at 0. The result has that of the
    norm's weight.
    """
    source = op.of(op.given["input"])
    eps = op.around.eps_unknown(op.node, op.given.get("eps"))
    if eps is None:
        op.system.pin(source)
    else:
        op.system.relate((eps, -1), (source, 2))
    _affine(op)


def batch_norm(op: PlacedOperation) -> None:
    """Equate the exponents of a batch norm's input and stored mean; its variance scales by the square."""
    if op.given.get("training") or op.given.get("running_mean") is None:
        return norm(op)
    norm(op)
    source = op.of(op.given["input"])
    op.system.equate(source, op.of(op.given["running_mean"]))
    return op.system.relate((op.of(op.given["running_var"]), -1), (source, 2))


def _affine(op: PlacedOperation) -> None:
    weight, bias = op.given.get("weight"), op.given.get("bias")
    op.system.equate(op.out, ZERO if weight is None else op.of(weight))
    if bias is not None:
        op.system.equate(op.out, op.of(bias))


def attention(op: PlacedOperation) -> None:
    """Equate the exponents of result and value; those of query and key must sum to 0.

    Otherwise scores, and with them the softmax, would be scaled.
    """
    query, key, value = (op.of(op.given[name]) for name in ("query", "key", "value"))
    op.system.relate((query, 1), (key, 1))
    op.system.equate(op.out, value)
    if is_float(op.given.get("attn_mask")):
        op.system.pin(op.of(op.given["attn_mask"]))


def attend_by_kernel(op: PlacedOperation) -> None:
    """Treat an attention kernel as attention of its first three arguments; further results are statistics.

    The exponents of other inputs, such as those of a function that changes the scores, are fixed at 0.
    """
    first = op.node.args[:3]
    query, key, value = (op.of(x) for x in first)
    op.system.relate((query, 1), (key, 1))
    op.system.pin(*(op.of(x) for x in op.floats() if x not in first))
    if is_float(op.node):
        op.system.equate(op.out, value)


def cast(op: PlacedOperation) -> None:
    """Equate the exponents before and after a cast between floats; fix them at 0 for integers."""
    source = op.given["self"]
    if is_float(op.node) and is_float(source):
        op.system.equate(op.out, op.of(source))
    elif _dtype(op.node) is not torch.bool:
        op.pin()


def align_choice(op: PlacedOperation) -> None:
    """Equate all exponents of `where` or `masked_fill`.

    A choice of finite numbers other than 0 fixes them at 0.
    """
    names = ("self", "other", "value", "src", "source")
    numbers = [op.given[x] for x in names if isinstance(op.given.get(x), (int, float))]
    parts = op.tensors(*(x for x in names if is_float(op.given.get(x))))
    if all(number == 0 or math.isinf(number) for number in numbers):
        op.system.equate(op.out, *parts) if is_float(op.node) else None
    else:
        op.pin()


def align_comparison(op: PlacedOperation) -> None:
    """Equate the exponents of both sides of a comparison; with a number other than 0, fix them at 0."""
    other = op.given.get("other")
    if isinstance(other, Node):
        op.system.equate(*(op.of(x) for x in (op.given["self"], other)))
    elif other != 0:
        op.pin()


def clamp(op: PlacedOperation) -> None:
    """Equate the exponents around a clamp whose limits are 0 or can be scaled; else fix them at 0.

    A clamp at fp16's maximum that doesn't belong to the model has no effect, and counts as a copy.
    """
    bounds = [op.given.get(name) for name in ("min", "max")]
    source = op.given["self"]
    if is_range_clamp(op.node):
        op.pin() if op.around.keeps_clamp(op.node) else _equate_with(op, source)
    elif all(bound is None or (not isinstance(bound, Node) and bound == 0) for bound in bounds):
        _equate_with(op, source)
    elif bounds[1] is None and isinstance(bounds[0], int | float) and bounds[0] > 0:
        _clamp_below(op, source, bounds[0])
    else:
        op.pin()


def clamp_infinities(op: PlacedOperation) -> None:
    """Treat `nan_to_num` at fp16's maximum as a clamp; with other numbers fix its exponents at 0."""
    if is_range_clamp(op.node):
        clamp(op)
    else:
        op.pin()


def _clamp_below(op: PlacedOperation, source: Node, bound: float) -> None:
    """Equate the exponents of both operands of `max(norm, eps)`; fix the norm's at 0 if eps can't scale."""
    if not is_float(op.node) or (eps := op.around.clamp_unknown(op.node, bound)) is None:
        op.pin()
    else:
        op.system.equate(op.out, op.of(source), eps)


def _equate_with(op: PlacedOperation, source: Node) -> None:
    op.system.equate(op.out, op.of(source))


def pad(op: PlacedOperation) -> None:
    """Equate the exponents before and after padding with zeros or with the edge; else fix them at 0."""
    own_edge = op.given.get("mode", "constant") != "constant"
    if own_edge or not op.given.get("value"):
        _equate_with(op, op.given["self"])
    else:
        op.pin()


def pad_all(op: PlacedOperation) -> None:
    """Equate the exponents of sequences that are zero-padded to one length; else fix them at 0."""
    if op.given.get("padding_value"):
        op.pin()
    else:
        keep_all(op)


def fill(op: PlacedOperation) -> None:
    """Fix the exponent of a filled tensor at 0, unless the value is 0; then it is free."""
    value = op.given.get("value", op.given.get("fill_value"))
    if is_float(op.node) and (isinstance(value, Node) or value != 0):
        op.system.pin(op.out)


def pick(op: PlacedOperation) -> None:
    """State the equations of one result, picked by `getitem`, of an operation with several results."""
    parent = op.node.args[0]
    assert isinstance(parent, Node)
    sources = [x for x in parent.all_input_nodes if is_float(x)]
    if not is_float(op.node):
        return
    if is_kind(parent, "rotations"):
        number = op.node.args[1]
        assert isinstance(number, int)
        op.system.equate(op.out, op.of(sources[number]))
        op.system.pin(op.of(sources[2]))
    elif is_kind(parent, "attention_kernel"):
        op.system.equate(op.out, op.of(parent.args[2]) if op.node.args[1] == 0 else ZERO)
    elif is_split(parent) or is_kind(parent, "order"):
        op.system.equate(op.out, *(op.of(x) for x in sources))
    elif is_kind(parent, "variance_mean") and op.node.args[1] == 0:
        op.system.relate((op.out, -1), (op.of(sources[0]), 2))
    elif is_kind(parent, "variance_mean", "deviation_mean") or (
        is_kind(parent, "factors") and op.node.args[1] == 1
    ):
        op.system.equate(op.out, op.of(sources[0]))
    elif is_kind(parent, "factors"):
        op.system.pin(op.out)  # orthonormal columns for any scale of the input
    else:
        op.system.pin(op.out, *(op.of(x) for x in sources))


def pin(op: PlacedOperation) -> None:
    """Fix the exponents of inputs and result at 0, as the operation is only right on unscaled values."""
    op.pin()


def extremum(op: PlacedOperation) -> None:
    """Equate the exponents of `max(x)` and `x`, or of `max(x, other)` and both operands."""
    if is_float(op.node):
        keep_all(op)


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


RULES: dict[str, Rule] = {
    "same": keep_first,
    "alike": keep_all,
    "length": length,
    "parts": parts,
    "scatter": scatter,
    "free": free,
    "source": pinned_source,
    "pinned": pin,
    "multiply_all": multiply_all,
    "quotient": quotient,
    "add": add,
    "subtract_from": subtract_from,
    "power": power,
    "norm": norm,
    "batch_norm": batch_norm,
    "attention": attention,
    "kernel_attention": attend_by_kernel,
    "cast": cast,
    "choose": align_choice,
    "compare": align_comparison,
    "clamp": clamp,
    "clamp_infinities": clamp_infinities,
    "pad": pad,
    "pad_all": pad_all,
    "fill": fill,
    "pick": pick,
    "extremum": extremum,
}
"""Rules by their names in the table of operations."""

_MAKERS: dict[str, Callable[..., Rule]] = {"product": product, "halves": fixed_power}


@functools.cache
def read_rule(cell: str) -> Rule:
    """Return the exponent rule in a row of the table of operations: `add`, `product self vec2`."""
    name, *words = cell.split()
    return _MAKERS[name](*words) if name in _MAKERS else RULES[name]


def find_rule(node: Node) -> tuple[Rule | None, bool]:
    """Return the rule of a node's operation, or None, and whether the operation works in place."""
    if node.target is operator.getitem:
        return pick, False
    name = operation(node)
    if getattr(node.target, "_schema", None) is None:
        if is_kind(node, "attention_kernel"):
            return read_rule("kernel_attention"), False
        return (None if is_float(node) else free), False
    if _tells_no_value(node.target):
        return free, False
    if (found := find_operation(name)) is not None:
        return read_rule(found.exponent), name.endswith("_") and not name.startswith("__")
    if not is_float(node) and not any(is_float(x) for x in node.all_input_nodes):
        return free, False
    return None, False


def _tells_no_value(target: Any) -> bool:
    """Return whether an operation returns only integers that depend on no value, such as sizes."""
    returns = target._schema.returns
    is_number = all(str(entry.type) in ("int", "bool", "List[int]") for entry in returns)
    return bool(returns) and is_number and torch.Tag.data_dependent_output not in target.tags


def state_equations(op: PlacedOperation) -> bool:
    """Add an operation's equations to the system; return False if it has no rule.

    Without a rule, the exponents of its inputs and result are fixed at 0.
    """
    rule, in_place = find_rule(op.node)
    (rule or pin)(op)
    changed = op.node.args[0] if in_place and op.node.args else None
    if is_float(changed) and is_float(op.node):
        op.system.equate(op.out, op.of(changed))
    return rule is not None
