"""Search a captured graph for operations whose operands differ in dtype, which a real run would refuse."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from stopdown.operations import CONVOLUTIONS, NORMS
from stopdown.scaling.graph.nodes import is_kind

ONE_DTYPE = ("linear", *CONVOLUTIONS, "matrix")


def find_mixed_operands(graph: GraphModule, *kinds: str) -> list[Node]:
    """Return the nodes whose floating operands differ in dtype, so that a cast can be inserted.

    Tracing accepts them (measured for linear, 2026-11-21), although a real run raises an error.

    Args:
        kinds: kinds of operations to examine, such as `"linear"`; by default matrix products and
            convolutions.
    """
    return [
        node
        for node in graph.graph.nodes
        if is_kind(node, *(kinds or ONE_DTYPE)) and len(set(_float_dtypes(node))) > 1
    ]


def find_mixed_norms(graph: GraphModule) -> list[Node]:
    """Return the norms whose input has a wider dtype than their weights, which some kernels refuse."""
    return [
        node
        for node in graph.graph.nodes
        if is_kind(node, *NORMS) and len(_float_dtypes(node)) > 1
        if _float_dtypes(node)[0].itemsize > min(x.itemsize for x in _float_dtypes(node)[1:])
    ]


def _float_dtypes(node: Node) -> list[torch.dtype]:
    values = [x.meta.get("val") for x in node.all_input_nodes]
    return [x.dtype for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()]
