"""What is known of each ATen operation: one table, which exponents, bounds and graph readers share.

A row of `knowledge/rules/operations.toml` gives operations that are alike in every column:

- *kind*: what it does to values. Code asks for kinds, never for names.
- *exponent*: the rule in `exponent_rules` for inputs and result, with its arguments:
  `product self vec2` adds the exponents of two arguments, `+bias` is added to the result, `!angle` stays.
- *bound*: the rule in `propagation` for the largest magnitude of its result.
- *traits*: `rearranges`: each element of the result is one of an input, up to its sign. `unrounded`: that,
  or a number. `alias`: the result may share the input's storage. `saturates`: the result is bounded
  whatever the input. `unmasks`: the sentinels of a mask end here. `slope=k`: the Lipschitz constant.

A new operation is one word in a row. One that is in no row is pinned, has no bound, and is reported by
name. Which dtypes an operation takes together, by backend, is in `knowledge/rules/backend_dtypes.toml`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stopdown.files.toml_files import read_rules

CONVOLUTIONS = ("convolution", "any_convolution", "transposed_convolution")
PRODUCTS = ("linear", *CONVOLUTIONS, "matrix", "attention")
"""Kinds of what does nearly all of the arithmetic."""

NORMS = ("row_norm", "group_norm", "batch_norm")
ONE_DTYPE = (*PRODUCTS, "einsum", "bilinear", *NORMS, "blend", "prelu")
"""Kinds of what takes operands of one dtype, where no rule of a backend says otherwise."""


@dataclass(frozen=True)
class Operation:
    """One row's columns, for one of its operations.

    Attributes:
        name: without overload: `layer_norm`.
        kind, exponent, bound: as the head of this module says; `bound` is "" for none.
        traits: those without a value.
        slope: no input moves the result by more than this times itself; None where that is unknown.
    """

    name: str
    kind: str
    exponent: str
    bound: str
    traits: frozenset[str]
    slope: float | None = None


class Calls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How Python code calls operations.

    Attributes:
        asks: what turns a tensor's values into numbers of Python.
        makes: what makes a tensor of numbers.
        arguments: names of arguments in order, where a signature does not tell them.
    """

    asks: frozenset[str]
    makes: frozenset[str]
    called: dict[str, str]
    arguments: dict[str, tuple[str, ...]]
    renamed: dict[str, dict[str, str]]


@functools.cache
def read_calls() -> Calls:
    """Read from the table how Python code calls the functions and methods of torch."""
    return msgspec.convert(read_rules("operations")["calls"], Calls)


@functools.cache
def read_operations() -> Mapping[str, Operation]:
    """Return every operation of the table by its name."""
    found: dict[str, Operation] = {}
    for kind, exponent, bound, traits, names in read_rules("operations")["rows"]:
        slopes = [float(x.partition("=")[2]) for x in traits.split() if x.startswith("slope=")]
        plain = {x for x in traits.split() if "=" not in x}
        plain |= {"unrounded"} if "rearranges" in plain else set()
        for name in names.split():
            assert name not in found, f"{name} is in two rows"
            found[name] = Operation(
                name, kind, exponent, bound, frozenset(plain), next(iter(slopes), None)
            )
    return found


def find_operation(name: str) -> Operation | None:
    """Return the row of an operation or of its in-place form; None if there is no such row."""
    table = read_operations()
    if name in table or not name.endswith("_") or name.startswith("__"):
        return table.get(name)
    return table.get(name.rstrip("_"))


def kind_of(name: str) -> str:
    """Return the kind of an operation by its own name; "" without a row of that name, as for `add_`."""
    found = read_operations().get(name)
    return found.kind if found else ""


@functools.cache
def list_with(trait: str) -> frozenset[str]:
    """Return the names of the operations with a trait."""
    return frozenset(name for name, row in read_operations().items() if trait in row.traits)


@functools.cache
def list_kinds(*kinds: str) -> frozenset[str]:
    """Return the names of the operations of some kinds."""
    return frozenset(name for name, row in read_operations().items() if row.kind in kinds)


def keeps_clamps(class_name: str) -> bool:
    """Return whether the clamp at fp16's maximum is part of a model, by the name of its class."""
    return class_name.startswith(tuple(read_rules("operations")["kept_clamps"]))
