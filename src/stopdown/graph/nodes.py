"""Readers of a captured graph's nodes: operation, arguments, shape, and clamps at the end of fp16."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

LARGEST_TAME = 6e4
"""A bound or mask of at least this magnitude stands for the end of fp16's range."""

SPLITS = (
    "chunk",
    "split",
    "split_with_sizes",
    "unsafe_split",
    "unsafe_chunk",
    "unbind",
    "tensor_split",
)


def operation(node: Node) -> str:
    """Name of a node's operation without overload: `linear`, `add_`; "" when it is none of ATen."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def arguments(node: Node) -> dict[str, Any]:
    """A node's arguments by the names of the operation's schema, defaults included."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): arg for i, arg in enumerate(node.args)}
    bound = {arg.name: arg.default_value for arg in schema.arguments if arg.has_default_value()}
    bound.update(zip((arg.name for arg in schema.arguments), node.args, strict=False))
    return {**bound, **node.kwargs}


def shape_of(node: Any) -> tuple[int, ...]:
    """Shape of a tensor node, () for anything else; a size that depends on values stands as 0."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return tuple(map(whole_size, sizes))


def whole_size(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 0)


def is_float(node: Any) -> bool:
    """True when a node holds one floating or complex tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def strip_casts(node: Any) -> Any:
    """The value behind casts and operations that leave it as it is."""
    while operation(node) in ("to", "_to_copy", "dropout", "contiguous", "alias", "clone"):
        node = node.args[0]
    return node


def is_range_clamp(node: Node) -> bool:
    """True for a clamp whose bounds stand for the end of fp16's range."""
    if operation(node).rstrip("_") not in ("clamp", "clip"):
        return False
    given = arguments(node)
    sizes = [smallest_constant(given.get(name)) for name in ("min", "max")]
    return all(LARGEST_TAME <= size <= 65504 for size in sizes)


def smallest_constant(value: Any) -> float:
    """Smallest magnitude among the numbers that a value is made of; 0 when it depends on data."""
    if isinstance(value, (int, float)):
        return abs(float(value))
    if not isinstance(value, Node):
        return 0.0
    given = arguments(value)
    if operation(value) == "where":
        return min(smallest_constant(given["self"]), smallest_constant(given["other"]))
    if operation(value) in ("neg", "to", "alias", "clone", "detach_", "lift_fresh_copy", "expand"):
        return smallest_constant(given["self"])
    if operation(value) in ("full", "scalar_tensor"):
        return smallest_constant(given.get("fill_value", given.get("s")))
    return 0.0
