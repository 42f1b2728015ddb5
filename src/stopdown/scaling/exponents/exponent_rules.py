"""What each operation demands of the exponents of its inputs and outputs: one rule per operation.

A rule gets a `PlacedOperation` and states equations. Three kinds cover most of ATen: *homogeneous* (a
factor on the inputs comes out unchanged), *product* (factors multiply), *pinned* (only the values
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
    """What rules ask of the call whose equations are stated (`problem.CallStatement`)."""

    system: System

    def unknown(self, node: Node, block: int | None, user: Node) -> int:
        """Return the exponent of a value as its user sees it."""

    def eps_unknown(self, node: Node, value: float | None) -> int | None:
        """Return the exponent of an eps that is an attribute of the module at this place, or None."""

    def clamp_unknown(self, node: Node, value: float) -> int | None:
        """Return the exponent of a number that this place clamps from below, or None if it is fixed."""

    def keeps_clamp(self, node: Node) -> bool:
        """Return whether a clamp is part of the model's computation."""

    def keep_from_zero(self, node: Node) -> None:
        """Keep the argument of a root or reciprocal in 16 bits away from 0."""


@dataclass
class PlacedOperation:
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
        """Return the exponent of an argument: of a float tensor its own, of anything else 0."""
        return self.around.unknown(value, self.block, self.node) if is_float(value) else ZERO

    def floats(self) -> list[Node]:
        """List the float tensors among the arguments."""
        return [x for x in self.node.all_input_nodes if is_float(x)]

    def tensors(self, *names: str) -> list[int]:
        """List the exponents of those of the named arguments that are given."""
        return [self.of(self.given[name]) for name in names if self.given.get(name) is not None]

    def pin(self) -> None:
        """Set the exponents of the inputs and of the result to 0."""
        self.system.pin(*(self.of(x) for x in self.floats()))
        if is_float(self.node):
            self.system.pin(self.out)


Rule = Callable[[PlacedOperation], None]


def keep_first(op: PlacedOperation) -> None:
    """Give the result the exponent of the first float input."""
    floats = op.floats()
    if is_float(op.node) and floats:
        op.system.equate(op.out, op.of(floats[0]))
    elif floats and _dtype(op.node) is not torch.bool:
        op.pin()


def length(op: PlacedOperation) -> None:
    """Give a norm the exponent of its input; pin orders that count values or whose powers are rounded."""
    order = op.given.get("ord", op.given.get("p"))
    if order in (None, 1, 2, math.inf, -math.inf):
        keep_first(op)
    else:
        op.pin()


def parts(op: PlacedOperation) -> None:
    """Give a single result the exponent of the first float input; `pick` does so for each of several."""
    if is_float(op.node):
        keep_first(op)


def keep_all(op: PlacedOperation) -> None:
    """Give the result and every float input the same exponent."""
    op.system.equate(op.out, *(op.of(x) for x in op.floats()))


def scatter(op: PlacedOperation) -> None:
    """Apply `keep_all` to a scatter; pin it if it writes a number other than 0 or multiplies."""
    if op.given.get("reduce") not in (None, "add") or op.given.get("value"):
        op.pin()
    else:
        keep_all(op)


def free(op: PlacedOperation) -> None:
    """Demand nothing: the result is no float, or only zeros."""


def pinned_source(op: PlacedOperation) -> None:
    """Pin a value that is made here from numbers at exponent 0."""
    if is_float(op.node):
        op.system.pin(op.out)


def product(*words: str) -> Rule:
    """Make the rule of a product: exponents of named inputs add; `+bias` has the result's, `!angle` 0."""
    named = {sign: [x.lstrip("+!") for x in words if x[0] == sign] for sign in "+!"}
    factors = [x for x in words if x[0] not in named]

    def rule(op: PlacedOperation) -> None:
        if is_float(op.node):
            op.system.relate((op.out, -1), *((op.of(op.given[name]), 1) for name in factors))
            op.system.equate(op.out, *op.tensors(*named["+"]))
            op.system.pin(*op.tensors(*named["!"]))

    return rule


def multiply_all(op: PlacedOperation) -> None:
    """Add the exponents of all inputs (einsum)."""
    op.system.relate((op.out, -1), *((op.of(x), 1) for x in op.given["tensors"]))


def quotient(op: PlacedOperation) -> None:
    """Subtract the exponent of the divisor; pin a division with a rounding mode."""
    if op.given.get("rounding_mode") is not None:
        return op.pin()
    terms = (op.of(op.given["self"]), 1), (op.of(op.given["other"]), -1)
    return op.system.relate((op.out, -1), *terms)


def add(op: PlacedOperation) -> None:
    """Give a sum and its terms the same exponent; an added number scales as an eps, or pins the sum."""
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
    """Pin `number - x`, unless the number is 0."""
    if op.given["other"] == 0:
        op.system.equate(op.out, op.of(op.given["self"]))
    else:
        op.pin()


def power(op: PlacedOperation) -> None:
    """Give `x ** n` n times the exponent of `x`, which must be even for half-integer n."""
    exponent = op.given.get("exponent")
    if not isinstance(exponent, (int, float)) or exponent * 2 != int(exponent * 2):
        return op.pin()
    if exponent < 0:
        op.around.keep_from_zero(op.given["self"])
    terms = (op.of(op.given["self"]), int(exponent * 2)), (op.out, -2)
    return op.system.relate(*terms)


def fixed_power(halves: str) -> Rule:
    """Make the rule of `x ** (halves / 2)`: rsqrt, sqrt, reciprocal, square."""
    twice = int(halves)

    def rule(op: PlacedOperation) -> None:
        if twice < 0:
            op.around.keep_from_zero(op.given["self"])
        op.system.relate((op.of(op.given["self"]), twice), (op.out, -2))

    return rule


def norm(op: PlacedOperation) -> None:
    """Leave the input of a layer, group or RMS norm free if its eps scales by the square; else pin it."""
    source = op.of(op.given["input"])
    eps = op.around.eps_unknown(op.node, op.given.get("eps"))
    if eps is None:
        op.system.pin(source)
    else:
        op.system.relate((eps, -1), (source, 2))
    _affine(op)


def batch_norm(op: PlacedOperation) -> None:
    """Scale the stored statistics of a batch norm with its input."""
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
    """Cancel the exponents of query and key, as scores must not be scaled; the result has the value's."""
    query, key, value = (op.of(op.given[name]) for name in ("query", "key", "value"))
    op.system.relate((query, 1), (key, 1))
    op.system.equate(op.out, value)
    if is_float(op.given.get("attn_mask")):
        op.system.pin(op.of(op.given["attn_mask"]))


def attend_by_kernel(op: PlacedOperation) -> None:
    """Treat an attention kernel as attention: query, key, value come first; other results are statistics.

    Other inputs, such as those of the function that changes a score, are pinned.
    """
    first = op.node.args[:3]
    query, key, value = (op.of(x) for x in first)
    op.system.relate((query, 1), (key, 1))
    op.system.pin(*(op.of(x) for x in op.floats() if x not in first))
    if is_float(op.node):
        op.system.equate(op.out, value)


def cast(op: PlacedOperation) -> None:
    """Keep the exponent in a cast between floats; pin a cast to or from integers."""
    source = op.given["self"]
    if is_float(op.node) and is_float(source):
        op.system.equate(op.out, op.of(source))
    elif _dtype(op.node) is not torch.bool:
        op.pin()


def align_choice(op: PlacedOperation) -> None:
    """Give all parts of `where` and `masked_fill` the same exponent; a number must be 0 or infinite."""
    names = ("self", "other", "value", "src", "source")
    numbers = [op.given[x] for x in names if isinstance(op.given.get(x), (int, float))]
    parts = op.tensors(*(x for x in names if is_float(op.given.get(x))))
    if all(number == 0 or math.isinf(number) for number in numbers):
        op.system.equate(op.out, *parts) if is_float(op.node) else None
    else:
        op.pin()


def align_comparison(op: PlacedOperation) -> None:
    """Give both sides of a comparison the same exponent; 0 demands nothing, another number pins."""
    other = op.given.get("other")
    if isinstance(other, Node):
        op.system.equate(*(op.of(x) for x in (op.given["self"], other)))
    elif other != 0:
        op.pin()


def clamp(op: PlacedOperation) -> None:
    """Keep the exponent of a clamp at fp16's maximum, which must not clip, or at 0; scale or pin others."""
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
    """Treat `nan_to_num` at fp16's maximum as a clamp; with other numbers pin it."""
    if is_range_clamp(op.node):
        clamp(op)
    else:
        op.pin()


def _clamp_below(op: PlacedOperation, source: Node, bound: float) -> None:
    """Scale the number in `max(norm, eps)` with the norm, or pin the norm."""
    if not is_float(op.node) or (eps := op.around.clamp_unknown(op.node, bound)) is None:
        op.pin()
    else:
        op.system.equate(op.out, op.of(source), eps)


def _equate_with(op: PlacedOperation, source: Node) -> None:
    op.system.equate(op.out, op.of(source))


def pad(op: PlacedOperation) -> None:
    """Keep the exponent if the padding is zeros or the value's own edge; else pin it."""
    own_edge = op.given.get("mode", "constant") != "constant"
    if own_edge or not op.given.get("value"):
        _equate_with(op, op.given["self"])
    else:
        op.pin()


def pad_all(op: PlacedOperation) -> None:
    """Give sequences that are padded with zeros to one length the same exponent."""
    if op.given.get("padding_value"):
        op.pin()
    else:
        keep_all(op)


def fill(op: PlacedOperation) -> None:
    """Leave the exponent of a fill with zero free; pin a fill with another value."""
    value = op.given.get("value", op.given.get("fill_value"))
    if is_float(op.node) and (isinstance(value, Node) or value != 0):
        op.system.pin(op.out)


def pick(op: PlacedOperation) -> None:
    """State the exponent of one result of an operation with several."""
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


def pin(op: PlacedOperation) -> None:
    """Pin the inputs and the result: only unscaled values are right."""
    op.pin()


def extremum(op: PlacedOperation) -> None:
    """Give `max(x)` the exponent of `x`; `max(x, other)` demands the same one of both."""
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
"""Rules by the names that the table of operations gives them."""

_MAKERS: dict[str, Callable[..., Rule]] = {"product": product, "halves": fixed_power}


@functools.cache
def read_rule(cell: str) -> Rule:
    """Return the rule that a row of the table names: `add`, `product self vec2`."""
    name, *words = cell.split()
    return _MAKERS[name](*words) if name in _MAKERS else RULES[name]


def find_rule(node: Node) -> tuple[Rule | None, bool]:
    """Return the rule of a node's operation, None if there is none, and whether it works in place."""
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
    """Return whether an operation returns sizes, strides and the like: numbers that depend on no value."""
    returns = target._schema.returns
    is_number = all(str(entry.type) in ("int", "bool", "List[int]") for entry in returns)
    return bool(returns) and is_number and torch.Tag.data_dependent_output not in target.tags


def state_equations(op: PlacedOperation) -> bool:
    """Put an operation's demands into the system; False when it has no rule and was pinned."""
    rule, in_place = find_rule(op.node)
    (rule or pin)(op)
    changed = op.node.args[0] if in_place and op.node.args else None
    if is_float(changed) and is_float(op.node):
        op.system.equate(op.out, op.of(changed))
    return rule is not None
