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

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from stopdown.graph.nodes import SPLITS, arguments, is_float, is_range_clamp, operation
from stopdown.scaling.equations import ZERO, System


class Surroundings(Protocol):
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


@dataclass
class Site:
    """One operation at one place, for one block of its output."""

    node: Node
    block: int | None
    around: Surroundings

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


def keep_all(site: Site) -> None:
    """The result and every float input have one exponent."""
    site.system.equate(site.out, *(site.of(x) for x in site.floats()))


def free(site: Site) -> None:
    """Nothing is demanded: no float comes out, or only zeros."""


def pinned_source(site: Site) -> None:
    """A value made here from numbers: its own exponent is 0."""
    if is_float(site.node):
        site.system.pin(site.out)


def product(*names: str, bias: str = "") -> Rule:
    """The exponents of the named inputs add; a bias has that of the result."""

    def rule(site: Site) -> None:
        if not is_float(site.node):
            return
        factors = [(site.of(site.given[name]), 1) for name in names]
        site.system.relate((site.out, -1), *factors)
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
    terms = (site.of(site.given["self"]), int(exponent * 2)), (site.out, -2)
    return site.system.relate(*terms)


def fixed_power(twice: int) -> Rule:
    """`x ** (twice / 2)`: rsqrt, sqrt, reciprocal, square."""

    def rule(site: Site) -> None:
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
    name = operation(parent)
    sources = [x for x in parent.all_input_nodes if is_float(x)]
    if not is_float(site.node):
        return
    if name in SPLITS or name in _ORDERS:
        site.system.equate(site.out, *(site.of(x) for x in sources))
    elif name == "var_mean" and site.node.args[1] == 0:
        site.system.relate((site.out, -1), (site.of(sources[0]), 2))
    elif name in ("var_mean", "std_mean") or (name == "linalg_qr" and site.node.args[1] == 1):
        site.system.equate(site.out, site.of(sources[0]))
    elif name == "linalg_qr":
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


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ORDERS = _words("topk sort max min cummax cummin median aminmax broadcast_tensors meshgrid")

_LIKE_SELF = _words("""
    abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d
    alias amax amin as_strided avg_pool1d avg_pool2d avg_pool3d broadcast_to clone col2im
    conj contiguous cumsum detach detach_ diagonal diff expand expand_as flatten flip gather
    im2col index index_select lift_fresh_copy linalg_vector_norm masked_select max_pool1d
    max_pool2d max_pool3d mean movedim narrow neg nonzero norm permute pixel_shuffle
    pixel_unshuffle real imag reflection_pad1d reflection_pad2d reflection_pad3d relu repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape roll
    select slice squeeze std sum swapaxes t take_along_dim tile transpose tril triu
    unflatten unfold unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_trilinear3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa view view_as view_as_complex
    view_as_real _unsafe_view resolve_conj type_as leaky_relu swapdims moveaxis squeeze_
    channel_shuffle rot90 positive trace ravel numpy_T matrix_H mT mH adjoint diag diag_embed
""")

_ALIKE = _words("""
    cat stack concat maximum minimum copy copy_ index_put slice_scatter select_scatter
    index_copy index_add scatter scatter_add hstack vstack concatenate block_diag
""")

_PINNED = _words("""
    gelu silu sigmoid tanh softmax _softmax exp exp2 log log2 log10 log1p expm1 sin cos tan
    erf softplus mish hardswish hardsigmoid hardtanh elu selu celu log_softmax logsumexp
    floor ceil round trunc frac fmod remainder sign sgn sinc atan2 asin acos atan sinh cosh
    asinh acosh atanh floor_divide bucketize nan_to_num logit glu log_sigmoid prelu cumprod
    prod bernoulli relu6 sign_ angle silu_ gelu_ multinomial histc erfinv
""")

_FREE = _words("""
    isinf isnan isfinite isneginf isposinf zeros new_zeros zeros_like empty new_empty
    empty_like empty_strided new_empty_strided any all size sym_size sym_numel sym_stride
    _assert_tensor_metadata _assert_async _assert_scalar sym_constrain_range
    sym_constrain_range_for_size logical_not logical_and logical_or logical_xor
    nonzero_static argmax argmin argsort unique_consecutive is_floating_point
""")

_SOURCES = _words("""
    ones new_ones ones_like full new_full full_like arange linspace eye rand randn rand_like
    randn_like randint scalar_tensor tensor logspace one_hot normal hann_window tril_indices
""")


def _rule_table() -> dict[str, Rule]:
    table: dict[str, Rule] = dict.fromkeys(_LIKE_SELF, keep_first)
    table |= dict.fromkeys(_ALIKE, keep_all)
    table |= dict.fromkeys(_PINNED, pin)
    table |= dict.fromkeys(_FREE, free)
    table |= dict.fromkeys(_SOURCES, pinned_source)
    table |= dict.fromkeys((*SPLITS, *_ORDERS), free)
    table |= dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), _WEIGHTED)
    table |= dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"), _WEIGHTED
    )
    table |= dict.fromkeys(("layer_norm", "group_norm", "rms_norm", "_fused_rms_norm"), norm)
    table |= dict.fromkeys(("gt", "lt", "ge", "le", "eq", "ne"), compare)
    table |= dict.fromkeys(("to", "_to_copy"), cast)
    table |= dict.fromkeys(("where", "masked_fill", "masked_scatter"), choose)
    table |= dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max"), clamp)
    table |= dict.fromkeys(("pad", "constant_pad_nd", "_pad_enum"), pad)
    table |= dict.fromkeys(("bmm", "mm", "matmul"), _matmul)
    return table | _SPECIAL


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _matmul(site: Site) -> None:
    second = "mat2" if "mat2" in site.given else "other"
    product("self", second)(site)


def _extremum(site: Site) -> None:
    """`max(x)` is like x; `max(x, other)` wants both alike."""
    if is_float(site.node):
        keep_all(site)


_WEIGHTED = product("input", "weight", bias="bias")

_SPECIAL: dict[str, Rule] = {
    "mul": product("self", "other"),
    "multiply": product("self", "other"),
    "outer": product("self", "vec2"),
    "mv": product("self", "vec"),
    "dot": product("self", "tensor"),
    "addmm": product("mat1", "mat2", bias="self"),
    "baddbmm": product("batch1", "batch2", bias="self"),
    "addcmul": product("tensor1", "tensor2", bias="self"),
    "einsum": multiply_all,
    "div": quotient,
    "true_divide": quotient,
    "add": add,
    "sub": add,
    "rsub": subtract_from,
    "pow": power,
    "square": fixed_power(4),
    "sqrt": fixed_power(1),
    "rsqrt": fixed_power(-1),
    "reciprocal": fixed_power(-2),
    "var": fixed_power(4),
    "batch_norm": batch_norm,
    "instance_norm": batch_norm,
    "scaled_dot_product_attention": attention,
    "embedding": keep_first,
    "dropout": keep_first,
    "feature_dropout": keep_first,
    "lerp": interpolate_linearly,
    "pad_sequence": pad_all,
    "fill": fill,
    "zero": free,
    "max": _extremum,
    "min": _extremum,
    "var_mean": free,
    "std_mean": free,
    "polar": polar,
    "complex": keep_all,
    "linalg_qr": free,
}

RULES = _rule_table()


def find_rule(node: Node) -> tuple[Rule | None, bool]:
    """The rule of a node's operation and whether it works in place; None when there is none."""
    name = operation(node)
    if node.target is operator.getitem:
        return pick, False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return (None if is_float(node) else free), False
    if _tells_no_value(node.target):
        return free, False
    if name in RULES:
        return RULES[name], name.endswith("_") and not name.startswith("__")
    if name.endswith("_") and name.rstrip("_") in RULES:
        return RULES[name.rstrip("_")], True
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


def names_with_rules() -> Iterable[str]:
    """The operations that have a rule, sorted."""
    return sorted(RULES)
