"""Write captured calls as rules for `stopdown_verify`, which checks a plan's bounds without this library.

Each captured graph of the plan becomes a list of rules. The checker derives each bound, the exponents
of each value and what is not covered by itself. Of the bounds computed here, the file has only
witnesses of singular values. An operation without a rule becomes `unknown`, and values computed from it
have no bound up to the next norm or saturating function.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

import stopdown_verify
from stopdown.fold_names import name_clamp, split_fold_name
from stopdown.mapped_weights import Load
from stopdown.operations import Operation, find_operation
from stopdown.scaling.bounds.evaluation import writes_in_place
from stopdown.scaling.bounds.input_limits import InputStatement, state_calls
from stopdown.scaling.bounds.known_values import BoundedOperation
from stopdown.scaling.bounds.propagation import find_aliases, find_cut
from stopdown.scaling.bounds.rules import find_written_norm, read_vector_norm
from stopdown.scaling.bounds.singular_values import MOST_WORK, bound_parts
from stopdown.scaling.exponents.problem import (
    CallStatement,
    MeasuredCall,
    Problem,
    find_eps,
    find_exits,
    find_interiors,
    is_read_inside,
    list_outputs,
    split_values,
)
from stopdown.scaling.graph.blocks import find_part, has_known_indices, is_part, split_bounds
from stopdown.scaling.graph.capture import Capture, module_path
from stopdown.scaling.graph.nodes import (
    arguments,
    has_kind,
    is_float,
    is_kind,
    is_range_clamp,
    is_split,
    list_mixed,
    operation,
    read_magnitude,
    read_order,
    shape_of,
    strip_casts,
)
from stopdown.scaling.graph.range_measurement import find_sentinels
from stopdown.scaling_records import Scaling

MOST_VALUES = 4096
"""Constants of the code with at most this many values are written to the file; of larger ones only the
largest magnitude."""

_DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_EXACT = (torch.float16, torch.float32, torch.float64)
"""Dtypes to which a weight may be cast without a rule: the checker allows for its rounding to fp16."""
_SAME = {
    "to": "cast",
    "_to_copy": "cast",
    "type_as": "cast",
    "tril": "triangle",
    "triu": "triangle",
}
_NAMED = ("silu", "gelu", "relu", "neg", "abs", "leaky_relu", "hardswish", "mish")


def export_graphs(
    module: torch.nn.Module,
    scaling: Scaling,
    captured: Sequence[tuple[Capture, tuple[Any, ...], Mapping[str, Any]]],
    tensors: Mapping[str, stopdown_verify.Weight],
    tied: Mapping[str, tuple[str, ...]],
    load: Load,
) -> dict[str, Any]:
    """Write captured calls of a module as rules for the checker `stopdown_verify`.

    Args:
        captured: captures of the calls, with their arguments.
        tensors: weights in files, by their names there.
        tied: maps each parameter to all names of its tensor.
        load: reads a parameter's values.

    Returns:
        `weights`: exponents of each tensor, and `graphs`: nodes and outputs of each call.
    """
    reading = _TensorReader(tensors, tied, load)
    graphs = []
    for (capture, args, kwargs), stated in zip(
        captured, state_calls(module, captured), strict=True
    ):
        measured = MeasuredCall(capture, split_values(capture), {}, args, kwargs)
        graphs.append(_Exporter(module, scaling, measured, stated, reading).export())
    return {"weights": {key: reading.describe(key, scaling) for key in tensors}, "graphs": graphs}


class _TensorReader:
    """Looks up the tensors of a checkpoint's files for a certificate: names, values and exponents."""

    def __init__(
        self,
        tensors: Mapping[str, stopdown_verify.Weight],
        tied: Mapping[str, tuple[str, ...]],
        load: Load,
    ) -> None:
        self.tensors, self._tied, self.load = tensors, tied, load

    def find(self, name: str) -> str | None:
        """Return the name under which the weight files have a parameter; None for a buffer that isn't
        in them.
        """
        return next((x for x in (name, *self._tied.get(name, ())) if x in self.tensors), None)

    def describe(self, key: str, scaling: Scaling) -> dict[str, Any]:
        """Return a stored tensor's certificate entry: the exponents of its rows and columns, and
        whether it stays fp32.

        Args:
            key: the tensor's name in the files.
        """
        names = {key, *self._tied.get(key, ())}
        folds = []
        shape = (*self.tensors[key].shape, 1, 1)
        for fold, exponent in scaling.exponents.items():
            bare, place = split_fold_name(fold)
            if bare in names:
                dim = len(place) - 1 if place else 0
                start, stop, _ = (place[-1] if place else slice(None)).indices(shape[dim])
                folds.append([dim, start, stop, exponent])
        wide = any(n.startswith(f"{p}.") for n in names for p in scaling.fp32_modules)
        return {"exponents": folds, "wide": wide}


class _Exporter:
    """Writes one captured call as a list of `stopdown_verify` rules, in the order of its graph."""

    def __init__(
        self, module: torch.nn.Module, scaling: Scaling, measured: MeasuredCall, stated: InputStatement,
        reading: _TensorReader,
    ) -> None:  # fmt: skip
        self.module, self.scaling, self.stated, self.reading = (
            module, scaling, stated, reading)  # fmt: skip
        self.capture: Capture = measured.capture
        self.nodes: list[dict[str, Any]] = []
        self.ids: dict[Node, str] = {}
        self.inner: dict[Node, str] = {}
        self._counts: dict[str, int] = {}
        self._folded: dict[Node, torch.Tensor | None] = {}
        stream = self.scaling.stream
        closed = frozenset(stream.cast_output_down if stream else ())
        (exits,) = find_exits([measured])
        self.statement = CallStatement(Problem(), module, measured, 0, exits, closed, ())
        self.aliases = find_aliases(self.capture.graph.graph)

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """Maps placeholder names of the call's tensors to the names of their arguments."""
        return dict(self.stated.inputs)

    def export(self) -> dict[str, Any]:
        graph = self.capture.graph.graph
        for node in graph.nodes:
            is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
            if node.op == "call_function" and is_tensor and self._fold(node) is None:
                self._visit(node)
        outputs = []
        for number, node in enumerate(list_outputs(graph.output_node())):
            if isinstance(node, Node) and is_float(node) and (found := self._ref(node)):
                outputs.append((found, int(self.scaling.outputs.get(number, 0))))
        self._drop_unused({name for name, _ in outputs})
        self._ask_lengths()
        return {
            "method": self.capture.method,
            "nodes": self.nodes,
            "outputs": [[*x] for x in outputs],
        }

    def _drop_unused(self, used: set[str]) -> None:
        """Remove integer results from which no floating one is computed, so that the file is smaller.

        Args:
            used: names of the outputs; names that other rules read are added.
        """
        kept = []
        for n in reversed(self.nodes):
            if n["dtype"] != "int" or n["id"] in used:
                used.update(n["from"])
                kept.append(n)
        self.nodes = kept[::-1]

    def _visit(self, node: Node) -> None:
        found = find_operation(operation(node))
        made = None if found is None else self._apply(node, found)
        if made is None:
            if not is_float(node):
                return
            made = self._unknown(node, found)
        self.ids[node] = self._add(node, made)
        path = self.statement.exits.get(node)
        if path is not None and (factor := self.scaling.multiplies.get(path, 0)):
            self.inner[node] = self.ids[node]
            scaled = {"rule": "scale", "from": [self.ids[node]], "by": factor}
            self.ids[node] = self._add(node, scaled)
        if writes_in_place(node):
            self._change_aliases(node)

    def _add(self, node: Node, made: dict[str, Any], shape: Any = None) -> str:
        """Append a checker's rule for a node, and return the name of its result; several rules of one
        node are numbered.

        Args:
            made: the rule with its arguments.
            shape: shape of the result; None for the node's.
        """
        shape = list(shape_of(node)) if shape is None else list(shape)
        same = self._counts[node.name] = self._counts.get(node.name, -1) + 1
        name = f"{node.name}.{same}" if same else node.name
        held = node.meta["val"].dtype
        dtype = _DTYPES.get(
            held, "int" if not (held.is_floating_point or held.is_complex) else "fp32"
        )
        wide = {*self.scaling.fp32_modules}.intersection(find_interiors(node))
        self.nodes.append({
            "id": name, "place": module_path(node), "from": [], **made, "shape": shape,
            "dtype": "fp32" if wide and dtype == "fp16" else dtype,
        })  # fmt: skip
        return name

    def _change_aliases(self, node: Node) -> None:
        """Update the certificate's names of all tensors whose memory a node has written in place.

        Such a name then refers to a new value, which is either the old or the written content.
        """
        root, new = self.aliases.get(node), self.ids[node]
        for other in [
            x for x, y in self.aliases.items() if y is root and x in self.ids and x is not node
        ]:
            part = new
            if shape_of(other) != shape_of(node) or find_cut(node, other) != set():
                rank, ranks = len(shape_of(node)), len(shape_of(other))
                made = {"rule": "mix", "from": [part], "dims": [*range(rank)], "of": "places"}
                made = {"rule": "view", "from": [self._add(other, made, [1] * rank)]}
                part = self._add(other, made, [1] * ranks)
            made = {"rule": "either", "from": [self.ids[other], part], "of": "choice"}
            self.ids[other] = self._add(other, made)

    # operands

    def _ref(self, value: Any, user: Node | None = None) -> str | None:
        """Return the name that a node's result has in the certificate, as its user reads it; None if it
        can't be exported.

        Inside a module whose output is multiplied, users read the result before that multiply.
        """
        if not isinstance(value, Node):
            return None
        if (
            value in self.inner
            and user is not None
            and user not in self.statement.casts
            and is_read_inside(user, value, self.statement.exits[value])
        ):
            return self.inner[value]
        if value not in self.ids:
            made = self._begin(value)
            if made is None:
                return None
            self.ids[value] = self._add(value, made)
        return self.ids[value]

    def _begin(self, node: Node) -> dict[str, Any] | None:
        """Return the checker's rule of an input, a constant or a parameter; None for integers without
        an assumed limit.
        """
        limits = self.stated.limits
        name = self.capture.parameters.get(node.name)
        if name is not None:
            held = self.reading.find(name)
            return self._state_known(self.reading.load(name), name) if held is None else {
                "rule": "weight", "weight": held}  # fmt: skip
        if (known := self._fold(node)) is not None:
            return self._state_known(known, f"a constant of {module_path(node) or 'the call'}")
        if node.name in limits.timesteps and len(limits.timesteps) == 1:
            steps = limits.timesteps[node.name]
            return {
                "rule": "times", "name": self.names[node.name], "radius": steps.radius,
                "first": float(steps.values[0]), "last": float(steps.values[-1]),
                "count": len(steps.values),
            }  # fmt: skip
        size = self.stated.find_size(node.name) if node.op == "placeholder" else math.inf
        if name := self.names.get(node.name):
            size = self.scaling.limits.get(f"{self.stated.method}.{name}", size)
        if node.meta["val"].dtype == torch.bool:
            size = 1.0
        if not math.isfinite(size):
            return None if not is_float(node) else {"rule": "unknown"}
        return {
            "rule": "input",
            "name": self.names.get(node.name) or node.name,
            "largest": size,
        }

    def _state_known(self, tensor: torch.Tensor, name: str) -> dict[str, Any]:
        values = tensor.detach().cpu()
        sentinels = find_sentinels(values)
        values = values.double() if not values.is_complex() else values.abs().double()
        if sentinels.numel():
            values = values.masked_fill(sentinels, 0.0)
        if values.numel() <= MOST_VALUES and not tensor.is_complex():
            return {"rule": "known", "name": name, "values": values.reshape(-1).tolist()}
        largest = float(values.abs().max()) if values.numel() else 0.0
        return {"rule": "input", "name": name, "largest": largest}

    def _fold(self, node: Node) -> torch.Tensor | None:
        """Compute the result of a node that depends on constants alone, to be written as a constant;
        else return None.
        """
        if node not in self._folded:
            self._folded[node] = None
            with contextlib.suppress(Exception):  # a failing operation is no constant
                self._folded[node] = self._compute(node)
        return self._folded[node]

    def _compute(self, node: Node) -> torch.Tensor | None:
        if node.op == "placeholder":
            held = self.capture.constants.get(node.name, self.stated.limits.fixed.get(node.name))
            if not isinstance(held, torch.Tensor) or node.name in self.aliases:
                return None
            there = held.detach().cpu()
            return there if not is_float(node) else there.to(node.meta["val"].dtype)
        if node.op != "call_function" or node in self.aliases or writes_in_place(node):
            return None
        known = {x: self._fold(x) for x in node.all_input_nodes}
        if any(x is None for x in known.values()) or is_kind(node, "random", "blank"):
            return None
        if math.prod(shape_of(node)) > 1 << 22:
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
        made = node.target(*args, **kwargs)  # type: ignore[operator]
        return made if isinstance(made, torch.Tensor) else None

    # operations

    def _apply(self, node: Node, found: Operation) -> dict[str, Any] | None:
        method = getattr(self, f"_export_{found.bound}", None) if found.bound else None
        if method is None and found.kind in _POWERS:
            twice = int(found.exponent.removeprefix("halves "))
            method = functools.partial(self._export_halves, twice)
        if method is None and found.kind == "vector_norm":
            method = self._export_vector_norm
        if math.prod(shape_of(node)) == 0 or method is None:
            return None
        try:
            made: dict[str, Any] = method(node, arguments(node))
            return made
        except _NoRule:
            return None

    def _need(self, value: Any, user: Node) -> str:
        found = self._ref(value, user)
        if found is None:
            raise _NoRule
        return found

    def _unknown(self, node: Node, found: Operation | None) -> dict[str, Any]:
        alike = found is not None and found.exponent in _ALIKE
        sources = [self._ref(x, node) for x in node.all_input_nodes if is_float(x)]
        return {"rule": "unknown", "function": operation(node), "alike": alike,
                "from": [x for x in sources if x is not None]}  # fmt: skip

    def _first(self, node: Node) -> str:
        return self._need(node.args[0], node)

    def _export_same(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        name = operation(node).rstrip("_")
        if abs(given.get("negative_slope") or 0) > 1 or given.get("train"):
            raise _NoRule
        function = _SAME.get(name, name if name in _NAMED else "copy")
        return {"rule": "same", "function": function, "from": [self._first(node)]}

    def _export_reshape(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        if "dtype" in given:  # the same bits read as another number
            raise _NoRule
        if shape_of(node) == shape_of(node.args[0]):
            return {"rule": "same", "function": "copy", "from": [self._first(node)]}
        return {"rule": "view", "from": [self._first(node)]}

    def _export_permute(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"rule": "order", "from": [self._first(node)], "order": read_order(node)}

    def _export_expand(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"rule": "spread", "from": [self._first(node)]}

    def _export_part(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checker's rule of a slice, or of one result of a split, along one dimension.

        Args:
            given: the node's arguments by name, here and in all `_export_*` methods.

        Raises:
            _NoRule: if the indices depend on data.
        """
        if not is_part(node) or not has_known_indices(node):
            raise _NoRule
        source, (start, stop), dim = find_part(node)
        before, step = shape_of(source), given.get("step", 1) or 1
        shape = [*before[:dim], len(range(start, stop, step)), *before[dim + 1 :]]
        made = {"rule": "part", "from": [self._need(source, node)], "dim": dim, "start": start,
                "stop": stop, "step": step}  # fmt: skip
        if tuple(shape) == shape_of(node):
            return made
        return {"rule": "view", "from": [self._add(node, made, shape)]}

    def _export_cat(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        parts = [x for x in given["tensors"] if math.prod(shape_of(x))]
        dim = int(given.get("dim", 0)) % len(shape_of(node))
        return {"rule": "join", "from": [self._need(x, node) for x in parts], "dim": dim}

    def _export_stack(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        shape = shape_of(node)
        dim = int(given.get("dim", 0)) % len(shape)
        kept = [*shape[:dim], 1, *shape[dim + 1 :]]
        names = [self._need(x, node) for x in given["tensors"]]
        parts = [self._add(node, {"rule": "view", "from": [x]}, kept) for x in names]
        return {"rule": "join", "from": parts, "dim": dim}

    def _mix(self, node: Node, last: bool = False) -> dict[str, Any]:
        """Return the checker's rule of a result that holds elements of the first input in any order, or
        means of them.

        Args:
            last: whether elements stay in their channel, the last dimension.
        """
        source, shape = node.args[0], shape_of(node)
        before, name, of = shape_of(source), self._first(node), "rows" if last else "places"
        if len(before) == len(shape):
            dims = [d for d in range(len(shape)) if not last or d < len(shape) - 1]
            return {"rule": "mix", "from": [name], "dims": dims, "of": of}
        width = before[-1] if last else 1
        rows, made = [math.prod(before) // width, width], [math.prod(shape) // width, width]
        name = self._add(node, {"rule": "view", "from": [name]}, rows)
        mixed = {"rule": "mix", "from": [name], "dims": [0], "of": of}
        return {"rule": "view", "from": [self._add(node, mixed, made)]}

    def _export_any(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return self._pad_each(node, given) if "sequences" in given else self._mix(node)

    def _pad_each(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checker's rule of `pad_sequence`: each sequence zero-padded to the longest, then
        stacked.

        Raises:
            _NoRule: if other numbers are padded, or the batch isn't the first dimension.
        """
        shape, parts = shape_of(node), []
        if not given.get("batch_first") or given.get("padding_value"):
            raise _NoRule
        for x in given["sequences"]:
            made = {"rule": "view", "from": [self._need(x, node)]}
            name = self._add(node, made, (1, *shape_of(x)))
            if shape_of(x)[0] != shape[1]:
                padded = {"rule": "mix", "from": [name], "dims": [1], "of": "rows"}
                name = self._add(node, padded, (1, *shape[1:]))
            parts.append(name)
        return {"rule": "join", "from": parts, "dim": 0}

    def _export_complex(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checker's rule of `view_as_complex`: the magnitude `sqrt(2 mean(x**2))` of each
        pair of numbers.
        """
        before = shape_of(node.args[0])
        made = {"rule": "power", "halves": 4, "from": [self._first(node)]}
        kept, last = (*before[:-1], 1), len(before) - 1
        made = {
            "rule": "mix",
            "from": [self._add(node, made, before)],
            "dims": [last],
            "of": "mean",
        }
        made = {"rule": "multiply", "from": [self._add(node, made, kept)], "number": 2}
        made = {"rule": "power", "halves": 1, "from": [self._add(node, made, kept)]}
        return {"rule": "view", "from": [self._add(node, made, kept)]}

    def _export_real(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checker's rule of `view_as_real`: each part is the complex number's magnitude
        times a cosine.
        """
        shape = shape_of(node)
        name = self._add(node, {"rule": "view", "from": [self._first(node)]}, (*shape[:-1], 1))
        turned = self._add(node, {"rule": "bounded", "function": "cos"}, shape)
        return {"rule": "multiply", "from": [name, turned]}

    def _export_tokens(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        before, shape = shape_of(node.args[0]), shape_of(node)
        indices = given.get("indices") or ()
        kept = len(indices) < len(before) and before[-1:] == shape[-1:]
        moved = "dim" in given and int(given["dim"]) % len(before) == len(before) - 1
        return self._mix(node, last=kept and not moved and bool(shape))

    def _export_places(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        if given.get("divisor_override"):
            raise _NoRule
        return self._mix_changed(node)

    def _mix_changed(self, node: Node) -> dict[str, Any]:
        before, shape = shape_of(node.args[0]), shape_of(node)
        if len(before) != len(shape):
            return self._mix(node)
        if not (dims := list_mixed(node)):
            return {"rule": "same", "function": "copy", "from": [self._first(node)]}
        return {"rule": "mix", "from": [self._first(node)], "dims": dims, "of": "rows"}

    def _export_repeat(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        before, shape = shape_of(node.args[0]), shape_of(node)
        if len(shape) <= len(before):
            if isinstance(given.get("repeats"), Node):
                return self._mix(node)
            made = self._mix_changed(node)
            return {**made, "of": "repeats"} if made["rule"] == "mix" else made
        padded = [*(1,) * (len(shape) - len(before)), *before]
        name = self._add(node, {"rule": "view", "from": [self._first(node)]}, padded)
        dims = [d for d in range(len(shape)) if padded[d] != shape[d]]
        if not dims:
            return {"rule": "same", "function": "copy", "from": [name]}
        return {"rule": "mix", "from": [name], "dims": dims, "of": "repeats"}

    def _export_pad(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        if given.get("value"):
            raise _NoRule
        return self._mix_changed(node)

    def _export_mean(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        before, dim = shape_of(node.args[0]), given.get("dim")
        dims = [int(d) % len(before) for d in ([dim] if isinstance(dim, int) else dim or ())]
        dims = dims or [*range(len(before))]
        kept = [1 if d in dims else size for d, size in enumerate(before)]
        made = {"rule": "mix", "from": [self._first(node)], "dims": dims, "of": "mean"}
        if tuple(kept) == shape_of(node):
            return made
        return {"rule": "view", "from": [self._add(node, made, kept)]}

    def _export_choose(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        names = [given.get(key) for key in ("self", "other", "value", "source")]
        numbers = [read_magnitude(node, x) for x in names if isinstance(x, (int, float))]
        found = [self._need(x, node) for x in names if isinstance(x, Node)]
        made = {"rule": "either", "from": found, "of": "choice"}
        number = max(numbers, default=0.0)
        if not made["from"]:
            return self._filled(number)
        return {**made, "number": number} if number else made

    def _export_add(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        first, other = given["self"], given["other"]
        factor = float(given.get("alpha", 1)) * (-1 if has_kind(node, "subtract") else 1)
        if isinstance(other, Node) and isinstance(first, Node):
            pair = [self._need(x, node) for x in (first, other)]
            return {"rule": "add", "from": pair, **({} if factor == 1 else {"factor": factor})}
        number = float(other) * factor
        made = {"rule": "add", "from": [self._need(first, node)]}
        return {**made, "number": number, **self._number_exponent(node, other)}

    def _number_exponent(self, node: Node, number: Any) -> dict[str, int]:
        if not isinstance(number, float):
            return {}
        path = module_path(node)
        found = find_eps(self.module, path, number) or (path, name_clamp(number))
        exponent = self.scaling.eps.get(".".join(filter(None, found)), 0)
        return {"number_exponent": exponent} if exponent else {}

    def _export_subtract_from(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        number = given["other"]
        if not isinstance(number, (int, float)) or given.get("alpha", 1) != 1:
            raise _NoRule
        turned = {"rule": "same", "function": "neg", "from": [self._first(node)]}
        return {"rule": "add", "from": [self._add(node, turned)], "number": float(number)}

    def _export_multiply(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        first, other = given["self"], given["other"]
        if not isinstance(first, Node):
            first, other = other, first
        if not isinstance(other, Node):
            number = float(other) if read_magnitude(node, other) else 0.0
            return {"rule": "multiply", "from": [self._need(first, node)], "number": number}
        if find_written_norm(BoundedOperation(node, None)) is not None:  # type: ignore[arg-type]
            pair = (
                (first, other) if is_kind(strip_casts(other), "rsqrt", "power") else (other, first)
            )
            return {"rule": "unit", "from": [self._need(x, node) for x in pair]}
        if first is other:
            return {"rule": "power", "halves": 4, "from": [self._need(first, node)]}
        return {"rule": "multiply", "from": [self._need(x, node) for x in (first, other)]}

    def _export_divide(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        number = given["other"]
        if find_written_norm(BoundedOperation(node, None)) is not None:  # type: ignore[arg-type]
            made = {"rule": "power", "halves": -2, "from": [self._need(number, node)]}
            below = self._add(node, made, shape_of(number))
            return {"rule": "unit", "from": [self._first(node), below]}
        if (
            not isinstance(number, (int, float))
            or given.get("rounding_mode") is not None
            or not number
        ):
            raise _NoRule
        return {"rule": "multiply", "from": [self._first(node)], "number": 1 / float(number)}

    def _export_power(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        exponent = given.get("exponent")
        if not isinstance(exponent, (int, float)) or exponent * 2 != int(exponent * 2):
            raise _NoRule
        return {"rule": "power", "halves": int(exponent * 2), "from": [self._first(node)]}

    def _export_vector_norm(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checker's rule of a 2-norm: the root of a sum of squares, without fp16 intermediates.

        Raises:
            _NoRule: for other norms, and for a result in fp16.
        """
        found = read_vector_norm(node)
        if found is None or node.meta["val"].dtype == torch.float16:
            raise _NoRule
        source, dims, _ = found
        before = shape_of(source)
        kept = [1 if d in dims else size for d, size in enumerate(before)]
        made = {"rule": "power", "halves": 4, "from": [self._first(node)]}
        made = {"rule": "mix", "from": [self._add(node, made, before)], "dims": dims, "of": "mean"}
        count = math.prod(before[d] for d in dims)
        made = {"rule": "multiply", "from": [self._add(node, made, kept)], "number": count}
        return {"rule": "power", "halves": 1, "from": [self._add(node, made)]}

    def _export_exponential(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"rule": "exp", "from": [self._first(node)]}

    def _export_halves(self, halves: int, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checker's rule of a square, root or reciprocal: `x ** (halves / 2)`."""
        return {"rule": "power", "halves": halves, "from": [self._first(node)]}

    def _export_shrink(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        name = operation(node).rstrip("_")
        return {"rule": "bounded", "function": name, "from": [self._first(node)]}

    _export_saturate = _export_shrink

    def _export_softmax(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        dim = int(given["dim"]) % len(shape_of(node))
        return {"rule": "bounded", "function": "softmax", "from": [self._first(node)], "dim": dim}

    def _export_clamp(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        numbers = [given.get(key) for key in ("min", "max")]
        if is_range_clamp(node):
            return {"rule": "same", "function": "range_clamp", "from": [self._first(node)]}
        if numbers == [0, None]:
            return {"rule": "same", "function": "relu", "from": [self._first(node)]}
        if not all(isinstance(x, (int, float)) for x in numbers):
            number = next((x for x in numbers if x is not None), None)
            if not isinstance(number, (int, float)) or None not in numbers:
                raise _NoRule
            of = "larger" if number == given.get("min") and number > 0 else "choice"
            made = {
                "rule": "either",
                "from": [self._first(node)],
                "of": of,
                "number": abs(float(number)),
            }
            return {**made, **self._number_exponent(node, number)}
        least, most = map(float, numbers)  # type: ignore[arg-type]
        return {"rule": "bounded", "function": "limit" if least <= 0 <= most else "clamp",
                "from": [self._first(node)], "number": max(abs(least), abs(most))}  # fmt: skip

    def _filled(self, number: float) -> dict[str, Any]:
        return {"rule": "bounded", "function": "filled", "number": abs(number)}

    def _export_zeros(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return self._filled(0.0)

    def _export_ones(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return self._filled(1.0)

    def _export_fill(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        number = next(given[x] for x in ("fill_value", "value", "s") if x in given)
        if not isinstance(number, Node):
            return self._filled(read_magnitude(node, number))
        if not isinstance(number.meta.get("val"), torch.Tensor):  # a size that depends on data
            raise _NoRule
        return {"rule": "spread", "from": [self._need(number, node)]}

    def _export_copied(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        name = self._need(node.args[1], node)
        if shape_of(node.args[1]) != shape_of(node):
            return {"rule": "spread", "from": [name]}
        return {"rule": "same", "function": "cast", "from": [name]}

    # rules that read weights

    def _weigh(self, given: Mapping[str, Any], *keys: str) -> dict[str, Any]:
        """Return the entries of a checker's rule for the weights that an operation reads: names in the
        files, rows used.

        Args:
            keys: names of the operation's arguments, such as `"weight"`.

        Raises:
            _NoRule: if an argument isn't stored in a file.
        """
        made: dict[str, Any] = {}
        for key in keys:
            value = given.get(key)
            if value is None:
                continue
            part = None
            if (
                is_kind(value, "part")
                and is_split(value.args[0])
                and split_bounds(value.args[0])[0] == 0
            ):
                bounds, number = split_bounds(value.args[0])[1], int(value.args[1])
                part, value = bounds[number : number + 2], value.args[0].args[0]
            while is_kind(value, "identity", "cast") and value.meta["val"].dtype in _EXACT:
                value = value.args[0]
            name = self.capture.parameters.get(value.name) if isinstance(value, Node) else None
            held = None if name is None else self.reading.find(name)
            if held is None or made.get("part", part) != part:
                raise _NoRule
            made[key] = held
            if part is not None:
                made["part"] = list(part)
        return made

    def _export_linear(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"rule": "product", "from": [self._need(given["input"], node)],
                **self._weigh(given, "weight", "bias")}  # fmt: skip

    def _export_convolve(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"rule": "product", "from": [self._need(given["input"], node)],
                "groups": int(given.get("groups", 1)), **self._weigh(given, "weight", "bias")}  # fmt: skip

    def _export_embedding(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"rule": "lookup", **self._weigh(given, "weight")}

    def _export_normalise(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return self._norm(node, given, inner=len(given["normalized_shape"]))

    def _export_normalise_groups(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return self._norm(node, given, groups=int(given["num_groups"]))

    def _norm(self, node: Node, given: Mapping[str, Any], **size: int) -> dict[str, Any]:
        eps = self._number_exponent(node, given.get("eps")).get("number_exponent", 0)
        return {"rule": "norm", "from": [self._need(given["input"], node)], **size,
                **self._weigh(given, "weight", "bias"), "eps": eps}  # fmt: skip

    def _export_matmul(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        pair = given["self"], given.get("mat2", given.get("other"))
        if min(len(shape_of(x)) for x in pair) < 2:
            raise _NoRule
        return {"rule": "matmul", "from": [self._need(x, node) for x in pair]}

    def _export_einsum(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checker's rule of an einsum that only permutes the dimensions of one operand.

        Raises:
            _NoRule: for other einsums.
        """
        letters, _, kept = str(given["equation"]).replace(" ", "").partition("->")
        if len(set(letters)) < len(letters) or sorted(letters) != sorted(kept):
            raise _NoRule
        (source,) = given["tensors"]
        order = [letters.index(x) for x in kept]
        return {"rule": "order", "from": [self._need(source, node)], "order": order}

    def _export_attention(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        if given.get("dropout_p"):
            raise _NoRule
        names = [self._need(given[key], node) for key in ("query", "key", "value")]
        mask = given.get("attn_mask")
        found = self._ref(mask, node) if is_float(mask) else None
        return {"rule": "attention", "from": [*names, *([found] if found else [])]}

    def _ask_lengths(self) -> None:
        """Add evidence of a weight's largest singular value to linears whose results reach another linear.

        With it the checker bounds the 2-norm of rows, which makes the second linear's bound tighter.
        """
        users: dict[str, list[dict[str, Any]]] = {}
        for n in self.nodes:
            for name in n["from"]:
                users.setdefault(name, []).append(n)

        def reaches(name: str, depth: int = 12) -> bool:
            found = users.get(name, ())
            return depth > 0 and any(
                n["rule"] == "product" or (n["rule"] in _PASSING and reaches(n["id"], depth - 1))
                for n in found
            )

        for n in self.nodes:
            if n["rule"] == "product" and "groups" not in n and reaches(n["id"]):
                self._witness(n)

    def _witness(self, n: dict[str, Any]) -> None:
        weight = self.reading.tensors[n["weight"]]
        if len(weight.shape) != 2:
            return
        work = math.prod(weight.shape) * min(weight.shape)
        small = work <= 1 << 31
        if not small and (work > MOST_WORK or weight.shape[0] < 2 * weight.shape[1]):
            return
        n["sigma"] = _find_squares(
            self.reading, n["weight"], tuple(n.get("part", (0, weight.shape[0])))
        )


@functools.lru_cache(maxsize=256)
def _find_squares(reading: _TensorReader, name: str, part: tuple[int, int]) -> list[list[int]]:
    tensor = reading.load(name)[part[0] : part[1]]
    return [stopdown_verify.write_number(x * 1.002) for x in bound_parts(tensor)]


class _NoRule(Exception):
    """Raised by an `_export_*` method if the checker has no rule for an operation, so that it becomes
    `unknown`.
    """


_POWERS = ("square", "sqrt", "rsqrt", "reciprocal")
_ALIKE = ("same", "alike", "cast", "add", "choose", "scatter", "length")
"""Rules of exponents by which a result is scaled as all of its inputs are."""
_PASSING = ("same", "multiply", "scale", "part", "add")
