"""The rules of bounds by the names that the table of operations gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from stopdown.bounds import elementwise_rules, norm_rules, product_rules, view_rules
from stopdown.bounds.rule_inputs import Rule

RULES: dict[str, Rule | Callable[[float], Rule]] = {
    "same": view_rules.keep,
    "reshape": view_rules.view,
    "permute": view_rules.swap,
    "expand": view_rules.expand,
    "slice": view_rules.slice_,
    "select": view_rules.select,
    "part": view_rules.part_of_split,
    "cat": view_rules.cat,
    "stack": view_rules.stack,
    "repeat": view_rules.repeat,
    "tokens": view_rules.loosen_tokens,
    "places": view_rules.loosen_spatially,
    "any": view_rules.loosen,
    "choose": view_rules.choose,
    "pad": view_rules.pad,
    "embedding": view_rules.embedding,
    "complex": view_rules.to_complex,
    "real": view_rules.to_real,
    "add": elementwise_rules.add,
    "subtract_from": elementwise_rules.subtract_from,
    "multiply": elementwise_rules.multiply,
    "divide": elementwise_rules.divide,
    "power": elementwise_rules.power,
    "root": elementwise_rules.root,
    "exponential": elementwise_rules.exponential,
    "shrink": elementwise_rules.shrink,
    "saturate": elementwise_rules.saturate,
    "softmax": elementwise_rules.softmax,
    "clamp": elementwise_rules.clamp,
    "total": elementwise_rules.total,
    "mean": elementwise_rules.mean,
    "polar": elementwise_rules.polar,
    "zeros": elementwise_rules.zeros,
    "ones": elementwise_rules.ones,
    "fill": elementwise_rules.fill,
    "linear": product_rules.linear,
    "convolve": product_rules.convolve,
    "transposed": product_rules.transposed,
    "matmul": product_rules.matmul,
    "einsum": product_rules.einsum,
    "outer": product_rules.outer,
    "attention": product_rules.attention,
    "normalise": norm_rules.normalise,
    "normalise_groups": norm_rules.normalise_groups,
}
"""Those that the table gives a number to (`shrink 1`) make a rule of it."""

_MAKERS = ("shrink", "saturate")


@functools.cache
def find_rule(cell: str) -> Rule:
    """The rule that a row of the table of operations names: `linear`, `shrink 1`."""
    name, _, number = cell.partition(" ")
    found = RULES[name]
    if name not in _MAKERS:
        return found  # type: ignore[return-value]
    return found(float(number)) if number else found()  # type: ignore[call-arg,arg-type,return-value]
