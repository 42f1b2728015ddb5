"""Prove upper bounds of all activations of a captured call, from the weights alone and for every input.

Weights are loaded as the graph needs them (`known_values`). Values that depend on the timestep alone
are computed at every timestep (`evaluation`). Every other value has a largest magnitude per channel and
a norm per row (`values`), from one rule for each operation (`rules`, `product_rules`). Each result that
is rounded is widened by the rounding error. `docs/certificates.md` has the argument and its
assumptions.

**Catches** every prompt, latent, seed and timestep within the stated limits.

**Does not catch** inputs beyond their limits, resolutions with more elements in a group norm than the
captured call has, sums that a backend rounds to fp16 on the way, operations without a rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from stopdown.mapped_weights import Load
from stopdown.operations import find_operation
from stopdown.out_of_memory import is_out_of_memory
from stopdown.scaling.bounds import product_rules, rules
from stopdown.scaling.bounds.affine_rows import (
    add_rounding_error,
    find_affine_rows,
    find_largest_by_channel,
)
from stopdown.scaling.bounds.evaluation import FLOOR, evaluate, writes_in_place
from stopdown.scaling.bounds.intervals import Interval, bound_interval, make_interval
from stopdown.scaling.bounds.known_values import (
    BoundedOperation,
    Bounds,
    InputLimits,
    KnownValues,
    Rule,
    UnboundedError,
)
from stopdown.scaling.bounds.row_lengths import find_read_lengths
from stopdown.scaling.bounds.row_sums import LOOSE_WEIGHT_FLOOR, WEIGHT_FLOOR
from stopdown.scaling.bounds.values import Bound, inflate, join, make_bound, uniform, unsized
from stopdown.scaling.graph.blocks import Blocks, find_part
from stopdown.scaling.graph.capture import Capture, module_path
from stopdown.scaling.graph.nodes import (
    has_known_size,
    has_trait,
    is_float,
    is_kind,
    is_split,
    operation,
    shape_of,
)
from stopdown.scaling.graph.range_measurement import Range, find_sentinels

RELATIVE = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-20}
"""Relative allowance for the rounding of one operation; each is at least four times the unit roundoff."""

LEAST_STORED = 2.0**-12
"""A value's bound must be at least this after scaling, so that the allowance for subnormals suffices:
2**-25 for its own rounding, and as much for that of a bias."""

LEAST_STORED_WEIGHT, LEAST_STORED_LOOSE = 2.0**-25 / WEIGHT_FLOOR, 2.0**-25 / LOOSE_WEIGHT_FLOOR
"""Least scaled size of a weight's largest magnitude for which the usual, or the loose, allowance for
subnormals suffices."""

RULES: dict[str, Rule] = {
    name.removeprefix("bound_"): rule
    for name, rule in (vars(rules) | vars(product_rules)).items()
    if name.startswith("bound_")
}
"""Rules by their names in the table of operations: `any` is `bound_any`."""

_WITHOUT_SIZES = {
    **dict.fromkeys(("same", "reshape", "permute", "expand", "part"), 0),
    **dict.fromkeys(("tokens", "places", "any"), 0),
    "copied": 1,
}
"""Rules that need no sizes, as the result's elements are those of one argument or means of them; the
argument's index."""


def bound_call(
    capture: Capture,
    load: Load,
    limits: InputLimits,
    blocks: Mapping[Node, Blocks],
    loose: Collection[str] = (),
    before: Bounds | None = None,
) -> Bounds:
    """Prove upper bounds of all activations of a captured call, from the weights alone, for every input.

    Bounds are magnitudes of the activations without exponents.

    Args:
        capture: capture of the call in the dtype that it will run in.
        load: returns a parameter or buffer by name in a floating dtype, from a checkpoint or a module.
        limits: largest magnitudes that the inputs are assumed to have, by their names in
            `capture.inputs`. An input without a limit has no bound.
        blocks: maps nodes of the graph to blocks of their channels that are bounded separately; `{}` for
            none.
        loose: names of parameters with a larger error allowance for fp16 subnormals.
        before: bounds of the same call without loose parameters, or with other `limits.largest`. If given,
            only the bounds that the difference affects are computed.

    Returns:
        The bounds. `.values` maps the name of each node to its bound, in float64 on the CPU, or to None:
        `.peak` for elements, broadcastable to the activation, and `.largest` of these.

    Source: interval arithmetic, and 2-norms of rows. `docs/certificates.md` proves each rule and lists the
    assumptions.

    Cost: each weight is loaded about once, in the order of the graph, and read a few times.

    Examples:
        >>> from stopdown.scaling.bounds.known_values import InputLimits
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 1e5 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> capture = capture_call(module, (torch.ones(1, 4),), dtype=torch.float16)
        >>> limits = InputLimits(largest={capture.inputs[0]: 4.0})  # inputs up to 4 in magnitude
        >>> bounds = bound_call(capture, module.get_parameter, limits, {})
        >>> bounds.values["linear"].largest > 4 * 1e5  # beyond fp16's 65504
        True
        >>> 2.0 < bounds.values["layer_norm"].largest < 2.01  # sqrt(4), whatever goes in
        True
    """
    walk = Propagation(capture, load, limits, blocks, frozenset(loose))
    if before is not None:
        update = _Update(capture, load, limits, blocks, frozenset(loose))
        update.begin(before)
        walk = update
    for node in capture.graph.graph.nodes:
        walk.visit(node)
    walk.load_rest()
    return walk.found


class Propagation(KnownValues):
    """Walk of a graph that bounds each node's result from those of its inputs."""

    def __init__(
        self,
        capture: Capture,
        load: Load,
        limits: InputLimits,
        blocks: Mapping[Node, Blocks],
        loose: frozenset[str],
    ) -> None:
        super().__init__(capture, load, limits, blocks, loose)
        self._evaluated: dict[Node, dict[tuple[Any, ...], Any]] = {}
        self.placeholders = {n.name: n for n in capture.graph.graph.nodes if n.op == "placeholder"}
        self.aliases = find_aliases(capture.graph.graph)
        self.spent = _find_last_uses(capture.graph.graph)
        self.lengths = find_read_lengths(capture.graph.graph)

    def visit(self, node: Node) -> None:
        if node.op == "placeholder":
            self._hold_input(node)
        elif node.op == "call_function":
            self._visit_operation(node)
        self._note(node)
        for spent in self.spent.get(node, ()):
            self._let_go(spent)

    def _note(self, node: Node) -> None:
        if isinstance(self.held.get(node), (Interval, list)):
            self.found.exact.add(node.name)
        if node in self.rows:
            self.found.rowed.add(node.name)

    def _let_go(self, node: Node) -> None:
        if isinstance(self.held.get(node), (Interval, list)):
            del self.held[node]
        self.rows.pop(node, None)
        self._evaluated.pop(node, None)

    # inputs and parameters

    def _hold_input(self, node: Node) -> None:
        name = node.name
        if name in self.capture.parameters:
            return
        if name in self.capture.constants:
            constant = self.capture.constants[name]
            if isinstance(constant, FakeTensor):  # no values: another call's result
                self._miss(node)
            elif isinstance(constant, torch.Tensor):
                self._hold_known(node, constant)
        elif name in self.limits.fixed:
            self._hold_known(node, self.limits.fixed[name])
        elif name in self.limits.timesteps:
            self._bound_timestep_input(node)
        elif is_float(node):
            largest = self.limits.largest.get(name, math.inf)
            if math.isfinite(largest):
                typical = min(largest, 1.0)
                self._keep(node, uniform(largest, shape_of(node), typical))
            else:
                self._miss(node)

    def _hold_known(self, node: Node, tensor: torch.Tensor) -> None:
        tensor = tensor.detach().cpu()
        sentinels = find_sentinels(tensor)
        if tensor.is_complex() or bool(sentinels.any()):
            sizes = (
                tensor.abs() if tensor.is_complex() else tensor.abs().masked_fill(sentinels, 0.0)
            )
            self._keep(node, make_bound(sizes.double(), shape_of(node), typical=1.0))
            return
        made = make_interval(tensor)
        if is_float(node):  # unchanged, or rounded by the component call
            there = tensor.to(node.meta["val"].dtype).double()
            made = replace(made, radius=(made.center - there).abs())
        self.held[node] = made

    def _bound_timestep_input(self, node: Node) -> None:
        """Store the values of a timestep input, so that all that depends on it alone is computed at
        every timestep.

        With several timestep inputs, which vary independently, such values would hold only if all
        had the same timestep. Then each is bounded like any other input.
        """
        steps, shape = self.limits.timesteps[node.name], shape_of(node)
        if len(self.limits.timesteps) > 1:
            self._keep(node, uniform(float(steps.values.abs().max()) + steps.radius, shape))
            return
        wide = steps.values.reshape(-1, *[1] * len(shape)).expand(-1, *shape)
        made = make_interval(wide, batched=True)
        self.held[node] = replace(made, radius=made.radius + steps.radius)

    def load_rest(self) -> None:
        """Load the parameters that no rule loaded, so that their magnitudes are measured too."""
        for name in self.capture.parameters:
            node = self.placeholders[name]
            if name not in self.found.ranges and is_float(node):
                self.load(node)

    # operations

    def _visit_operation(self, node: Node) -> None:
        if is_kind(node, "assertion", "size"):
            return
        if is_split(node) and node.all_input_nodes[0] in self.rows:
            self.rows[node] = self.rows[node.all_input_nodes[0]]  # for `getitem` of its parts
        made = self._evaluate(node)
        if made is not None:
            self.held[node] = made
            if isinstance(made, Interval) and is_float(node):
                self._record(node, bound_interval(made, shape_of(node)), made.parts)
        elif is_float(node):
            self._apply_rule(node)
        if writes_in_place(node):
            self._change_aliases(node)

    def _evaluate(self, node: Node) -> Any:
        sources = [x for x in node.all_input_nodes if x.name not in self.capture.parameters]
        if not all(isinstance(self.held.get(x), (Interval, list)) for x in sources):
            return None
        if not sources and node.all_input_nodes:
            return None
        key, same = (node.target, repr(node.args), repr(node.kwargs)), dict[Any, Any]()
        if len(sources) == len(node.all_input_nodes) == 1:  # blocks repeat the timestep's SiLU
            same = self._evaluated.setdefault(sources[0], same)
        if key not in same:
            try:
                same[key] = evaluate(node, self)
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                if is_out_of_memory(error):
                    raise
                same[key] = None  # then bounded like other values
        return same[key]

    def _apply_rule(self, node: Node) -> None:
        found = find_operation(operation(node))
        op = BoundedOperation(node, self, is_length_read=node in self.lengths)
        if found is None or not found.bound:
            self._miss(node)
            return
        if is_kind(node, "attention"):
            place = f"{self.capture.component}:{module_path(node)}"
            self.found.scores[place] = max(
                self.found.scores.get(place, 0.0), product_rules.limit_scores(op)
            )
        if has_known_size(node) and 0 in shape_of(node):
            self._keep(node, uniform(0.0, shape_of(node)))  # such as a cache of too few frames
            return
        is_sized = all(map(has_known_size, (node, *node.all_input_nodes)))
        try:
            bound = RULES[found.bound](op) if is_sized else _bound_unsized(found.bound, op)
        except UnboundedError:
            self._miss(node)
            return
        if not has_trait(node, "unrounded"):
            bound = self._round(node, bound)
        self._keep(node, bound, op.parts)
        if is_sized and not writes_in_place(node):
            self._note_affine_rows(op, bound)

    def _note_affine_rows(self, op: BoundedOperation, bound: Bound) -> None:
        """Store what is known of a result's rows, with the rounding error, for tighter bounds of the
        next linear.

        Rows behind a norm have the form `n * gain + table[t] + rest` (n: the norm's output, t: the
        timestep).

        Args:
            bound: bound of the rounded result.
        """
        rows = find_affine_rows(op)
        if rows and not has_trait(op.node, "unrounded"):
            dtype = op.node.meta["val"].dtype
            error = RELATIVE.get(dtype, 2.0**-40) * find_largest_by_channel(bound)
            floor = FLOOR if dtype == torch.float16 else 0.0
            rows = add_rounding_error(rows, error + floor * bound.largest)
        if rows:
            self.rows[op.node] = rows

    def _round(self, node: Node, bound: Bound) -> Bound:
        dtype = node.meta["val"].dtype
        if is_kind(node, "cast"):
            source = node.all_input_nodes[0].meta["val"].dtype
            if source == dtype:
                return bound
        floor = FLOOR if dtype == torch.float16 else 0.0
        return inflate(bound, RELATIVE.get(dtype, 2.0**-40), floor, shape_of(node))

    def _keep(self, node: Node, bound: Bound, parts: torch.Tensor | None = None) -> None:
        if not math.isfinite(bound.largest):
            self._miss(node)
            return
        self.held[node] = bound
        self._record(node, bound, parts)

    def _record(self, node: Node, bound: Bound, parts: torch.Tensor | None = None) -> None:
        self.found.values[node.name] = bound
        peak = bound.peak if parts is None else torch.maximum(bound.peak, parts)
        self.found.ranges[node.name] = self._split(node, peak, bound.typical)

    def _split(self, node: Node, peak: torch.Tensor, typical: float) -> tuple[Range, ...]:
        split = self.blocks.get(node)
        if split is None or peak.shape[split.dim] == 1:
            largest = float(peak.max()) if peak.numel() else 0.0
            return (_as_range(largest, typical),) * (1 if split is None else len(split))
        pairs = zip(split.bounds, split.bounds[1:], strict=False)
        sizes = [float(peak.narrow(split.dim, a, b - a).max()) for a, b in pairs]
        return tuple(_as_range(size, typical) for size in sizes)

    def _miss(self, node: Node) -> None:
        self.held[node] = None
        self.found.values[node.name] = None
        self.found.ranges.pop(node.name, None)

    def _change_aliases(self, node: Node) -> None:
        """Update the bounds of all other nodes that share a storage which this node has written in
        place.
        """
        root = self.aliases.get(node)
        if root is None:
            return
        self._mark_overwritten(node)
        new = self.bound(node)
        for other in [x for x in self.rows if self.aliases.get(x) is root]:
            del self.rows[other]
        for other, other_root in self.aliases.items():
            if other_root is not root or other is node or other not in self.held:
                continue
            if not is_float(other):
                self.held[other] = None
                continue
            old = self.bound(other)
            if old is None or new is None:
                self._miss(other)
                continue
            if has_known_size(other) and has_known_size(node):
                cut = find_cut(node, other)
                joined = join(old, new, shape_of(other), shape_of(node), cut)
            else:
                typical = max(old.typical, new.typical)
                joined = unsized(max(old.largest, new.largest), typical, len(shape_of(other)))
            self.held[other] = joined
            self._record(other, joined)

    def _mark_overwritten(self, node: Node) -> None:
        """Note which of the results so far have the storage that a node has written in place."""
        root = self.aliases.get(node)
        earlier = itertools.takewhile(lambda x: x is not node, self.aliases)
        self.overwritten.update(x for x in earlier if self.aliases[x] is root)


class _Update(Propagation):
    """Bounds a call again after parameters were given a larger error allowance or inputs another limit, and
    reuses unaffected bounds.

    The allowance is for fp16 subnormals in weights that are stored with a smaller scale ("loose"). Changes
    don't pass a norm, whose result is bounded by its own weights. Earlier results hold bounds
    only, without intervals, affine rows and writes in place. So nodes that have those are visited again
    if an affected node needs them.
    """

    def begin(self, before: Bounds) -> None:
        self.before = before
        self.changed = {x for x in self.placeholders.values() if self._is_changed(x)}
        names = {x.name for x in self.changed}
        kept = {name: parts for name, parts in before.ranges.items() if name not in names}
        self.found = replace(
            before,
            limits=self.limits,
            values=dict(before.values),
            ranges=kept,
            scores=dict(before.scores),
        )
        self.overwritten = {*self.aliases}  # whatever may be, as nothing was visited yet
        self.needed = self._find_needed(self._find_changed())
        self.overwritten = set()

    def visit(self, node: Node) -> None:
        if node.op != "call_function" or node in self.needed:
            super().visit(node)
            return
        if writes_in_place(node):
            self._mark_overwritten(node)
        if node.name in self.before.values:
            self.held[node] = self.before.values[node.name]
        for spent in self.spent.get(node, ()):
            self._let_go(spent)

    def _let_go(self, node: Node) -> None:
        super()._let_go(node)
        if node.name in self.before.exact:
            self.held.pop(node, None)

    def _is_changed(self, node: Node) -> bool:
        """Return whether a placeholder is a loose parameter, or an input whose limit was another."""
        now, was = (x.largest.get(node.name) for x in (self.limits, self.before.limits))
        return now != was or self.capture.parameters.get(node.name) in self._loose

    def _find_changed(self) -> set[Node]:
        """Find the nodes whose bounds the changed placeholders affect, also by shared storage."""
        changed = set(self.changed)
        before = -1
        while before < len(changed):
            before = len(changed)
            roots = {self.aliases[x] for x in changed if x in self.aliases}
            changed |= {x for x, root in self.aliases.items() if root in roots}
            for node in self.capture.graph.graph.nodes:
                if changed.intersection(self._list_read(node)):
                    changed.add(node)
        return changed

    def _list_read(self, node: Node) -> list[Node]:
        """List the inputs on which a node's bound depends; a norm's bound doesn't depend on the
        activation it normalises.
        """
        sources = node.all_input_nodes
        if node.name in self.before.exact or node in self.aliases:
            return sources
        if is_kind(node, "row_norm", "group_norm"):
            return [x for x in sources if x is not node.args[0]]
        known = any(x.name in self.before.rowed for x in sources)
        is_product = is_float(node) and is_kind(node, "multiply", "divide")  # not of sizes
        if is_product and not known:
            return (
                [] if rules.find_written_norm(BoundedOperation(node, self)) is not None else sources
            )
        return sources

    def _find_needed(self, changed: set[Node]) -> set[Node]:
        """Return the nodes whose bounds must be computed again.

        These are the nodes whose bound changes, inputs of which more than the earlier bound is
        needed, inputs of such inputs, and nodes that share their storage.

        Args:
            changed: nodes whose bound changes.
        """
        needed: set[Node] = set()
        asked = list(changed)
        while asked:
            node = asked.pop()
            if node in needed or node.op != "call_function":
                continue
            needed.add(node)
            asked += [x for x in node.all_input_nodes if self._is_asked(x, node)]
            if root := self.aliases.get(node):
                asked += [x for x, other in self.aliases.items() if other is root]
        return needed

    def _is_asked(self, source: Node, user: Node) -> bool:
        """Return whether bounding `user` again needs more than the bound that its input `source` has from
        the first pass: exact values, or affine rows.
        """
        if source.name in self.before.rowed or source in self.aliases:
            return True
        sources = [x for x in user.all_input_nodes if x.name not in self.capture.parameters]
        as_exact = all(x.name in self.before.exact for x in sources)
        known = any(x.name in self.before.rowed for x in sources)
        return source.name in self.before.exact and (as_exact or known)


def _bound_unsized(name: str, op: BoundedOperation) -> Bound:
    """Bound a result whose size depends on data, by rules that need no size.

    Args:
        name: name of the operation's rule.

    Raises:
        UnboundedError: if the bound depends on the size.
    """
    if name not in _WITHOUT_SIZES:
        raise UnboundedError
    source = op.bound(op.node.args[_WITHOUT_SIZES[name]])
    return unsized(source.largest, source.typical, len(op.shape))


def _as_range(amax: float, typical: float) -> Range:
    return Range(amax, min(typical, amax), 0.0, certain=True, least_stored=LEAST_STORED)


def find_aliases(graph: torch.fx.Graph) -> dict[Node, Node]:
    """Map each node whose storage is written in place to the first node of that storage.

    It may include nodes of other storages, but leaves none out: views that a write could change are all
    there.
    """
    roots: dict[Node, Node] = {}
    changed: set[Node] = set()
    for node in graph.nodes:
        in_place = writes_in_place(node)
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if source is not None and (has_trait(node, "alias") or in_place):
            roots[node] = roots.get(source, source)
        else:
            roots[node] = node
        if in_place:
            changed.add(roots[node])
    return {node: root for node, root in roots.items() if root in changed}


def find_cut(node: Node, other: Node) -> set[int] | None:
    """Return the dimensions along which elements of one storage may have other places in two of its
    tensors.

    Return None unless both are slices of one tensor, or of such slices.
    """
    ours = dict(_list_sources(node))
    for source, cut in _list_sources(other):
        if source in ours:
            return cut | ours[source]
    return None


def _list_sources(node: Node) -> Iterator[tuple[Node, set[int]]]:
    """Yield a node and those of which it is a slice, with the dimensions that are cut in between."""
    cut: set[int] = set()
    while True:
        yield node, {*cut}
        if is_kind(node, "slice") or (is_kind(node, "part") and is_kind(node.args[0], "split")):
            node, _, dim = find_part(node)
            cut.add(dim)
        elif is_kind(node, "identity", "cast") or writes_in_place(node):
            node = node.args[0]  # type: ignore[assignment]
        else:
            return


def _find_last_uses(graph: torch.fx.Graph) -> dict[Node, list[Node]]:
    """Map each node to the inputs that no later node uses, so that they can be freed after it."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    spent: dict[Node, list[Node]] = {}
    for source, node in last.items():
        spent.setdefault(node, []).append(source)
    return spent
