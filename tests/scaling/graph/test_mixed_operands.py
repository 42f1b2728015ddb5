"""Operations of a graph whose operands have different dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node

from stopdown.scaling.graph.capture import capture_call
from stopdown.scaling.graph.mixed_operands import find_mixed_norms, find_mixed_operands
from stopdown.scaling.graph.nodes import operation


@pytest.mark.parametrize(
    ("kind", "find"), [("linear", find_mixed_operands), ("layer_norm", find_mixed_norms)]
)
def test_operands_of_two_dtypes_are_found(kind: str, find: Callable[[Any], list[Node]]) -> None:
    """A product of fp32 by fp16, and a norm of fp32 with weights in fp16; nothing where all are fp16."""
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    graph = capture_call(module, (torch.ones(2, 4),), {}, dtype=torch.float16).graph
    assert find(graph) == []
    node = next(x for x in graph.graph.nodes if kind in operation(x))
    given = node.all_input_nodes[0]
    given.meta["val"] = given.meta["val"].float()
    assert find(graph) == [node]
