"""State which powers of two could scale a module's tensors for some calls: unknowns, equations and limits.

The solver receives this and no tensor. Several calls of a module (other lengths, other resolutions, encode
and decode) are one problem. Each call has its own activations; the parameters and eps are the same unknowns
in all calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from stopdown import numerics
from stopdown.component_call_names import is_inside
from stopdown.fold_names import name_block, name_clamp, split_fold_name
from stopdown.module_calls.mixed_dtypes import NO_OPERANDS, merge_operands
from stopdown.number_formats import NEAR_FP16_END
from stopdown.operations import PRODUCTS, keeps_clamps
from stopdown.scaling.exponents.exponent_rules import PlacedOperation, state_equations
from stopdown.scaling.exponents.linear_system import ZERO, System
from stopdown.scaling.graph.blocks import Blocks, find_blocks, find_part, is_part, list_joined
from stopdown.scaling.graph.capture import PREFIX, Capture, module_classes, module_path
from stopdown.scaling.graph.nodes import (
    arguments,
    is_float,
    is_kind,
    is_range_clamp,
    operation,
    shape_of,
)
from stopdown.scaling.graph.range_measurement import Range, Ranges, find_saturating, log2_of
from stopdown.scaling_records import Operands, ResidualStream

SMALLEST_BITS = -22.0
"""log2 of the least scaled argument of a root or reciprocal: fp16 ends at 2**-24."""

VANISHING_BITS = -22
"""log2 of a size that has two significant bits in fp16, or fewer: the largest value of a parameter
after scaling, or an activation of size 1 as it is computed."""

_CALLS = "stopdown_module_calls"
"""Key of a node's `meta` under which the module calls around it are cached, as every problem of a graph
needs them."""


@dataclass(frozen=True)
class MeasuredCall:
    """One captured call with the magnitudes of its activations and weights.

    Attributes:
        blocks: tensors that have several exponents, and the blocks that they are split into.
        ranges: maps each node name to the magnitudes of the result's blocks.
        args, kwargs: arguments of the captured call, if they are needed later.
    """

    capture: Capture
    blocks: Mapping[Node, Blocks]
    ranges: Ranges
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def call(self) -> tuple[Capture, tuple[Any, ...], Mapping[str, Any]]:
        """The capture with the arguments of the call."""
        return self.capture, self.args, self.kwargs

    @property
    def seen(self) -> dict[str, float]:
        """Maps the placeholder name of each input to its largest measured magnitude."""
        inputs = [name for name in self.capture.inputs if name in self.ranges]
        return {name: max(part.amax for part in self.ranges[name]) for name in inputs}


@dataclass(frozen=True)
class Limit:
    """An upper limit that one activation or parameter (or block of it) must stay below once it is scaled.

    Attributes:
        unknown: its unknown exponent.
        range: its measured or bounded magnitudes.
        dtype: dtype that it must fit into.
        place: `component:dotted.path (operation)`, or a parameter's name.
        weight: 0 for an activation; for a parameter the factor on the price of its fold.
        interiors: modules that the activation does not leave, outermost first. If one of these stays in
            fp32, there is no limit.
        source: number of the call, name of the node and number of the block.
    """

    unknown: int
    range: Range
    dtype: torch.dtype
    place: str
    weight: float = 0.0
    interiors: tuple[str, ...] = ()
    source: tuple[int, str, int] = (0, "", 0)


@dataclass
class CallFacts:
    """Facts about a problem's calls, beside equations and limits, that describing a solution needs.

    Attributes:
        pinned: maps each operation without a rule to the places where it is called.
        flops: maps each module path to the share of the calls' matmul FLOPs done inside it.
        layers: maps the module path of a product with a weight, `path[0:64]` for a block of its
            outputs, `path[:,0:64]` of its inputs, to the unknowns of its input and output in each of
            its calls.
        kept_buffers: buffers that every call was captured with in their own dtype.
        operands: casts and fp32 modules that the captures needed because their code mixes dtypes.
        guests: maps each module path to parameters that belong to other modules by name but are only
            used inside it.
    """

    pinned: dict[str, list[str]] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    layers: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    kept_buffers: frozenset[str] = frozenset()
    operands: Operands = NO_OPERANDS
    guests: dict[str, frozenset[str]] = field(default_factory=dict)


@dataclass
class Problem:
    """Unknown exponents with their equations and limits: the input of the solver.

    Attributes:
        system: unknowns and equations.
        limits: values and parameters that must stay in range.
        parameters: maps a name, `name[0:64]` for a block of rows, `name[:,0:64]` of columns, to the
            unknown.
        eps: maps (module path, attribute or name of a clamp) to the unknown.
        clamps: maps (module path, number that its code clamps from below) to the unknown.
        multiplies: maps each module path to the unknown by which its output is multiplied.
        floors: (unknown, smallest allowed exponent, modules that, in fp32, lift this limit).
        widened: module paths whose output is fp32, so that multiplying it costs no precision.
        outputs: maps the number of an output to its unknown; the output is divided by that power after
            the call.
        inputs: maps the number of an argument that may be multiplied before the call, to its unknown.
        apart: the system before unknowns of modules that are alike were merged; None if none were.
        facts: what else was collected about the calls.
    """

    system: System = field(default_factory=System)
    limits: list[Limit] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    eps: dict[tuple[str, str], int] = field(default_factory=dict)
    clamps: dict[tuple[str, float], int] = field(default_factory=dict)
    multiplies: dict[str, int] = field(default_factory=dict)
    floors: list[tuple[int, float, tuple[str, ...]]] = field(default_factory=list)
    widened: frozenset[str] = frozenset()
    outputs: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    apart: System | None = None
    facts: CallFacts = field(default_factory=CallFacts)

    def list_fp16_limits(self, fp32_modules: Collection[str]) -> list[Limit]:
        """List the limits of tensors that are in fp16 if these modules stay in fp32."""
        wide = {*fp32_modules}
        return [x for x in self.limits if x.dtype == torch.float16 and not wide & {*x.interiors}]


def split_values(capture: Capture) -> dict[Node, Blocks]:
    """Map each tensor of a capture that can have several scale exponents to its blocks of channels."""
    return find_blocks(capture.graph.graph, capture.parameters)


def list_outputs(node: Node) -> list[Any]:
    """List the leaves of a graph's output node (nodes, numbers or None), in the order of the flattened
    output.
    """
    leaves: list[Any] = pytree.tree_leaves(node.args[0])
    return leaves


def find_wide_outputs(calls: Sequence[MeasuredCall]) -> frozenset[int]:
    """Return the indices of fp16 outputs of `forward` whose values exceed fp16, and so must be returned
    in fp32.
    """
    if any(call.capture.method for call in calls):
        return frozenset()
    return frozenset(
        number
        for call in calls
        for number, node in enumerate(list_outputs(call.capture.graph.graph.output_node()))
        if number < call.capture.outputs
        and is_float(node)
        and node.meta["val"].dtype == torch.float16
        and any(part.amax >= NEAR_FP16_END for part in call.ranges.get(node.name, ()))
    )


def find_kept_clamps(capture: Capture) -> frozenset[Node]:
    """Return the clamps at fp16's maximum that belong to the model, so that their effect must be kept.

    Others are only guards against overflow.
    """
    return frozenset(
        node
        for node in capture.graph.graph.nodes
        if is_range_clamp(node) and _is_kept(node, capture)
    )


def _is_kept(node: Node, capture: Capture) -> bool:
    return capture.keeps_clamps or any(
        map(keeps_clamps, (capture.component, *module_classes(node)))
    )


def state_problem(
    module: torch.nn.Module,
    calls: Sequence[MeasuredCall],
    *,
    multiplies: bool = False,
    stream: ResidualStream | None = None,
    wide_outputs: frozenset[int] = frozenset(),
    narrow: Collection[str] = (),
    has_free_ends: bool = False,
) -> Problem:
    """State the problem of scaling a module for the given calls: unknown exponents, equations and limits.

    Args:
        multiplies: allow an explicit multiply at the output of each module.
        stream: residual stream in fp32 of the captured calls. At the outputs that it casts, a multiply
            is always allowed.
        wide_outputs: indices of outputs that the module may return in fp32, each with an exponent.
        narrow: classes of modules inside which fp32 activations must fit in fp16 as well.
        has_free_ends: for a single call, give each floating argument and output an exponent.
    """
    kept = [call.capture.kept_buffers for call in calls]
    facts = CallFacts(
        kept_buffers=frozenset.intersection(*kept) if kept else frozenset(),
        operands=merge_operands(*(call.capture.operands for call in calls)),
        guests=_find_guests(module, calls),
    )
    problem = Problem(facts=facts)
    casts = stream or ResidualStream((), ())
    closed = frozenset(casts.cast_output_down)  # these cast to fp16 after the multiply
    problem.widened = closed.union(casts.cast_output_up)
    for number in wide_outputs:
        problem.outputs[number] = problem.system.unknown(("output", number))
    if has_free_ends:
        _free_ends(problem, calls[0])
    for index, (call, found) in enumerate(zip(calls, find_exits(calls), strict=True)):
        exits = {x: path for x, path in found.items() if multiplies or path in problem.widened}
        CallStatement(problem, module, call, index, exits, closed, narrow).state()
    work = sum(count_node_flops(node) for call in calls for node in call.capture.graph.graph.nodes)
    facts.flops = {path: size / work for path, size in facts.flops.items()}
    _unite_blocks(problem)
    return problem


def forbid_vanishing(problem: Problem, calls: Sequence[MeasuredCall]) -> Problem:
    """Return the problem with the limit that no parameter and no layer's values vanish in fp16.

    `find_visible` refuses every solution that breaks it.

    Args:
        calls: those that the problem was stated for.
    """
    sizes = measure_layers(calls)
    largest: dict[tuple[int, str], float] = {}
    parameters = [x for x in problem.limits if x.weight]
    for x in parameters:
        largest[x.source[:2]] = max(largest.get(x.source[:2], 0.0), x.range.amax)
    floors = [
        (x.unknown, min(0.0, VANISHING_BITS - log2_of(largest[x.source[:2]])), ())
        for x in parameters
        if largest[x.source[:2]] > 0
    ]
    for path, ends in problem.facts.layers.items():
        if len({(problem.system.find(x), problem.system.find(y)) for x, y in ends}) == 1:
            floors += [
                (unknown, VANISHING_BITS - log2_of(size), ())
                for unknown, size in zip(ends[0], sizes[split_fold_name(path)[0]], strict=True)
            ]
    return replace(problem, floors=[*problem.floors, *floors])


def measure_layers(calls: Sequence[MeasuredCall]) -> dict[str, tuple[float, float]]:
    """Return the typical sizes of the input and output of each linear and convolution, by its path.

    They are root mean squares, the smallest of all calls, and at least 1.
    """
    found: dict[str, tuple[float, float]] = {}
    for call in calls:
        for node in call.capture.graph.graph.nodes:
            if is_kind(node, *PRODUCTS) and isinstance(arguments(node).get("weight"), Node):
                ends, path = (arguments(node)["input"], node), module_path(node)
                sizes = [
                    max((x.rms for x in call.ranges.get(y.name, ())), default=1.0) for y in ends
                ]
                first, last = (
                    max(1.0, min(x)) for x in zip(sizes, found.get(path, sizes), strict=True)
                )
                found[path] = first, last
    return found


class Statements:
    """Cache of stated problems: calls that differ only in measured magnitudes get a copy with other
    limits.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Sequence[MeasuredCall], dict[str, Any], Problem]] = []

    def state(
        self, module: torch.nn.Module, calls: Sequence[MeasuredCall], **options: Any
    ) -> Problem:
        """Return the unknowns, equations and limits of scaling a module for calls, as `state_problem` does.

        If a problem with the same equations is cached, copy it and replace the magnitudes in its limits.

        Args:
            options: further arguments of `state_problem`.
        """
        known = (x for x in self._made if x[1] == options and _are_stated_alike(x[0], calls))
        if (found := next(known, None)) is None:
            found = calls, options, state_problem(module, calls, **options)
            self._made.append(found)
        problem = found[2]
        limits = [
            replace(x, range=calls[x.source[0]].ranges[x.source[1]][x.source[2]])
            for x in problem.limits
        ]
        return replace(problem, system=problem.system.copy(), limits=limits)


def _are_stated_alike(calls: Sequence[MeasuredCall], others: Sequence[MeasuredCall]) -> bool:
    """Return whether two lists of calls have the same equations between scale exponents, and differ
    only in magnitudes.
    """
    return len(calls) == len(others) and all(
        one.capture is other.capture
        and one.blocks is other.blocks
        and one.ranges.keys() == other.ranges.keys()
        and all(
            [x.least for x in parts] == [x.least for x in other.ranges[name]]
            for name, parts in one.ranges.items()
        )
        and _find_harmless(one) == _find_harmless(other)
        for one, other in zip(calls, others, strict=True)
    )


def _find_harmless(call: MeasuredCall) -> frozenset[Node]:
    """Find the activations that may be Inf but not NaN, and that only saturating functions, such as
    `tanh`, read.

    They need no limit.
    """
    found = find_saturating(call.capture.graph.graph, call.ranges)
    return frozenset(x for x in found if not any(p.unbounded for p in call.ranges.get(x.name, ())))


def _free_ends(problem: Problem, call: MeasuredCall) -> None:
    """Let a call's arguments and outputs have scale exponents of their own; otherwise these are fixed
    at 0.
    """
    graph, capture = call.capture.graph.graph, call.capture
    floats = {node.name for node in graph.nodes if is_float(node)}
    for number, name in enumerate(capture.inputs):
        if name in floats:
            problem.inputs[number] = problem.system.unknown(("value", 0, name, 0))
    for number, source in enumerate(list_outputs(graph.output_node())):
        if number < capture.outputs and is_float(source):
            problem.outputs[number] = problem.system.unknown(("output", number))


def _unite_blocks(problem: Problem) -> None:
    """Give a parameter's blocks one scale exponent unless all calls split the parameter in the same way."""
    named: dict[str, list[str]] = {}
    for fold in problem.parameters:
        named.setdefault(split_fold_name(fold)[0], []).append(fold)
    for name, folds in named.items():
        places = [split_fold_name(fold)[1] for fold in folds]
        ends = sorted((x[-1].start, x[-1].stop) for x in places if x)
        is_whole = all(stop == start for (_, stop), (start, _) in itertools.pairwise(ends))
        if len(folds) > 1 and not (is_whole and len({*map(len, places)}) == 1):
            unknowns = [problem.parameters.pop(fold) for fold in folds]
            problem.system.equate(*unknowns)
            problem.parameters[name] = unknowns[0]


def _find_guests(
    module: torch.nn.Module, calls: Sequence[MeasuredCall]
) -> dict[str, frozenset[str]]:
    """Map each module to parameters that only run inside it although their names are outside it.

    SAT's transformer calls its mixins' norms, so with the transformer in fp32 these are fp32 as well.
    """
    around: dict[str, set[str]] = {}
    for call in calls:
        for node in call.capture.graph.graph.nodes:
            stack = list_running(node)
            if stack:
                known = around.setdefault(stack[-1], set(stack))
                known &= set(stack)
    guests: dict[str, set[str]] = {}
    owned: dict[str, set[str]] = {}
    for name, _ in module.named_parameters():
        owned.setdefault(name.rpartition(".")[0], set()).add(name)
    for path in around.keys() & owned.keys():
        for host in around[path]:
            if not is_inside(path, host):
                guests.setdefault(host, set()).update(owned[path])
    return {host: frozenset(names) for host, names in guests.items()}


class CallStatement:
    """Adds one call's equations and limits to a problem, and looks up unknown exponents for the rules."""

    def __init__(
        self,
        problem: Problem,
        module: torch.nn.Module,
        call: MeasuredCall,
        index: int,
        exits: Mapping[Node, str],
        closed: frozenset[str],
        narrow: Collection[str],
    ) -> None:
        self.problem, self.module, self.call, self.index = problem, module, call, index
        self.narrow = frozenset(narrow)
        self.system = problem.system
        self.graph = call.capture.graph.graph
        self.exits = dict(exits)
        self.casts = {x for x, path in self.exits.items() if path in closed and _is_narrowing(x)}
        for cast in self.casts:
            self.exits[cast.all_input_nodes[0]] = self.exits.pop(cast)

    def state(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._state_placeholder(node)
            elif node.op == "output":
                self._pin_outputs(node)
            elif node.op == "call_function":
                self._state_operation(node)
        self._state_limits()
        self._add_flops()

    def unknown(self, node: Node, block: int | None, user: Node) -> int:
        """Return the unknown scale exponent of a node's result, or of one block of it, as its user
        reads it.

        Outside a module whose output is multiplied, the exponent includes that multiply.
        """
        split = self.call.blocks.get(node)
        if split is None:
            inner = self.system.unknown(self._key(node, 0))
            return self._beyond_exit(node, user, inner)
        if block is not None:
            return self.system.unknown(self._key(node, block))
        every = [self.system.unknown(self._key(node, i)) for i in range(len(split))]
        self.system.equate(*every)
        return every[0]

    def eps_unknown(self, node: Node, value: float | None) -> int | None:
        """Return the unknown scale exponent of the eps attribute with this value in a node's module; None
        without one.
        """
        path = module_path(node)
        found = find_eps(self.module, path, value)
        if found is None:
            return None
        unknown = self.system.unknown(("eps", *found))
        self.problem.eps[found] = unknown
        return unknown

    def clamp_unknown(self, node: Node, value: float) -> int | None:
        """Return the unknown scale exponent of a lower limit in a node's code; None if the limit can't
        be scaled.

        A number in code is scaled during calls of its module. One that depends on the dtype differs in
        fp32, and a method's own code isn't a module call.
        """
        path, info = module_path(node), torch.finfo(torch.float16)
        unknown = self.eps_unknown(node, float(value))
        if unknown is None:
            if value in (info.eps, info.tiny) or (not path and self.call.capture.method):
                return None
            place = path, name_clamp(value)
            self.problem.eps[place] = unknown = self.system.unknown(("eps", *place))
        for (outer, number), other in self.problem.clamps.items():
            if number == value and (is_inside(path, outer) or is_inside(outer, path)):
                self.system.equate(unknown, other)
        self.problem.clamps[path, value] = unknown
        return unknown

    def keeps_clamp(self, node: Node) -> bool:
        """Return whether a clamp at fp16's maximum belongs to the model, so that its effect must be
        kept.
        """
        return _is_kept(node, self.call.capture)

    def keep_from_zero(self, node: Node) -> None:
        """Limit how far the fp16 argument of a root or reciprocal is scaled down, since 0 would give Inf.

        In a row of zeros, an RMS norm's argument is its eps alone. If the residual stream is scaled
        down, fp16 may not represent it.
        """
        parts = self.call.ranges.get(node.name, ())
        least = min((part.least for part in parts), default=0.0)
        if self._limiting_dtype(node) == torch.float16 and least > 0:
            room = SMALLEST_BITS - log2_of(least)
            interiors = find_interiors(node)
            self.problem.floors.append((self.unknown(node, None, node), room, interiors))

    def _key(self, node: Node, block: int) -> Hashable:
        name = self.call.capture.parameters.get(node.name)
        if name is None:
            return ("value", self.index, node.name, block)
        split = self.call.blocks.get(node)
        if split is None:
            return ("parameter", name)
        return ("parameter", name_block(name, split.dim, *split.bounds[block : block + 2]))

    def _beyond_exit(self, node: Node, user: Node, inner: int) -> int:
        path = self.exits.get(node)
        if path is None or user is node:
            return inner
        if user not in self.casts and is_read_inside(user, node, path):
            return inner
        outer = ("outer", self.index, node.name)
        if outer not in self.system.keys:
            factor = self.system.unknown(("multiply", path))
            self.problem.multiplies[path] = factor
            self.system.relate((self.system.unknown(outer), -1), (inner, 1), (factor, 1))
        return self.system.unknown(outer)

    def _state_placeholder(self, node: Node) -> None:
        if not is_float(node) or self._is_unread(node):
            return
        name = self.call.capture.parameters.get(node.name)
        capture = self.call.capture
        if name is None and node.name in capture.inputs and self.problem.inputs:
            self.unknown(node, None, node)  # one exponent for all blocks
            return
        if name is None or name in capture.kept_buffers or name in capture.replaceable:
            self.system.pin(self.unknown(node, None, node))
        else:
            self._state_parameter(node, name)

    def _state_parameter(self, node: Node, name: str) -> None:
        split = self.call.blocks.get(node)
        if split is None or (split.dim and self._find_columns(node) is None):
            whole = self.system.unknown(("parameter", name))  # as in other calls
            self.system.equate(whole, self.unknown(node, None, node))
            self.problem.parameters[name] = whole
            return
        for block, ends in enumerate(itertools.pairwise(split.bounds)):
            named = name_block(name, split.dim, *ends)
            self.problem.parameters[named] = self.unknown(node, block, node)

    def _pin_outputs(self, node: Node) -> None:
        for number, source in enumerate(list_outputs(node)):
            if is_float(source):
                wide = self.problem.outputs.get(number, ZERO)
                self.system.equate(wide, self.unknown(source, None, node))

    def _state_operation(self, node: Node) -> None:
        if is_part(node):
            return self._state_part(node)
        if is_kind(node, "join") and node in self.call.blocks:
            return self._state_joint(node)
        split = self._find_split(node)
        for block in range(len(split)) if split else (None,):
            stated = PlacedOperation(node, block, self)
            if state_equations(stated):
                self._note_layer(stated)
            else:
                place = f"{self.call.capture.component}:{module_path(node)}"
                name = operation(node) or str(node.target)
                self.problem.facts.pinned.setdefault(name, []).append(place)
        return None

    def _find_split(self, node: Node) -> Blocks | None:
        """Return the blocks of channels that an operation's equations must be stated for one by one;
        None if for none.

        They are blocks of the result or of the weight's columns that have separate scale exponents.
        """
        weight = arguments(node).get("weight")
        columns = self._find_columns(weight) if isinstance(weight, Node) else None
        return self.call.blocks.get(node, columns)

    def _find_columns(self, weight: Node) -> Blocks | None:
        """Return the blocks of a weight's columns with separate scale exponents; None if all have one."""
        split = self.call.blocks.get(weight)
        is_read_so = all(is_kind(user, "linear", "convolution") for user in weight.users)
        return split if split is not None and split.dim == 1 and is_read_so else None

    def _note_layer(self, stated: PlacedOperation) -> None:
        """Record the unknown scale exponents of a linear's or convolution's input and output, for adapters
        that join later.
        """
        node, weight = stated.node, stated.given.get("weight")
        if not is_kind(node, *PRODUCTS) or not isinstance(weight, Node):
            return
        if not self._is_parameter(weight):
            return
        path, split = module_path(node), self._find_split(node)
        if stated.block is not None and split is not None:
            dim = 0 if node in self.call.blocks else 1
            path = name_block(path, dim, *split.bounds[stated.block : stated.block + 2])
        ends = stated.of(stated.given["input"]), stated.out
        self.problem.facts.layers.setdefault(path, []).append(ends)

    def _state_part(self, node: Node) -> None:
        """Give a part of a tensor, such as a slice, the scale exponents of the blocks that it covers."""
        if not is_float(node):
            return None
        source, place, dim = find_part(node)
        if not is_float(source):
            return self.system.pin(self.unknown(node, None, node))
        return self._tie(node, source, place, dim, node)

    def _state_joint(self, node: Node) -> None:
        """Give concatenated tensors the scale exponents of the blocks that they fill in the result."""
        dim, places = list_joined(node)
        for part, place in places:
            if not is_float(part):  # nothing can scale integers
                self.system.pin(self.unknown(part, None, node))
            self._tie(part, node, place, dim, node)

    def _tie(self, part: Node, whole: Node, place: tuple[int, int], dim: int, user: Node) -> None:
        """Give a part of a tensor, block by block, the scale exponents that the whole tensor has there.

        Args:
            part: such as a slice, or one input of a concatenation.
            place: first index and end of the part along dimension `dim` of the whole.
            user: node that reads the tensors, which may be inside or outside a multiplied module.
        """
        split, inner = self.call.blocks.get(whole), self.call.blocks.get(part)
        if split is None or split.dim != dim:
            self.system.equate(self.unknown(part, None, user), self.unknown(whole, None, user))
            return
        is_along = part is user and inner is not None and inner.dim == dim
        bounds = inner.bounds if is_along and inner else (0, place[1] - place[0])
        for block, (start, stop) in enumerate(itertools.pairwise(bounds)):
            own = self.unknown(part, block if is_along else None, user)
            covered = split.covered(place[0] + start, place[0] + stop)
            self.system.equate(own, *(self.unknown(whole, i, user) for i in covered))

    def _state_limits(self) -> None:
        exempt = self._clamped() | _find_harmless(self.call)
        for node in self.graph.nodes:
            parts = self.call.ranges.get(node.name, ())
            if node in exempt or (node.op == "placeholder" and not self._is_parameter(node)):
                continue
            if self._is_unread(node):
                continue
            interiors = self._find_interiors(node)
            for block, part in enumerate(parts):
                self._state_limit(node, block, part, interiors)

    def _find_interiors(self, node: Node) -> tuple[str, ...]:
        """List the modules that, kept in fp32, would put a node's result into fp32; for a parameter,
        its owners.
        """
        name = self.call.capture.parameters.get(node.name)
        if name is None:
            return find_interiors(node)
        parts = name.split(".")[:-1]
        return tuple(".".join(parts[:count]) for count in range(len(parts) + 1))

    def _state_limit(self, node: Node, block: int, part: Range, interiors: tuple[str, ...]) -> None:
        place, dtype = self._place(node), self._limiting_dtype(node)
        unknown = self.unknown(node, block if node in self.call.blocks else None, node)
        source = self.index, node.name, block
        weight, within = self._fold_weight(node), interiors
        outer = self.system.keys.get(("outer", self.index, node.name))
        if outer is not None:
            beyond = Limit(outer, part, dtype, place, 0.0, interiors, source=source)
            self.problem.limits.append(beyond)
            within = (*interiors, self.exits[node])
        limit = Limit(unknown, part, dtype, place, weight, within, source)
        self.problem.limits.append(limit)

    def _limiting_dtype(self, node: Node) -> torch.dtype:
        dtype: torch.dtype = node.meta["val"].dtype
        is_narrow = dtype == torch.float32 and not self.narrow.isdisjoint(module_classes(node))
        return torch.float16 if is_narrow else dtype

    def _is_unread(self, node: Node) -> bool:
        """Return whether a node is a parameter that this call doesn't read; a call of another size may."""
        return self._is_parameter(node) and not node.users

    def _is_parameter(self, node: Node) -> bool:
        return node.name in self.call.capture.parameters

    def _clamped(self) -> frozenset[Node]:
        """Find the clamps that belong to the model, and their inputs, whose overflow the clamp catches."""
        kept = find_kept_clamps(self.call.capture)
        return kept.union(x for node in kept for x in node.all_input_nodes)

    def _place(self, node: Node) -> str:
        name = self.call.capture.parameters.get(node.name)
        return name or f"{self.call.capture.component}:{module_path(node)} ({operation(node)})"

    def _fold_weight(self, node: Node) -> float:
        if not self._is_parameter(node):
            return 0.0
        return 1.0 if len(shape_of(node)) > 1 else 0.1

    def _add_flops(self) -> None:
        flops = self.problem.facts.flops
        for node in self.graph.nodes:
            if size := count_node_flops(node):
                for path in list_running(node):
                    flops[path] = flops.get(path, 0.0) + size


def _is_narrowing(node: Node) -> bool:
    """Return whether a node is a cast from fp32 to fp16."""
    source = node.all_input_nodes[0].meta.get("val") if len(node.all_input_nodes) == 1 else None
    is_wide = isinstance(source, torch.Tensor) and source.dtype == torch.float32
    return is_wide and is_kind(node, "cast")


def find_eps(module: torch.nn.Module, path: str, value: float | None) -> tuple[str, str] | None:
    """Return (module path, attribute) of the eps with this value in a module, so that it can be scaled.

    Return None without one, and also if the module's `forward` contains the same number as a literal:
    either could be meant.
    """
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    code = getattr(type(owner).forward, "__code__", None)
    if code is not None and value in code.co_consts:
        return None
    for name, held in vars(owner).items():
        if "eps" in name.lower() and type(held) is float and held == value and 0 < held < 0.1:
            return path, name
    return None


def list_running(node: Node) -> tuple[str, ...]:
    """List the paths of the modules whose `forward` was running when a node was computed, outermost
    first.
    """
    return tuple(_list_calls(node).values())


def _list_calls(node: Node) -> dict[str, str]:
    """Map the key of each module call that was running when a node was computed to the module's path,
    outermost first.
    """
    known: dict[str, str] | None = node.meta.get(_CALLS)
    if known is None:
        stack = node.meta.get("nn_module_stack") or {}
        paths = ((key, entry[0]) for key, entry in stack.items() if entry[0])
        known = {key: path.removeprefix(PREFIX).removeprefix(".") for key, path in paths}
        node.meta[_CALLS] = known
    return known


def is_read_inside(user: Node, node: Node, path: str) -> bool:
    """Return whether a user of a node was computed in the same call of a module, not in a later one.

    Args:
        path: path of the module, in a call of which `node` was computed.
    """
    around = reversed(_list_calls(node).items())
    key = next((key for key, other in around if other == path), None)
    return key in _list_calls(user)


def find_interiors(node: Node) -> tuple[str, ...]:
    """List the modules inside which a node's result is both computed and used, outermost first.

    If one of them is in fp32, so is the result.
    """
    if any(user.op == "output" for user in node.users) or node.op == "placeholder":
        return ()
    inside = list_running(node)
    for user in node.users:
        shared = list_running(user)
        if shared != inside:
            inside = tuple(path for path in inside if path in shared)
    return inside


def find_exits(calls: Sequence[MeasuredCall]) -> list[dict[Node, str]]:
    """Find where modules' outputs can be multiplied: for each captured call, map the only tensor that
    a module returns to the module's path.

    A multiply acts in all calls of a module. So a module is left out if one of its calls returns
    several tensors, one that its own code didn't compute, or one that is changed later.
    """
    spoiled: set[str] = set()
    exits: list[dict[Node, str]] = []
    for call in calls:
        found: dict[Node, str] = {}
        for (path, _), nodes in _find_leaving(call).items():
            own = [node for node in nodes if module_path(node) == path]
            if len(own) == 1 and _may_multiply(own[0], path, call):
                found[own[0]] = path
            else:
                spoiled.add(path)
        exits.append(found)
    return [{node: path for node, path in x.items() if path not in spoiled} for x in exits]


def _find_leaving(call: MeasuredCall) -> dict[tuple[str, str], list[Node]]:
    """Map each call of a module inside a captured one, by path and key, to the tensors that are computed
    in it and read outside of it.
    """
    leaving: dict[tuple[str, str], list[Node]] = {}
    for node in call.capture.graph.graph.nodes:
        if node.op == "call_function" and is_float(node):
            around = [_list_calls(user) for user in node.users]
            for key, path in _list_calls(node).items():
                if path and any(key not in keys for keys in around):
                    leaving.setdefault((path, key), []).append(node)
    return leaving


def _may_multiply(node: Node, path: str, call: MeasuredCall) -> bool:
    mutated = any(operation(user).endswith("_") for user in node.users)
    return not mutated and node not in call.blocks and path in call.capture.single_outputs


def count_node_flops(node: Node) -> float:
    """Count the FLOPs of a matrix product or convolution; return 0 for other operations."""
    if not is_kind(node, *PRODUCTS):
        return 0.0
    given = arguments(node)
    shapes = {key: shape_of(x) for key, x in given.items() if is_float(x)}
    is_transposed = bool(given.get("transposed"))
    return numerics.count_flops(operation(node), shapes, shape_of(node), transposed=is_transposed)
