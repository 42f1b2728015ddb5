"""What each operation demands of the exponents of its inputs and outputs: one rule per operation.

A rule gets a `Site` and states equations. Three kinds cover most of ATen: *homogeneous* (a factor
on the inputs comes out unchanged), *product* (factors multiply), *pinned* (only the values
themselves will do: exp, softmax, gelu, comparisons with a number). Norms, powers, attention and
clamps have rules of their own. An operation without a rule is pinned and reported, never guessed.

**Catches** every operation in `RULES`, their in-place forms, autocast regions (walked into by the
capture), eps that is written as an attribute of the module whose code uses it.
**Does not catch** an eps that is a literal in the code: the sum it stands in is pinned.
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

from stopdown.graph.nodes import arguments, is_float, is_kind, is_range_clamp, is_split, operation
from stopdown.graph.operations import find_operation
from stopdown.scaling.linear_system import ZERO, System


class RuleContext(Protocol):
    """What a rule may ask about the graph that it stands in."""

    system: System

    def unknown(self, node: Node, block: int | None, user: Node) -> int:
        """The exponent of a value as its user sees it, of one of its blocks when it has several."""

    def eps_unknown(self, node: Node, value: float | None) -> int | None:
        """The exponent of the eps that a node uses, None when it is no module's attribute."""

    def least(self, node: Node) -> float:
        """Smallest positive magnitude seen in a value, 0 when none was measured."""

    def keeps_clamp(self, node: Node) -> bool:
        """True when a clamp at the end of fp16's range is part of what the model computes."""

    def bound_below(self, node: Node, magnitude: float) -> None:
        """Demand that the scaled value stays above a magnitude."""

    def keep_from_zero(self, node: Node) -> None:
        """Demand that the scaled value, of which a reciprocal is taken, does not become 0 in fp16."""


@dataclass
class Site:
    """One operation at one place, for one block of its output."""

    node: Node
    block: int | None
    around: RuleContext

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


Rule = Callable[[Site], None]


def keep_first(site: Site) -> None:
    """The result has the exponent of the first float input."""
    floats = site.floats()
    if is_float(site.node) and floats:
        site.system.equate(site.out, site.of(floats[0]))
    elif floats and _dtype(site.node) is not torch.bool:
        site.pin()


def parts(site: Site) -> None:
    """One result is like the first float input; of several, `pick` says so of each."""
    if is_float(site.node):
        keep_first(site)


def keep_all(site: Site) -> None:
    """The result and every float input have one exponent."""
    site.system.equate(site.out, *(site.of(x) for x in site.floats()))


def scatter(site: Site) -> None:
    """As `keep_all`; a number that is written must be 0, and products want the values themselves."""
    if site.given.get("reduce") not in (None, "add") or site.given.get("value"):
        site.pin()
    else:
        keep_all(site)


def free(site: Site) -> None:
    """Nothing is demanded: no float comes out, or only zeros."""


def pinned_source(site: Site) -> None:
    """A value made here from numbers: its own exponent is 0."""
    if is_float(site.node):
        site.system.pin(site.out)


def product(*names: str) -> Rule:
    """The exponents of the named inputs add; a bias, written `+bias`, has that of the result."""
    names, biases = tuple(x for x in names if x[0] != "+"), [x[1:] for x in names if x[0] == "+"]

    def rule(site: Site) -> None:
        if not is_float(site.node):
            return
        factors = [(site.of(site.given[name]), 1) for name in names]
        site.system.relate((site.out, -1), *factors)
        for bias in biases:
            if site.given.get(bias) is not None:
                site.system.equate(site.out, site.of(site.given[bias]))

    return rule


def multiply_all(site: Site) -> None:
    """The exponents of all inputs add (einsum)."""
    site.system.relate((site.out, -1), *((site.of(x), 1) for x in site.given["tensors"]))


def quotient(site: Site) -> None:
    """The exponents subtract; a rounding mode wants the values themselves."""
    if site.given.get("rounding_mode") is not None:
        return site.pin()
    terms = (site.of(site.given["self"]), 1), (site.of(site.given["other"]), -1)
    return site.system.relate((site.out, -1), *terms)


def add(site: Site) -> None:
    """Sums have one exponent; a number is an eps that scales along, or pins the sum."""
    first, other = site.given["self"], site.given["other"]
    if not is_float(site.node):
        return
    if isinstance(other, Node) and isinstance(first, Node):
        site.system.equate(site.out, site.of(first), site.of(other))
    elif other == 0:
        site.system.equate(site.out, site.of(first))
    else:
        _add_number(site, first, other)


def _add_number(site: Site, first: Any, number: Any) -> None:
    eps = site.around.eps_unknown(site.node, number) if isinstance(number, float) else None
    if eps is None:
        site.pin()
    else:
        site.system.equate(site.out, site.of(first), eps)


def subtract_from(site: Site) -> None:
    """`number - x`: pinned but for 0."""
    if site.given["other"] == 0:
        site.system.equate(site.out, site.of(site.given["self"]))
    else:
        site.pin()


def power(site: Site) -> None:
    """`x ** n` has n times the exponent; halves ask for an even one."""
    exponent = site.given.get("exponent")
    if not isinstance(exponent, (int, float)) or exponent * 2 != int(exponent * 2):
        return site.pin()
    if exponent < 0:
        site.around.keep_from_zero(site.given["self"])
    terms = (site.of(site.given["self"]), int(exponent * 2)), (site.out, -2)
    return site.system.relate(*terms)


def fixed_power(halves: str) -> Rule:
    """`x ** (halves / 2)`: rsqrt, sqrt, reciprocal, square."""
    twice = int(halves)

    def rule(site: Site) -> None:
        if twice < 0:
            site.around.keep_from_zero(site.given["self"])
        site.system.relate((site.of(site.given["self"]), twice), (site.out, -2))

    return rule


def norm(site: Site) -> None:
    """Layer, group and RMS norm: the input is free when eps scales along by its square."""
    source = site.of(site.given["input"])
    eps = site.around.eps_unknown(site.node, site.given.get("eps"))
    if eps is None:
        site.system.pin(source)
    else:
        site.system.relate((eps, -1), (source, 2))
    _affine(site)


def batch_norm(site: Site) -> None:
    """Norm by stored statistics, which scale with the input."""
    if site.given.get("training") or site.given.get("running_mean") is None:
        return norm(site)
    norm(site)
    source = site.of(site.given["input"])
    site.system.equate(source, site.of(site.given["running_mean"]))
    return site.system.relate((site.of(site.given["running_var"]), -1), (source, 2))


def _affine(site: Site) -> None:
    weight, bias = site.given.get("weight"), site.given.get("bias")
    site.system.equate(site.out, ZERO if weight is None else site.of(weight))
    if bias is not None:
        site.system.equate(site.out, site.of(bias))


def attention(site: Site) -> None:
    """Scores want the values themselves, so query and key cancel; the result is like the values."""
    query, key, value = (site.of(site.given[name]) for name in ("query", "key", "value"))
    site.system.relate((query, 1), (key, 1))
    site.system.equate(site.out, value)
    if is_float(site.given.get("attn_mask")):
        site.system.pin(site.of(site.given["attn_mask"]))


def cast(site: Site) -> None:
    """Between floats nothing changes; to and from whole numbers the values themselves count."""
    source = site.given["self"]
    if is_float(site.node) and is_float(source):
        site.system.equate(site.out, site.of(source))
    elif _dtype(site.node) is not torch.bool:
        site.pin()


def choose(site: Site) -> None:
    """`where` and `masked_fill`: all parts alike; a number must be 0 or infinite."""
    names = ("self", "other", "value", "src", "source")
    numbers = [site.given[x] for x in names if isinstance(site.given.get(x), (int, float))]
    parts = site.tensors(*(x for x in names if is_float(site.given.get(x))))
    if all(number == 0 or math.isinf(number) for number in numbers):
        site.system.equate(site.out, *parts) if is_float(site.node) else None
    else:
        site.pin()


def compare(site: Site) -> None:
    """Both sides alike; with 0 only the sign counts; another number wants the values themselves."""
    other = site.given.get("other")
    if isinstance(other, Node):
        site.system.equate(*(site.of(x) for x in (site.given["self"], other)))
    elif other != 0:
        site.pin()


def clamp(site: Site) -> None:
    """A clamp at the end of fp16's range must not bite; at 0 it keeps signs; else it is pinned."""
    bounds = [site.given.get(name) for name in ("min", "max")]
    source = site.given["self"]
    if is_range_clamp(site.node):
        site.pin() if site.around.keeps_clamp(site.node) else _equate_with(site, source)
    elif all(bound is None or (not isinstance(bound, Node) and bound == 0) for bound in bounds):
        _equate_with(site, source)
    elif bounds[1] is None and isinstance(bounds[0], float):
        _clamp_below(site, source, bounds[0])
    else:
        site.pin()


def _clamp_below(site: Site, source: Node, bound: float) -> None:
    """`max(norm, eps)` of a norm that stays above eps before and after is no clamp at all."""
    if 0 < bound < site.around.least(source):
        _equate_with(site, source)
        site.around.bound_below(source, bound)
    else:
        site.pin()


def _equate_with(site: Site, source: Node) -> None:
    site.system.equate(site.out, site.of(source))


def pad(site: Site) -> None:
    """Padding with zeros or with the value's own edge keeps the exponent."""
    own_edge = site.given.get("mode", "constant") != "constant"
    if own_edge or not site.given.get("value"):
        _equate_with(site, site.given["self"])
    else:
        site.pin()


def pad_all(site: Site) -> None:
    """Sequences padded with zeros to one length: all alike."""
    if site.given.get("padding_value"):
        site.pin()
    else:
        keep_all(site)


def fill(site: Site) -> None:
    """Zero has every exponent, another number only 0."""
    value = site.given.get("value", site.given.get("fill_value"))
    if is_float(site.node) and (isinstance(value, Node) or value != 0):
        site.system.pin(site.out)


def interpolate_linearly(site: Site) -> None:
    """`lerp`: both ends alike, the weight at 0."""
    ends = site.tensors("self", "end")
    site.system.equate(site.out, *ends)
    site.system.pin(site.of(site.given["weight"]))


def pick(site: Site) -> None:
    """One part of an operation with several results."""
    parent = site.node.args[0]
    assert isinstance(parent, Node)
    sources = [x for x in parent.all_input_nodes if is_float(x)]
    if not is_float(site.node):
        return
    if is_split(parent) or is_kind(parent, "order"):
        site.system.equate(site.out, *(site.of(x) for x in sources))
    elif is_kind(parent, "variance_mean") and site.node.args[1] == 0:
        site.system.relate((site.out, -1), (site.of(sources[0]), 2))
    elif is_kind(parent, "variance_mean", "deviation_mean") or (
        is_kind(parent, "factors") and site.node.args[1] == 1
    ):
        site.system.equate(site.out, site.of(sources[0]))
    elif is_kind(parent, "factors"):
        site.system.pin(site.out)  # orthonormal columns, whatever the length of the input's
    else:
        site.system.pin(site.out, *(site.of(x) for x in sources))


def polar(site: Site) -> None:
    """Magnitudes keep their exponent; angles are taken by their values."""
    site.system.equate(site.out, site.of(site.given["abs"]))
    site.system.pin(site.of(site.given["angle"]))


def pin(site: Site) -> None:
    """Only the values themselves will do."""
    site.pin()


def extremum(site: Site) -> None:
    """`max(x)` is like x; `max(x, other)` wants both alike."""
    if is_float(site.node):
        keep_all(site)


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


RULES: dict[str, Rule] = {
    "same": keep_first,
    "alike": keep_all,
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
    "cast": cast,
    "choose": choose,
    "compare": compare,
    "clamp": clamp,
    "pad": pad,
    "pad_all": pad_all,
    "fill": fill,
    "interpolate": interpolate_linearly,
    "pick": pick,
    "polar": polar,
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
    if getattr(node.target, "_schema", None) is None:
        return (None if is_float(node) else free), False
    if _tells_no_value(node.target):
        return free, False
    name = operation(node)
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


def state_equations(site: Site) -> bool:
    """Put an operation's demands into the system; False when it has no rule and was pinned."""
    rule, in_place = find_rule(site.node)
    (rule or pin)(site)
    changed = site.node.args[0] if in_place and site.node.args else None
    if is_float(changed) and is_float(site.node):
        site.system.equate(site.out, site.of(changed))
    return rule is not None
