"""Inline the higher-order regions of an exported graph (checkpoints, autocast), so that passes see one
flat graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.utils import _pytree as pytree

_REGIONS = ("wrap", "tag_activation_checkpoint", "strict_mode")
"""Prefixes of the names of higher-order operators that run a single body unchanged, with the arguments
that follow it."""


def inline_regions(graph: GraphModule) -> GraphModule:
    """Return a graph in which higher-order operators such as checkpoints or autocast are replaced by
    their bodies.

    Bodies of other operators, such as the score function of `flex_attention`, remain submodules.
    """
    if not any(map(_is_region, graph.graph.nodes)):
        return graph
    flat = torch.fx.Graph(owning_module=graph)
    flat.output(_copy_nodes(graph, flat, {}))
    return _make_graph_module(graph, flat)


def _copy_nodes(source: GraphModule, flat: torch.fx.Graph, env: dict[Node, Any]) -> Any:
    """Append copies of a graph's nodes to `flat`, with regions inlined; return the copied output values.

    Args:
        env: maps nodes of `source` to their copies; initially those of the placeholders, if any are given.
    """
    for node in source.graph.nodes:
        if node in env or (_is_region_body(node) and all(map(_is_region, node.users))):
            continue
        if node.op == "output":
            return pytree.tree_map_only(Node, lambda x: env[x], node.args[0])
        if _is_region(node):
            env[node] = _copy_region(node, source, flat, env)
        elif _picks_from_region(node, env):
            env[node] = env[node.args[0]][node.args[1]]
        elif _is_region_body(node):
            name = f"body_{len(flat.nodes)}"
            assert flat.owning_module is not None  # `inline_regions` names it
            flat.owning_module.add_module(name, source.get_submodule(str(node.target)))
            env[node] = flat.get_attr(name)
        else:
            env[node] = flat.node_copy(node, lambda x: env[x])
    return None


def _copy_region(
    node: Node, source: GraphModule, flat: torch.fx.Graph, env: dict[Node, Any]
) -> Any:
    position = next(i for i, arg in enumerate(node.args) if _is_region_body(arg))
    body = source.get_submodule(str(node.args[position].target))  # type: ignore[union-attr]
    assert isinstance(body, GraphModule)
    operands = [env[x] if isinstance(x, Node) else x for x in node.args[position + 1 :]]
    holders = [n for n in body.graph.nodes if n.op == "placeholder"]
    return _copy_nodes(body, flat, dict(zip(holders, operands, strict=True)))


def _is_region(node: Node) -> bool:
    is_higher = isinstance(node.target, torch._ops.HigherOrderOperator)
    if not is_higher or not node.target.name().startswith(_REGIONS):  # type: ignore[union-attr]
        return False
    return any(_is_region_body(arg) for arg in node.args)


def _is_region_body(value: Any) -> bool:
    if not isinstance(value, Node) or value.op != "get_attr":
        return False
    owner = value.graph.owning_module
    return isinstance(getattr(owner, str(value.target), None), GraphModule)


def _picks_from_region(node: Node, env: dict[Node, Any]) -> bool:
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "getitem":
        return False
    return isinstance(env.get(node.args[0]), (tuple, list))  # type: ignore[arg-type]
