"""Read an fx node of a captured graph: its operation's name and kind, arguments, shape, slices and
constants.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import torch
from torch.fx import Node

from stopdown.number_formats import FP16, NEAR_FP16_END
from stopdown.operations import find_operation, kind_of


def operation(node: Node) -> str:
    """Return the name of a node's operation without overload, such as `linear` or `add_`.

    It is "" for a node that calls no function.
    """
    return _name_target(node.target) if node.op == "call_function" else ""


@functools.cache
def _name_target(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return getattr(target, "__name__", "")


def is_kind(node: Any, *kinds: str) -> bool:
    """Return whether a value is a node whose operation is of one of these kinds, such as `"linear"` or
    `"cast"`.

    `operations` lists the kinds. In-place operations have none.
    """
    return isinstance(node, Node) and kind_of(operation(node)) in kinds


def has_kind(node: Any, kind: str) -> bool:
    """Return whether a value is a node of a kind, as `is_kind` does, or its in-place form, such as
    `div_`.
    """
    found = find_operation(operation(node)) if isinstance(node, Node) else None
    return found is not None and found.kind == kind


def has_trait(node: Any, trait: str) -> bool:
    """Return whether a node's operation has a trait in the table of operations: `"alias"` if it returns
    a view.

    An in-place operation has the traits of its own row in the table or, without one, of its plain form.
    """
    found = find_operation(operation(node)) if isinstance(node, Node) else None
    return found is not None and trait in found.traits


def find_slope(node: Node) -> float | None:
    """Return the Lipschitz constant of a node's elementwise function, such as 1 for ReLU; None if it
    has none.
    """
    found = find_operation(operation(node))
    return None if found is None else found.slope


def arguments(node: Node) -> dict[str, Any]:
    """Return a node's arguments by the names in its operation's schema, with omitted ones at their
    defaults.

    Without a schema, positional arguments are named "0", "1" and so on.
    """
    known = _read_schema(node.target)
    if known is None:
        return {str(i): arg for i, arg in enumerate(node.args)}
    names, defaults = known
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


@functools.cache
def _read_schema(target: Any) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """Return the names of an operation's arguments, and the defaults by name; None without a schema."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    given = schema.arguments
    return tuple(x.name for x in given), {
        x.name: x.default_value for x in given if x.has_default_value()
    }


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a tensor node, () for other values; a size that depends on data is 0."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return tuple(map(whole_size, sizes))


def has_known_size(node: Any) -> bool:
    """Return whether no size of a tensor node depends on data."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return all(isinstance(x, int) or x.node.hint is not None for x in sizes)


def whole_size(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 0)


def is_float(node: Any) -> bool:
    """Return whether a node holds one floating or complex tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    return value.dtype.is_floating_point or value.dtype.is_complex


def is_split(node: Any) -> bool:
    """Return whether a node returns a list of parts of a tensor, as split, chunk and unbind do."""
    return is_kind(node, "split", "unbind")


def slice_bounds(node: Node) -> tuple[int, int] | None:
    """Return the first index and the end of a slice along its dimension; None if they depend on data."""
    given, shape = arguments(node), shape_of(node.args[0])
    size = shape[int(given.get("dim", 0)) % max(len(shape), 1)]
    start, stop = given.get("start") or 0, given.get("end")
    length = given.get("length", 0)
    if not all(isinstance(x, int | None) for x in (start, stop, length)):
        return None
    start = _clip(start, size)
    if length:
        return start, start + length
    return start, size if stop is None else _clip(stop, size)


def _clip(index: int, size: int) -> int:
    return min(max(index + size if index < 0 else index, 0), size)


def list_mixed(node: Node) -> list[int]:
    """Return the dimensions along which a result combines, moves or repeats elements of its input.

    It is for pooling, upsampling, padding and repetition, with an input of the result's rank. Such a
    dimension may keep its size: pooling with a stride of 1 computes means of neighbours, and padding by
    (1, -1) moves every element.
    """
    given, shape = arguments(node), shape_of(node)
    rank = len(shape)
    mixed = {d for d, size in enumerate(shape_of(node.args[0])) if size != shape[d]}
    if places := re.search(r"([123])d(?![a-z])", operation(node)):
        mixed |= {*range(rank - int(places[1]), rank)}
    widths = given.get("pad") or ()
    mixed |= {rank - 1 - i // 2 for i, width in enumerate(widths) if width}
    if isinstance(given.get("repeats"), Node):
        mixed |= {*range(rank)}
    return sorted(mixed)


def read_order(node: Node) -> list[int]:
    """Return, for each dimension of a permutation's result, the number of the input's dimension."""
    coded = torch.empty(tuple(range(2, 2 + len(shape_of(node.args[0])))), device="meta")
    return [size - 2 for size in node.target(coded, *node.args[1:], **node.kwargs).shape]  # type: ignore[operator]


def strip_casts(node: Any) -> Any:
    """Follow a node back through casts and identity operations to the node that computed the value.

    A dropout in training isn't an identity.
    """
    while is_kind(node, "identity", "cast") and not arguments(node).get("train"):
        node = node.args[0]
    return node


def list_casts(node: Any) -> list[torch.dtype]:
    """Return the dtypes of the casts that `strip_casts` passes, also of those that change nothing."""
    first, found = strip_casts(node), []
    while node is not first:
        found += [node.meta["val"].dtype] if is_kind(node, "cast") else []
        node = node.args[0]
    return found


def is_range_clamp(node: Node) -> bool:
    """Return whether a node clamps values to fp16's range of ±65504, as models do against overflow.

    A `nan_to_num` that replaces infinities by these numbers counts as well.
    """
    found = find_operation(operation(node))
    if found is None or found.kind not in ("clamp", "nan_to_num"):
        return False
    given = arguments(node)
    names = ("min", "max") if found.kind == "clamp" else ("neginf", "posinf")
    sizes = [smallest_constant(given.get(name)) for name in names]
    return all(NEAR_FP16_END <= size <= FP16.largest for size in sizes)


_FILLING = ("choice", "fill", "filled", "padding", "constant", "index_put", "scatter")
_MOVING = (
    *("cast", "identity", "reshape", "expansion", "permutation", "slice", "select"),
    *("repetition", "index", "subtract", "subtract_from"),
)


def read_magnitude(node: Node, number: float) -> float:
    """Return the magnitude of a constant argument; 0 for a mask's fill value, such as -65504 or -inf.

    A fill value hides elements, so it must not count as the size of an activation. It is near or beyond
    fp16's maximum and is written into a tensor, or multiplies a mask, as in `(1 - mask) *
    torch.finfo(dtype).min`. A number that multiplies any other tensor isn't a fill value.
    """
    size = abs(float(number))
    found = find_operation(operation(node))
    if size < NEAR_FP16_END or found is None:
        return size
    if found.kind == "multiply":
        return 0.0 if any(map(_is_mask, node.all_input_nodes)) else size
    hides = number < 0 or math.isinf(size) or size <= FP16.largest
    return 0.0 if hides and found.kind in _FILLING else size


def _is_mask(node: Node) -> bool:
    """Return whether a value is computed from booleans or integers alone, as `1 - mask` is."""
    while is_kind(node, *_MOVING) and len(node.all_input_nodes) == 1 and is_float(node):
        (node,) = node.all_input_nodes
    return not is_float(node)


def smallest_constant(value: Any) -> float:
    """Return the smallest magnitude that a number, or a node built from constants, can have; 0 if it
    depends on data.

    A node may combine constants by `where`, `sign`, `full`, casts and expansion.
    """
    if isinstance(value, (int, float)):
        return abs(float(value))
    if not isinstance(value, Node):
        return 0.0
    given = arguments(value)
    if is_kind(value, "choice"):
        other = given.get("other", given.get("value"))
        return min(smallest_constant(given["self"]), smallest_constant(other))
    if is_kind(value, "sign", "identity", "cast", "expansion"):
        return smallest_constant(given["self"])
    if is_kind(value, "filled"):
        return smallest_constant(given.get("fill_value", given.get("s")))
    return 0.0
