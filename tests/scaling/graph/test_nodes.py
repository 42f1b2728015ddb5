"""What is read of a captured graph's nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from stopdown.scaling.graph.capture import capture_call
from stopdown.scaling.graph.nodes import (
    arguments,
    has_trait,
    is_float,
    is_kind,
    is_range_clamp,
    list_mixed,
    operation,
    read_magnitude,
    read_order,
    shape_of,
    slice_bounds,
    strip_casts,
)

Code = Callable[[torch.Tensor], torch.Tensor]


class Coded(nn.Module):
    """Runs a function of one tensor `[2, 3, 4, 4]`."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code, self.layer = code, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(x)


def list_nodes(code: Code) -> list[Node]:
    """List the operations of a function in fp16, in their order."""
    captured = capture_call(Coded(code), (torch.ones(2, 3, 4, 4),), {}, dtype=torch.float16)
    return [node for node in captured.graph.graph.nodes if node.op == "call_function"]


def find(code: Code, name: str) -> Node:
    return next(node for node in list_nodes(code) if operation(node) == name)


def test_arguments_have_the_names_of_their_schema() -> None:
    """Defaults are among them, and numbers by place."""
    node = find(lambda x: torch.clamp(x, -2), "clamp")
    given = arguments(node)
    assert (given["min"], given["max"]) == (-2, None)
    assert given["self"] is node.args[0]
    assert operation(node.args[0]) == ""
    assert shape_of(node) == (2, 3, 4, 4)
    assert is_float(node)
    assert not is_float(2.0)


def test_kinds_are_those_of_the_table() -> None:
    """An in-place operation has no kind, and the traits of its plain form."""
    plain, written = find(lambda x: x.relu(), "relu"), find(lambda x: x.clone().mul_(2), "mul_")
    assert not is_kind(plain, "add")
    assert is_kind(find(lambda x: x + x, "add"), "add")
    assert not is_kind(written, "multiply")
    assert not is_kind("relu", "add")
    assert has_trait(find(lambda x: x.view(2, 48), "view"), "alias")


@pytest.mark.parametrize(
    ("code", "bounds"),
    [
        (lambda x: x[:, :, 1:3], (1, 3)),
        (lambda x: x[:, :, -3:-1], (1, 3)),
        (lambda x: x[:, :, 2:], (2, 4)),
        (lambda x: x[:, :, 1:100], (1, 4)),
    ],
    ids=["both", "from the end", "open", "beyond"],
)
def test_ends_of_slices_lie_within_the_tensor(code: Code, bounds: tuple[int, int]) -> None:
    """Negative ones count from the end, and those beyond it are clipped."""
    sliced = [x for x in list_nodes(code) if operation(x) == "slice" and arguments(x)["dim"] == 2]
    assert slice_bounds(sliced[0]) == bounds


@pytest.mark.parametrize(
    ("code", "name", "dims"),
    [
        (lambda x: F.avg_pool2d(x, 3, 1, 1), "avg_pool2d", [2, 3]),
        (lambda x: F.pad(x, (1, -1)), "constant_pad_nd", [3]),
        (lambda x: F.pad(x, (0, 0, 1, 1)), "constant_pad_nd", [2]),
    ],
    ids=["pooling", "moved", "padded"],
)
def test_dimensions_along_which_elements_move(code: Code, name: str, dims: list[int]) -> None:
    """Also those that keep their size."""
    nodes = [x for x in list_nodes(code) if operation(x) in (name, "pad")]
    assert list_mixed(nodes[0]) == dims


def test_the_order_of_a_permutation_is_read() -> None:
    """Of transposes as of permutations."""
    assert read_order(find(lambda x: x.permute(0, 2, 3, 1), "permute")) == [0, 2, 3, 1]
    assert read_order(find(lambda x: x.transpose(1, 3), "transpose")) == [0, 3, 2, 1]


def test_casts_are_looked_through() -> None:
    """To the value that was cast."""
    node = find(lambda x: (x * 2).float().half().relu(), "relu")
    assert operation(strip_casts(node.args[0])) == "mul"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (lambda x: x.clamp(-65504, 65504), True),
        (lambda x: x.clamp(-64504, 64504), True),
        (lambda x: x.clamp(-65504), False),
        (lambda x: x.clamp(-1, 1), False),
        (lambda x: x.nan_to_num(0.0, 65504, -65504), True),
        (lambda x: x.nan_to_num(), False),
    ],
    ids=["clamp", "T5's", "one end", "small", "nan_to_num", "without numbers"],
)
def test_clamps_at_the_maximum_are_known(code: Code, found: bool) -> None:
    """Both ends lie at fp16's maximum, or a little below."""
    node = next(x for x in list_nodes(code) if operation(x) in ("clamp", "nan_to_num"))
    assert is_range_clamp(node) is found


@pytest.mark.parametrize(
    ("code", "name", "number", "size"),
    [
        (lambda x: x * 3.0, "mul", 3.0, 3.0),
        (lambda x: x * -65504.0, "mul", -65504.0, 65504.0),
        (lambda x: x * (1 - (x > 0).half()) * -65504.0, "mul", -65504.0, 65504.0),
        (lambda x: (1 - (x > 0).half()) * -65504.0, "mul", -65504.0, 0.0),
        (lambda x: x.masked_fill(x > 0, -math.inf), "masked_fill", -math.inf, 0.0),
        (lambda x: x.masked_fill(x > 0, 2.0), "masked_fill", 2.0, 2.0),
        (lambda x: x + -65504.0, "add", -65504.0, 65504.0),
    ],
    ids=["small", "large", "of a value", "of a mask", "filled in", "a small fill", "added"],
)
def test_a_number_of_a_mask_does_not_count(
    code: Any, name: str, number: float, size: float
) -> None:
    """It hides a score; the same number that multiplies a value, or is added to one, counts."""
    nodes = [node for node in list_nodes(code) if operation(node) == name]
    assert read_magnitude(nodes[-1], number) == size
