"""Table of ATen operations, shared by the rules for exponents, bounds and graphs.

Each row of `knowledge/rules/operations.toml` lists operations that are equal in all of these columns:

- *kind*: what the operation does to values. Code asks for kinds, never for names.
- *exponent*: rule in `exponent_rules` for inputs and result, with its arguments:
  `product self vec2` adds the exponents of two arguments, `+bias` is added to the result, `!angle` is
  fixed.
- *bound*: rule in `propagation` for the largest magnitude of the result.
- *traits*: `rearranges`: each element of the result is an element of an input, up to its sign. `unrounded`:
  the same, or a constant. `alias`: the result may share the input's storage. `saturates`: the result is
  bounded for any input. `unmasks`: the values that hide scores in a mask do not pass. `slope=k`: the
  Lipschitz constant.

A new operation is one word in a row. An operation without a row has its exponent fixed at 0 and no bound,
and is reported by name. The dtypes that operations accept on each backend are in
`knowledge/rules/backend_dtypes.toml`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stopdown.files.toml_files import read_rules

CONVOLUTIONS = ("convolution", "any_convolution", "transposed_convolution")
PRODUCTS = ("linear", *CONVOLUTIONS, "matrix", "attention")
"""Kinds of operations that do nearly all of the arithmetic."""

NORMS = ("row_norm", "group_norm", "batch_norm")
ONE_DTYPE = (*PRODUCTS, "einsum", "bilinear", *NORMS, "blend", "prelu")
"""Kinds of operations that need operands of one dtype, unless a backend rule says otherwise."""


@dataclass(frozen=True)
class Operation:
    """Row of `knowledge/rules/operations.toml`: properties of one ATen operation.

    Attributes:
        name: name without overload: `layer_norm`.
        kind: what it does to values: `row_norm`.
        exponent: rule for the exponents of its inputs and result.
        bound: rule for the largest magnitude of its result; "" for none.
        traits: further properties: `rearranges`, `saturates`.
        slope: Lipschitz constant; None if unknown.
    """

    name: str
    kind: str
    exponent: str
    bound: str
    traits: frozenset[str]
    slope: float | None = None


class Calls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names by which Python code calls operations.

    Attributes:
        asks: functions and methods that read a tensor's values into Python, such as `item`.
        makes: functions that create a tensor from numbers.
        called: name of an operation by the name of the torch function or method that calls it.
        arguments: names of the arguments in order, for functions without a readable signature.
        renamed: other names of arguments, by operation.
    """

    asks: frozenset[str]
    makes: frozenset[str]
    called: dict[str, str]
    arguments: dict[str, tuple[str, ...]]
    renamed: dict[str, dict[str, str]]


@functools.cache
def read_calls() -> Calls:
    """Read the names of torch's functions, methods and arguments from `operations.toml`; cached."""
    return msgspec.convert(read_rules("operations")["calls"], Calls)


@functools.cache
def read_operations() -> Mapping[str, Operation]:
    """Return the operations of `operations.toml` by name; cached."""
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
    """Return the properties of an operation, also by an in-place name (`add_`).

    Return None if `operations.toml` lacks it.
    """
    table = read_operations()
    if name in table or not name.endswith("_") or name.startswith("__"):
        return table.get(name)
    return table.get(name.rstrip("_"))


def kind_of(name: str) -> str:
    """Return what an operation does to values, as `row_norm`; "" if `operations.toml` lacks the name.

    In-place names (`add_`) aren't in it.
    """
    found = read_operations().get(name)
    return found.kind if found else ""


@functools.cache
def list_with(trait: str) -> frozenset[str]:
    """Return the names of the ATen operations with a trait, such as `rearranges`."""
    return frozenset(name for name, row in read_operations().items() if trait in row.traits)


@functools.cache
def list_kinds(*kinds: str) -> frozenset[str]:
    """Return the names of the ATen operations of the given kinds, such as `row_norm`."""
    return frozenset(name for name, row in read_operations().items() if row.kind in kinds)


def keeps_clamps(class_name: str) -> bool:
    """Return whether clamps at fp16's maximum belong to models of a class and must be preserved."""
    return class_name.startswith(tuple(read_rules("operations")["kept_clamps"]))
