"""What each operation demands of the exponents of its inputs and outputs: one rule per operation.

A rule gets a `Operation` and states equations. Three kinds cover most of ATen: *homogeneous* (a factor
on the inputs comes out unchanged), *product* (factors multiply), *pinned* (only the values
themselves will do: exp, softmax, gelu, comparisons with a number). Norms, powers, attention and
clamps have rules of their own. An operation without a rule is pinned and reported, never guessed.

Not covered: an eps that is a literal in the code: the sum that it is in is pinned.
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

from stopdown.scaling.exponents.linear_system import ZERO, System
from stopdown.scaling.graph.nodes import (
    arguments,
    is_float,
    is_kind,
    is_range_clamp,
    is_split,
    operation,
)
from stopdown.scaling.graph.operations import find_operation


class CallUnknowns(Protocol):
    """What rules ask of the call whose equations are stated (`problem.CallStatement`)."""

    system: System

    def unknown(self, node: Node, block: int | None, user: Node) -> int:
        """Return the exponent of a value as its user sees it."""

    def eps_unknown(self, node: Node, value: float | None) -> int | None:
        """Return the exponent of an eps that is an attribute of the module at this place, or None."""

    def clamp_unknown(self, node: Node, value: float) -> int | None:
        """Return the exponent of a number that this place clamps from below, or None if it is fixed."""

    def keeps_clamp(self, node: Node) -> bool:
        """Return whether a clamp is part of what the model computes."""

    def keep_from_zero(self, node: Node) -> None:
        """Keep what a root or reciprocal in 16 bits is taken of away from 0."""


@dataclass
class Operation:
    """One operation at one place, for one block of its output."""

    node: Node
    block: int | None
    around: CallUnknowns

    def __post_init__(self) -> None:
        self.given: dict[str, Any] = arguments(self.node)
        self.system = self.around.system

    @property
    def out(self) -> int:
        """Exponent of the result."""
        return self.around.unknown(self.node, self.block, self.node)

    def of(self, value: Any) -> int:
        """Exponent of an argument: of a float tensor its own, of anything else 0."""
        return self.around.unknown(value, self.block, self.node) if is_float(value) else ZERO

    def floats(self) -> list[Node]:
        """The float tensors among the arguments."""
        return [x for x in self.node.all_input_nodes if is_float(x)]

    def tensors(self, *names: str) -> list[int]:
        """Exponents of the named arguments that are there."""
        return [self.of(self.given[name]) for name in names if self.given.get(name) is not None]

    def pin(self) -> None:
        """Inputs and result at exponent 0."""
        self.system.pin(*(self.of(x) for x in self.floats()))
        if is_float(self.node):
            self.system.pin(self.out)


Rule = Callable[[Operation], None]


def keep_first(op: Operation) -> None:
    """The result has the exponent of the first float input."""
    floats = op.floats()
    if is_float(op.node) and floats:
        op.system.equate(op.out, op.of(floats[0]))
    elif floats and _dtype(op.node) is not torch.bool:
        op.pin()


def length(op: Operation) -> None:
    """`|x|` has the exponent of `x`, but for orders that count values, or whose powers are rounded."""
    order = op.given.get("ord", op.given.get("p"))
    if order in (None, 1, 2, math.inf, -math.inf):
        keep_first(op)
    else:
        op.pin()


def parts(op: Operation) -> None:
    """One result is like the first float input; of several, `pick` says so of each."""
    if is_float(op.node):
        keep_first(op)


def keep_all(op: Operation) -> None:
    """The result and every float input have one exponent."""
    op.system.equate(op.out, *(op.of(x) for x in op.floats()))


def scatter(op: Operation) -> None:
    """As `keep_all`; a number that is written must be 0, and products want the values themselves."""
    if op.given.get("reduce") not in (None, "add") or op.given.get("value"):
        op.pin()
    else:
        keep_all(op)


def free(op: Operation) -> None:
    """Nothing is demanded: no float comes out, or only zeros."""


def pinned_source(op: Operation) -> None:
    """A value made here from numbers: its own exponent is 0."""
    if is_float(op.node):
        op.system.pin(op.out)


def product(*words: str) -> Rule:
    """The exponents of the named inputs add; `+bias` has that of the result, `!angle` none."""
    named = {sign: [x.lstrip("+!") for x in words if x[0] == sign] for sign in "+!"}
    factors = [x for x in words if x[0] not in named]

    def rule(op: Operation) -> None:
        if is_float(op.node):
            op.system.relate((op.out, -1), *((op.of(op.given[name]), 1) for name in factors))
            op.system.equate(op.out, *op.tensors(*named["+"]))
            op.system.pin(*op.tensors(*named["!"]))

    return rule


def multiply_all(op: Operation) -> None:
    """The exponents of all inputs add (einsum)."""
    op.system.relate((op.out, -1), *((op.of(x), 1) for x in op.given["tensors"]))


def quotient(op: Operation) -> None:
    """The exponents subtract; a rounding mode wants the values themselves."""
    if op.given.get("rounding_mode") is not None:
        return op.pin()
    terms = (op.of(op.given["self"]), 1), (op.of(op.given["other"]), -1)
    return op.system.relate((op.out, -1), *terms)


def add(op: Operation) -> None:
    """Sums have one exponent; a number is an eps that scales along, or pins the sum."""
    first, other = op.given["self"], op.given["other"]
    if not is_float(op.node):
        return
    if isinstance(other, Node) and isinstance(first, Node):
        op.system.equate(op.out, op.of(first), op.of(other))
    elif other == 0:
        op.system.equate(op.out, op.of(first))
    else:
        _add_number(op, first, other)


def _add_number(op: Operation, first: Any, number: Any) -> None:
    eps = op.around.eps_unknown(op.node, number) if isinstance(number, float) else None
    if eps is None:
        op.pin()
    else:
        op.system.equate(op.out, op.of(first), eps)


def subtract_from(op: Operation) -> None:
    """`number - x`: pinned but for 0."""
    if op.given["other"] == 0:
        op.system.equate(op.out, op.of(op.given["self"]))
    else:
        op.pin()


def power(op: Operation) -> None:
    """`x ** n` has n times the exponent; halves ask for an even one."""
    exponent = op.given.get("exponent")
    if not isinstance(exponent, (int, float)) or exponent * 2 != int(exponent * 2):
        return op.pin()
    if exponent < 0:
        op.around.keep_from_zero(op.given["self"])
    terms = (op.of(op.given["self"]), int(exponent * 2)), (op.out, -2)
    return op.system.relate(*terms)


def fixed_power(halves: str) -> Rule:
    """`x ** (halves / 2)`: rsqrt, sqrt, reciprocal, square."""
    twice = int(halves)

    def rule(op: Operation) -> None:
        if twice < 0:
            op.around.keep_from_zero(op.given["self"])
        op.system.relate((op.of(op.given["self"]), twice), (op.out, -2))

    return rule


def norm(op: Operation) -> None:
    """Layer, group and RMS norm: the input is free when eps scales along by its square."""
    source = op.of(op.given["input"])
    eps = op.around.eps_unknown(op.node, op.given.get("eps"))
    if eps is None:
        op.system.pin(source)
    else:
        op.system.relate((eps, -1), (source, 2))
    _affine(op)


def batch_norm(op: Operation) -> None:
    """Norm by stored statistics, which scale with the input."""
    if op.given.get("training") or op.given.get("running_mean") is None:
        return norm(op)
    norm(op)
    source = op.of(op.given["input"])
    op.system.equate(source, op.of(op.given["running_mean"]))
    return op.system.relate((op.of(op.given["running_var"]), -1), (source, 2))


def _affine(op: Operation) -> None:
    weight, bias = op.given.get("weight"), op.given.get("bias")
    op.system.equate(op.out, ZERO if weight is None else op.of(weight))
    if bias is not None:
        op.system.equate(op.out, op.of(bias))


def attention(op: Operation) -> None:
    """Scores want the values themselves, so query and key cancel; the result is like the values."""
    query, key, value = (op.of(op.given[name]) for name in ("query", "key", "value"))
    op.system.relate((query, 1), (key, 1))
    op.system.equate(op.out, value)
    if is_float(op.given.get("attn_mask")):
        op.system.pin(op.of(op.given["attn_mask"]))


def attend_by_kernel(op: Operation) -> None:
    """Attention by a kernel: query, key and value come first; its other results are statistics.

    What else is given, as to the function that changes a score, counts with its own values.
    """
    first = op.node.args[:3]
    query, key, value = (op.of(x) for x in first)
    op.system.relate((query, 1), (key, 1))
    op.system.pin(*(op.of(x) for x in op.floats() if x not in first))
    if is_float(op.node):
        op.system.equate(op.out, value)


def cast(op: Operation) -> None:
    """Between floats nothing changes; to and from whole numbers the values themselves count."""
    source = op.given["self"]
    if is_float(op.node) and is_float(source):
        op.system.equate(op.out, op.of(source))
    elif _dtype(op.node) is not torch.bool:
        op.pin()


def choose(op: Operation) -> None:
    """`where` and `masked_fill`: all parts alike; a number must be 0 or infinite."""
    names = ("self", "other", "value", "src", "source")
    numbers = [op.given[x] for x in names if isinstance(op.given.get(x), (int, float))]
    parts = op.tensors(*(x for x in names if is_float(op.given.get(x))))
    if all(number == 0 or math.isinf(number) for number in numbers):
        op.system.equate(op.out, *parts) if is_float(op.node) else None
    else:
        op.pin()


def compare(op: Operation) -> None:
    """Both sides alike; with 0 only the sign counts; another number wants the values themselves."""
    other = op.given.get("other")
    if isinstance(other, Node):
        op.system.equate(*(op.of(x) for x in (op.given["self"], other)))
    elif other != 0:
        op.pin()


def clamp(op: Operation) -> None:
    """A clamp at fp16's maximum must not bite; at 0 it keeps signs; else it is pinned."""
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


def clamp_infinities(op: Operation) -> None:
    """`nan_to_num` at fp16's maximum must not bite; with other numbers it is pinned."""
    if is_range_clamp(op.node):
        clamp(op)
    else:
        op.pin()


def _clamp_below(op: Operation, source: Node, bound: float) -> None:
    """`max(norm, eps)`: the number scales along, or the norm is pinned."""
    if not is_float(op.node) or (eps := op.around.clamp_unknown(op.node, bound)) is None:
        op.pin()
    else:
        op.system.equate(op.out, op.of(source), eps)


def _equate_with(op: Operation, source: Node) -> None:
    op.system.equate(op.out, op.of(source))


def pad(op: Operation) -> None:
    """Padding with zeros or with the value's own edge keeps the exponent."""
    own_edge = op.given.get("mode", "constant") != "constant"
    if own_edge or not op.given.get("value"):
        _equate_with(op, op.given["self"])
    else:
        op.pin()


def pad_all(op: Operation) -> None:
    """Sequences padded with zeros to one length: all alike."""
    if op.given.get("padding_value"):
        op.pin()
    else:
        keep_all(op)


def fill(op: Operation) -> None:
    """Zero has every exponent, another number only 0."""
    value = op.given.get("value", op.given.get("fill_value"))
    if is_float(op.node) and (isinstance(value, Node) or value != 0):
        op.system.pin(op.out)


def pick(op: Operation) -> None:
    """One part of an operation with several results."""
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
        op.system.pin(op.out)  # orthonormal columns, whatever the length of the input's
    else:
        op.system.pin(op.out, *(op.of(x) for x in sources))


def pin(op: Operation) -> None:
    """Only the values themselves will do."""
    op.pin()


def extremum(op: Operation) -> None:
    """`max(x)` is like x; `max(x, other)` wants both alike."""
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
    "choose": choose,
    "compare": compare,
    "clamp": clamp,
    "clamp_infinities": clamp_infinities,
    "pad": pad,
    "pad_all": pad_all,
    "fill": fill,
    "pick": pick,
    "extremum": extremum,
}
"""Rules by the names that the table of operations gives them."""

_MAKERS: dict[str, Callable[..., Rule]] = {"product": product, "halves": fixed_power}


@functools.cache
def read_rule(cell: str) -> Rule:
    """The rule that a row of the table names: `add`, `product self vec2`."""
    name, *words = cell.split()
    return _MAKERS[name](*words) if name in _MAKERS else RULES[name]


def find_rule(node: Node) -> tuple[Rule | None, bool]:
    """The rule of a node's operation and whether it works in place; None when there is none."""
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
    """True when an operation returns sizes, strides and the like: numbers that no value decides."""
    returns = target._schema.returns
    is_number = all(str(entry.type) in ("int", "bool", "List[int]") for entry in returns)
    return bool(returns) and is_number and torch.Tag.data_dependent_output not in target.tags


def state_equations(op: Operation) -> bool:
    """Put an operation's demands into the system; False when it has no rule and was pinned."""
    rule, in_place = find_rule(op.node)
    (rule or pin)(op)
    changed = op.node.args[0] if in_place and op.node.args else None
    if is_float(changed) and is_float(op.node):
        op.system.equate(op.out, op.of(changed))
    return rule is not None
