"""Equations that keep a network's result unchanged when its tensors are scaled by powers of two: one
rule per operation.

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
from torch.utils import _pytree as pytree

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
    """Interface by which rules look up the unknown scale exponents of a call; `problem.CallStatement`
    implements it.
    """

    system: System

    def unknown(self, node: Node, block: int | None, user: Node) -> int:
        """Return the index of the unknown scale exponent of a node's result, or of one block of its
        channels.

        `user` is the node that reads the result: a module's output may be multiplied on the way to it.
        """

    def eps_unknown(self, node: Node, value: float | None) -> int | None:
        """Return the index of the unknown exponent of a node's eps with this value; None without one."""

    def clamp_unknown(self, node: Node, value: float) -> int | None:
        """Return the unknown scale exponent of a clamp's lower limit; None if the limit can't be scaled."""

    def keeps_clamp(self, node: Node) -> bool:
        """Return whether a clamp at fp16's maximum belongs to the model, so that its effect must be kept.

        Other such clamps only guard against overflow.
        """

    def keep_from_zero(self, node: Node) -> None:
        """Limit how far the fp16 argument of a root or reciprocal is scaled down, since 0 would give
        Inf.
        """


@dataclass
class PlacedOperation:
    """One operation of a captured call, or one block of its channels, with its unknown exponents: a
    rule's input.

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
        """Unknown scale exponent of the result."""
        return self.around.unknown(self.node, self.block, self.node)

    def of(self, value: Any) -> int:
        """Return the unknown scale exponent of an argument (its index in the system); `ZERO` unless it
        is a floating tensor.
        """
        return self.around.unknown(value, self.block, self.node) if is_float(value) else ZERO

    def floats(self) -> list[Node]:
        """List the floating tensors among the arguments."""
        return [x for x in self.node.all_input_nodes if is_float(x)]

    def elements(self) -> list[Node]:
        """List the tensors whose elements the result may hold: all but masks and indices.

        An integer or bool among them is promoted to a float, and nothing can scale it.
        """
        given = {name: x for name, x in self.given.items() if name not in _PLACES}
        leaves = pytree.tree_leaves(list(given.values()))
        return [x for x in leaves if isinstance(x, Node)]

    def tensors(self, *names: str) -> list[int]:
        """Return the unknown scale exponents of the arguments with these names; an argument that is None is
        skipped.
        """
        return [self.of(self.given[name]) for name in names if self.given.get(name) is not None]

    def pin(self) -> None:
        """Fix the scale exponents of the operation's inputs and result at 0, so that none of them is
        scaled.
        """
        self.system.pin(*(self.of(x) for x in self.floats()))
        if is_float(self.node):
            self.system.pin(self.out)


Rule = Callable[[PlacedOperation], None]

_PLACES = ("condition", "index", "indices", "mask")
"""Names of arguments that tell where elements go, and are no elements themselves."""


def equate_with_first(op: PlacedOperation) -> None:
    """Give the result the scale exponent of the first floating input, as for views and other homogeneous
    functions.

    It is 0 without such an input, as for a sum of integers in a floating dtype.
    """
    floats = op.floats()
    if is_float(op.node):
        op.system.equate(op.out, op.of(floats[0]) if floats else ZERO)
    elif floats and _dtype(op.node) is not torch.bool:
        op.pin()


def equate_vector_norm(op: PlacedOperation) -> None:
    """Give a vector norm's result the scale exponent of its input.

    Orders other than 1, 2 and infinity fix both at 0.
    """
    order = op.given.get("ord", op.given.get("p"))
    if order in (None, 1, 2, math.inf, -math.inf):
        equate_with_first(op)
    else:
        op.pin()


def equate_single_result(op: PlacedOperation) -> None:
    """Give a single result the scale exponent of the first floating input; with several results, state
    nothing.

    `relate_picked` handles several results, one by one.
    """
    if is_float(op.node):
        equate_with_first(op)


def equate_all(op: PlacedOperation) -> None:
    """Give the result and all inputs one scale exponent; it is 0 if one of them, or the result, is
    integer.
    """
    if is_float(op.node):
        op.system.equate(op.out, *(op.of(x) for x in op.elements()))
    else:
        op.pin()


def equate_scatter(op: PlacedOperation) -> None:
    """Give a scatter's inputs and result one scale exponent.

    It is 0 if the scatter writes a number other than 0, or reduces in another way than by adding.
    """
    if op.given.get("reduce") not in (None, "add") or op.given.get("value"):
        op.pin()
    else:
        equate_all(op)


def state_nothing(op: PlacedOperation) -> None:
    """State no equation: any scale of the inputs is right, as the result is no floating tensor or only
    zeros.
    """


def pin_created(op: PlacedOperation) -> None:
    """Fix the scale exponent of a tensor that is created from numbers, such as by `arange`, at 0: nothing
    could scale it.
    """
    if is_float(op.node):
        op.system.pin(op.out)


def relate_product(*words: str) -> Rule:
    """Return the rule of a product: the result's exponent is the sum of those of the named inputs.

    Args:
        words: names of inputs. `+bias` names an input with the result's exponent, `!angle` one that is
            fixed at 0.
    """
    named = {sign: [x.lstrip("+!") for x in words if x[0] == sign] for sign in "+!"}
    factors = [x for x in words if x[0] not in named]

    def rule(op: PlacedOperation) -> None:
        if is_float(op.node):
            op.system.relate((op.out, -1), *((op.of(op.given[name]), 1) for name in factors))
            op.system.equate(op.out, *op.tensors(*named["+"]))
            op.system.pin(*op.tensors(*named["!"]))

    return rule


def relate_einsum(op: PlacedOperation) -> None:
    """Make the scale exponent of an einsum's result the sum of all inputs' exponents."""
    op.system.relate((op.out, -1), *((op.of(x), 1) for x in op.given["tensors"]))


def relate_quotient(op: PlacedOperation) -> None:
    """Make a quotient's scale exponent the difference of its operands'; fix all at 0 if the quotient is
    rounded.
    """
    if op.given.get("rounding_mode") is not None:
        return op.pin()
    terms = (op.of(op.given["self"]), 1), (op.of(op.given["other"]), -1)
    return op.system.relate((op.out, -1), *terms)


def equate_sum(op: PlacedOperation) -> None:
    """Give a sum and its terms one scale exponent, as terms of different scales can't be added.

    If a number is added that can't be scaled like an eps, the exponent is fixed at 0.
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


def pin_difference(op: PlacedOperation) -> None:
    """Fix the scale exponents of `number - x` and `x` at 0; if the number is 0, give both one exponent."""
    if op.given["other"] == 0:
        op.system.equate(op.out, op.of(op.given["self"]))
    else:
        op.pin()


def relate_power(op: PlacedOperation) -> None:
    """Make the scale exponent of `x ** n` n times that of `x`; fix both at 0 unless 2 n is an integer."""
    exponent = op.given.get("exponent")
    if not isinstance(exponent, (int, float)) or exponent * 2 != int(exponent * 2):
        return op.pin()
    return relate_fixed_power(str(int(exponent * 2)))(op)


def relate_fixed_power(halves: str) -> Rule:
    """Return the rule of `x ** (halves / 2)`, for rsqrt, sqrt, reciprocal and square.

    Args:
        halves: an integer as text.
    """
    twice = int(halves)

    def rule(op: PlacedOperation) -> None:
        if twice < 0:
            op.around.keep_from_zero(op.given["self"])
        op.system.relate((op.of(op.given["self"]), twice), (op.out, -2))

    return rule


def relate_norm(op: PlacedOperation) -> None:
    """State the rule of a layer, group or RMS norm: the eps scales by the square of the input's factor.

    Without an eps that can be scaled, the input's exponent is fixed at 0. The result has the exponent
    of the norm's weight, whatever the input's.
    """
    source = op.of(op.given["input"])
    eps = op.around.eps_unknown(op.node, op.given.get("eps"))
    if eps is None:
        op.system.pin(source)
    else:
        op.system.relate((eps, -1), (source, 2))
    _affine(op)


def relate_batch_norm(op: PlacedOperation) -> None:
    """State the rule of a batch norm: the stored mean scales as the input, the variance and eps by the
    square.
    """
    relate_norm(op)
    if not op.given.get("training") and op.given.get("running_mean") is not None:
        source = op.of(op.given["input"])
        op.system.equate(source, op.of(op.given["running_mean"]))
        op.system.relate((op.of(op.given["running_var"]), -1), (source, 2))


def _affine(op: PlacedOperation) -> None:
    weight, bias = op.given.get("weight"), op.given.get("bias")
    op.system.equate(op.out, ZERO if weight is None else op.of(weight))
    if bias is not None:
        op.system.equate(op.out, op.of(bias))


def relate_attention(op: PlacedOperation) -> None:
    """Give attention's result the scale exponent of the value; those of query and key must sum to 0.

    Otherwise scores, and with them the softmax, would be scaled.
    """
    query, key, value = (op.of(op.given[name]) for name in ("query", "key", "value"))
    op.system.relate((query, 1), (key, 1))
    op.system.equate(op.out, value)
    if is_float(op.given.get("attn_mask")):
        op.system.pin(op.of(op.given["attn_mask"]))


def relate_attention_kernel(op: PlacedOperation) -> None:
    """State the rule of a fused attention kernel: its first three arguments are query, key and value.

    The first result is attention's; further ones are statistics. The exponents of other inputs, such as
    those of a function that changes the scores, are fixed at 0.
    """
    first = op.node.args[:3]
    query, key, value = (op.of(x) for x in first)
    op.system.relate((query, 1), (key, 1))
    op.system.pin(*(op.of(x) for x in op.floats() if x not in first))
    if is_float(op.node):
        op.system.equate(op.out, value)


def equate_cast(op: PlacedOperation) -> None:
    """Give a tensor one scale exponent before and after a cast between floats; fix it at 0 for a cast to
    integers.
    """
    source = op.of(op.given["self"])
    if is_float(op.node):
        op.system.equate(op.out, source)
    elif _dtype(op.node) is not torch.bool:
        op.system.pin(source)


def equate_choice(op: PlacedOperation) -> None:
    """Give all tensors of a `where` or `masked_fill`, the result too, one scale exponent.

    A choice of integers, or of finite numbers other than 0, fixes it at 0.
    """
    numbers = [x for x in op.given.values() if isinstance(x, (int, float))]
    if all(number == 0 or math.isinf(number) for number in numbers):
        equate_all(op)
    else:
        op.pin()


def equate_comparison(op: PlacedOperation) -> None:
    """Give both sides of a comparison one scale exponent; if a number other than 0 is compared, it is 0."""
    other = op.given.get("other")
    if isinstance(other, Node):
        op.system.equate(*(op.of(x) for x in (op.given["self"], other)))
    elif other != 0:
        op.pin()


def equate_clamp(op: PlacedOperation) -> None:
    """Give a clamp's input and result one scale exponent if the limits are 0 or can be scaled; else fix
    it at 0.

    A clamp at fp16's maximum that doesn't belong to the model has no effect, and counts as a copy.
    """
    bounds = [op.given.get(name) for name in ("min", "max")]
    source = op.given["self"]
    if is_range_clamp(op.node):
        op.pin() if op.around.keeps_clamp(op.node) else _equate_with(op, source)
    elif all(bound is None or (not isinstance(bound, Node) and bound == 0) for bound in bounds):
        _equate_with(op, source)
    elif bounds[1] is None and isinstance(bounds[0], int | float) and bounds[0] > 0:
        _equate_lower_clamp(op, source, bounds[0])
    else:
        op.pin()


def equate_infinity_clamp(op: PlacedOperation) -> None:
    """State the rule of a `nan_to_num` at fp16's maximum, as of a clamp; with other numbers fix its
    exponents at 0.
    """
    if is_range_clamp(op.node):
        equate_clamp(op)
    else:
        op.pin()


def _equate_lower_clamp(op: PlacedOperation, source: Node, bound: float) -> None:
    """Give `max(x, bound)`, `x` and the bound one scale exponent; it is 0 if the bound can't be scaled."""
    if not is_float(op.node) or (eps := op.around.clamp_unknown(op.node, bound)) is None:
        op.pin()
    else:
        op.system.equate(op.out, op.of(source), eps)


def _equate_with(op: PlacedOperation, source: Node) -> None:
    op.system.equate(op.out, op.of(source))


def equate_padding(op: PlacedOperation) -> None:
    """Give a tensor one scale exponent before and after padding with zeros or from the tensor; else fix
    it at 0.
    """
    own_edge = op.given.get("mode", "constant") != "constant"
    if own_edge or not op.given.get("value"):
        _equate_with(op, op.given["self"])
    else:
        op.pin()


def equate_padded_sequences(op: PlacedOperation) -> None:
    """Give the sequences of a `pad_sequence` and its result one scale exponent; fix it at 0 unless
    zeros are padded.
    """
    if op.given.get("padding_value"):
        op.pin()
    else:
        equate_all(op)


def pin_filled(op: PlacedOperation) -> None:
    """Fix the scale exponent of a tensor filled with a number at 0; zeros may have any exponent.

    A tensor that is filled with the value of another one has its exponent.
    """
    value = op.given.get("value")
    if is_float(op.node) and (isinstance(value, Node) or value != 0):
        op.system.equate(op.out, op.of(value))


def relate_picked(op: PlacedOperation) -> None:
    """State the equations of one result, picked by `getitem`, of an operation with several results.

    Examples are split, `var_mean` and QR decompositions. The equations are between scale exponents.
    """
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


def pin_operation(op: PlacedOperation) -> None:
    """Fix the scale exponents of inputs and result at 0: the operation is only right on unscaled values."""
    op.pin()


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


RULES: dict[str, Rule] = {
    "same": equate_with_first,
    "alike": equate_all,
    "length": equate_vector_norm,
    "parts": equate_single_result,
    "scatter": equate_scatter,
    "free": state_nothing,
    "source": pin_created,
    "pinned": pin_operation,
    "multiply_all": relate_einsum,
    "quotient": relate_quotient,
    "add": equate_sum,
    "subtract_from": pin_difference,
    "power": relate_power,
    "norm": relate_norm,
    "batch_norm": relate_batch_norm,
    "attention": relate_attention,
    "kernel_attention": relate_attention_kernel,
    "cast": equate_cast,
    "choose": equate_choice,
    "compare": equate_comparison,
    "clamp": equate_clamp,
    "clamp_infinities": equate_infinity_clamp,
    "pad": equate_padding,
    "pad_all": equate_padded_sequences,
    "fill": pin_filled,
    "pick": relate_picked,
}
"""Rules by their names in the table of operations."""

_MAKERS: dict[str, Callable[..., Rule]] = {"product": relate_product, "halves": relate_fixed_power}


@functools.cache
def read_rule(cell: str) -> Rule:
    """Return the rule for scale exponents that a cell of the table of operations names: `add`, `product
    self vec2`.
    """
    name, *words = cell.split()
    return _MAKERS[name](*words) if name in _MAKERS else RULES[name]


def find_rule(node: Node) -> tuple[Rule | None, bool]:
    """Return the rule for a node's scale exponents, None if there is none, and whether the operation
    writes in place.
    """
    if node.target is operator.getitem:
        return relate_picked, False
    name = operation(node)
    if getattr(node.target, "_schema", None) is None:
        if is_kind(node, "attention_kernel"):
            return read_rule("kernel_attention"), False
        return (None if is_float(node) else state_nothing), False
    if _tells_no_value(node.target):
        return state_nothing, False
    if (found := find_operation(name)) is not None:
        return read_rule(found.exponent), name.endswith("_") and not name.startswith("__")
    if not is_float(node) and not any(is_float(x) for x in node.all_input_nodes):
        return state_nothing, False
    return None, False


@functools.cache
def _tells_no_value(target: Any) -> bool:
    """Return whether an operation returns only integers that depend on shapes, not on values, such as
    sizes.

    Describing a schema's types takes longer than stating most equations.
    """
    returns = target._schema.returns
    is_number = all(str(entry.type) in ("int", "bool", "List[int]") for entry in returns)
    return bool(returns) and is_number and torch.Tag.data_dependent_output not in target.tags


def state_equations(op: PlacedOperation) -> bool:
    """Add an operation's equations between scale exponents to the system; return False if it has no rule.

    Without a rule, the exponents of its inputs and result are fixed at 0.
    """
    rule, in_place = find_rule(op.node)
    (rule or pin_operation)(op)
    changed = op.node.args[0] if in_place and op.node.args else None
    if is_float(changed) and is_float(op.node):
        op.system.equate(op.out, op.of(changed))
    return rule is not None
