"""The table of operations: its names exist in torch, and its rules are there."""

from __future__ import annotations

import torch

from stopdown.operations import find_operation, list_kinds, read_operations
from stopdown.scaling.bounds.propagation import RULES
from stopdown.scaling.exponents.exponent_rules import read_rule

OPERATIONS = read_operations()


def is_aten(name: str) -> bool:
    """Whether a captured graph can have an operation of this name."""
    return hasattr(torch.ops.aten, name) or name == "getitem"


def test_each_name_exists_in_torch() -> None:
    """A name that torch does not have stands for a rule that is never applied, without a word."""
    foreign = list_kinds("rotation", "rotations", "attention_kernel")  # other packages bring them
    assert [name for name in OPERATIONS if not is_aten(name)] == sorted(
        foreign, key=list(OPERATIONS).index
    )
    assert not is_aten("upsample_nearest_exact2d")  # as it is called elsewhere


def test_each_rule_is_there() -> None:
    """Each cell names a rule that exists, with the arguments that it takes."""
    for row in OPERATIONS.values():
        assert callable(read_rule(row.exponent)), row.name
        assert not row.bound or row.bound in RULES, row.name


def test_an_in_place_form_is_found() -> None:
    """`mul_` is what `mul` is; a dunder is no in-place form; what has a row of its own keeps it."""
    assert find_operation("mul_") is OPERATIONS["mul"]
    assert find_operation("__and__") is None
    assert find_operation("detach_") is OPERATIONS["detach_"]
