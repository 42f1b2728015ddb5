"""Trace repeated blocks once: of all module calls that are equivalent, the first is traced, the others
copy its nodes.

The 42 blocks of a transformer differ only in their parameters' names, and so do the calls that a
decoder makes of its blocks for one frame after the other. Two calls are equivalent if the modules are
built alike (classes, plain attributes, shapes and dtypes of weights, casts) and receive arguments alike.
Copying nodes takes a tenth of the time of tracing.

A call is copied only if its nodes are its only effect. It is traced if it changes its module or a list
among its arguments, writes into its arguments or weights, reads a tensor from elsewhere, or makes a
constant; or if the module has hooks or a `forward` that are not Stopdown's.

Not covered: code that changes other objects than its own module.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node, Proxy
from torch.fx.experimental import proxy_tensor
from torch.fx.node import map_arg
from torch.nn.modules import module as module_code
from torch.utils import _pytree as pytree

from stopdown.interception.patches import Patches, RunningCalls

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_COMPARED = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
"""Attributes of modules that are compared in their own way, not as plain values."""

_OF_STORAGE = {
    *(torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default),
    torch.ops.aten.as_strided_scatter.default,
}
"""Operations whose offsets count from the start of the storage; the offset of an argument in its
storage is not compared."""

_NUMBER = "layer_idx"
"""Attribute by which blocks of Transformers find their entry in a cache. It is not compared if no code
reads it."""

_READ = ("num_calls", "module_stack", "submodule_paths", "enable_attr_proxy", "tensor_tracker")
"""Attributes of PyTorch's tracer that are used here; if one is missing, nothing is copied."""

Note = tuple["CallObserver", Any]
"""An observer, and what its function returned for one call."""


@dataclass(eq=False)
class CallObserver:
    """Hook that records a value for each call of a module, including calls that are copied.

    Attributes:
        path: path of the module.
        kind: distinguishes several observers of one module.
        note: computes the value from the hook's arguments.
        found: list to which each value is appended, in the order of the calls.
    """

    path: str
    kind: str
    note: Callable[..., Any]
    found: list[Note]

    def __call__(self, module: torch.nn.Module, *given: Any) -> None:
        self.found.append((self, self.note(*given)))


@dataclass(frozen=True)
class _Given:
    """Arguments of a module call, in a form in which two calls can be compared.

    Attributes:
        leaves, spec: the flattened arguments and their structure.
        nodes: distinct graph nodes of the tensors among them.
        sign: comparison key: equal for calls whose arguments have the same structure, shapes and constants.
    """

    leaves: list[Any]
    spec: Any
    nodes: list[Node]
    sign: Any


@dataclass(frozen=True)
class _Traced:
    """Traced call of a block, from which the nodes of later equivalent calls are copied.

    Attributes:
        nodes: in order, each with the modules around it: index among the module's parts, number of
            earlier calls of that part within the call, class.
        given, weights: nodes of the arguments and weights, which copies replace by their own.
        calls: number of calls of each part.
        notes: path of a part relative to the module, kind of observer, and the recorded value.
        output, spec: leaves and structure of the output. A tensor is represented by its node, an
            argument that was returned by `_Argument`.
    """

    nodes: list[tuple[Node, list[tuple[int, int, str]]]]
    given: list[Node]
    weights: list[Node | None]
    calls: list[int]
    notes: list[tuple[str, str, Any]]
    output: list[Any]
    spec: Any


@dataclass(frozen=True)
class _Argument:
    number: int


class Repeats:
    """Copies nodes of a traced block for each repeated call of an equivalent block, while a module is
    traced.

    Args:
        notes: list to which the observers of copied calls append their values.

    Attributes:
        copied: number of calls that were copied.
    """

    def __init__(self, root: torch.nn.Module, notes: list[Note]) -> None:
        self._notes, self.copied = notes, 0
        self._paths = {part: path for path, part in root.named_modules()}
        self._candidates = {x for x in self._paths if x is not root and _has_parts(x)}
        self._watches = {
            (hook.path, hook.kind): hook
            for part in self._paths
            for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
            if isinstance(hook, CallObserver)
        }
        self._numbers = {
            part: vars(part)[_NUMBER]
            for part in self._paths
            if type(vars(part).get(_NUMBER)) is int and not hasattr(type(part), _NUMBER)
        }
        self._reads: list[torch.nn.Module] = []  # of `layer_idx`, in order
        self._tracer: Any = None
        self._known: dict[Any, _Traced | None] = {}
        self._held: list[Any] = []  # keeps ids unique

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copy the nodes of repeated block calls instead of tracing them, for this thread's traces
        inside the block.
        """
        own, plain = threading.get_ident(), vars(proxy_tensor._ModuleStackTracer)["call_module"]

        def call_module(tracer: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
            trace = partial(plain, tracer, module, forward, args, kwargs)
            if threading.get_ident() != own or _has_global_hooks():
                return trace()
            return self._call(tracer, module, trace, args, kwargs)

        with Patches() as patches:
            tracer_class = proxy_tensor._ModuleStackTracer
            patches.set_class_attribute(tracer_class, "call_module", call_module)
            number = _Number(self._numbers, self._reads)
            for kind in {type(part) for part in self._numbers}:
                patches.set_class_attribute(kind, _NUMBER, number)
            for part in self._numbers:
                patches.remove_attribute(part, _NUMBER)
            yield

    def _call(
        self, tracer: Any, module: Any, trace: Callable[[], Any], args: Any, kwargs: Any
    ) -> Any:
        if self._tracer is None and all(hasattr(tracer, name) for name in _READ):
            self._tracer = tracer
        # a tracer with attribute proxies names shared modules by access path
        if tracer is not self._tracer or tracer.enable_attr_proxy or module not in self._candidates:
            return trace()
        given, sign = _read_given(tracer, args, kwargs), self._sign(module)
        if given is None or sign is None:
            return trace()
        key = sign, given.sign, _sign_surroundings()
        if key not in self._known:
            return self._trace(tracer, module, trace, (args, kwargs), given, key)
        known = self._known[key]
        return trace() if known is None else self._copy(tracer, module, given, known)

    def _sign(self, module: torch.nn.Module) -> Any:
        return _Description(module, self._held).sign()

    # tracing the first of several similar calls

    def _trace(
        self,
        tracer: Any,
        module: torch.nn.Module,
        trace: Callable[[], Any],
        arguments: Any,
        given: _Given,
        key: Any,
    ) -> Any:
        paths = _list_paths(tracer, module)
        before, weights = _last(tracer), _list_weights(tracer, module)
        calls, depth = dict(tracer.num_calls), len(tracer.module_stack)
        noted, read = len(self._notes), len(self._reads)
        output = trace()
        self._known[key] = None
        is_same = (
            self._sign(module) == key[0]
            and _sign_surroundings() == key[2]
            and _list_weights(tracer, module) == weights
            and _is_untouched(tracer, arguments, given)
            and not {*self._reads[read:]}.intersection(module.modules())
        )
        told = _tell_output(tracer, output, given) if is_same else None
        nodes = _list_after(tracer, before)
        known = {*given.nodes, *weights, *nodes}
        if told is None or {*given.nodes} & {*weights} or not _are_whole(nodes, known, told[0]):
            return output
        counts = [tracer.num_calls.get(x, 0) - calls.get(x, 0) for x in paths]
        places = _place(nodes, depth, {x: number for number, x in enumerate(paths)}, calls)
        notes = self._tell_notes(module, noted)
        more = sum(tracer.num_calls.values()) - sum(calls.values())
        if places is not None and notes is not None and more == sum(counts):
            pairs = list(zip(nodes, places, strict=True))
            self._known[key] = _Traced(pairs, given.nodes, weights, counts, notes, *told)
        return output

    def _tell_notes(self, module: torch.nn.Module, since: int) -> list[tuple[str, str, Any]] | None:
        start = self._paths[module]
        notes = self._notes[since:]
        if any(not f"{watch.path}.".startswith(f"{start}.") for watch, _ in notes):
            return None
        return [(watch.path[len(start) :], watch.kind, value) for watch, value in notes]

    # the others

    def _copy(self, tracer: Any, module: torch.nn.Module, given: _Given, known: _Traced) -> Any:
        paths, calls = _list_paths(tracer, module), tracer.num_calls
        before = [calls.get(x, 0) for x in paths]
        around = {
            key: (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
            for key, (path, kind) in tracer.module_stack.items()
        }
        places: dict[Any, Any] = dict(zip(known.given, given.nodes, strict=True))
        places.update(zip(known.weights, _list_weights(tracer, module), strict=True))
        graph, take = tracer.graph, places.__getitem__
        for node, inside in known.nodes:
            args, kwargs = map_arg(node.args, take), map_arg(node.kwargs, take)
            made = graph.create_node(node.op, node.target, args, kwargs, _name(graph, node.target))
            stack = dict(around)
            for number, done, kind in inside:
                done += before[number]
                stack[f"{paths[number]}@{done}" if done else paths[number]] = paths[number], kind
            made.meta = {**node.meta, "nn_module_stack": stack}
            places[node] = made
        for path, count, more in zip(paths, before, known.calls, strict=True):
            if more:
                calls[path] = count + more
        for path, kind, value in known.notes:
            self._notes.append((self._watches[f"{self._paths[module]}{path}", kind], value))
        self.copied += 1
        return pytree.tree_unflatten(_make_output(tracer, known, places, given), known.spec)


class _Number:
    """Descriptor that returns each block's `layer_idx`, and records which blocks' code read it.

    A block whose code reads its number can't be copied from another block.
    """

    def __init__(
        self, numbers: Mapping[torch.nn.Module, int], reads: list[torch.nn.Module]
    ) -> None:
        self._numbers, self._reads = numbers, reads

    def __get__(self, module: torch.nn.Module | None, kind: type) -> int:
        if module is None or module not in self._numbers:
            raise AttributeError(f"{kind.__name__} has no {_NUMBER}")
        self._reads.append(module)
        return self._numbers[module]


def _has_parts(module: torch.nn.Module) -> bool:
    return next(module.children(), None) is not None


def _has_global_hooks() -> bool:
    return any(
        getattr(module_code, f"_global_{kind}_hooks", ()) for kind in ("forward", "forward_pre")
    )


def _sign_surroundings() -> Any:
    """Return a comparison key of global state that code may depend on: gradients, autocast, default
    dtype, modes.
    """
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(x) and torch.get_autocast_dtype(x) for x in ("cpu", "cuda")),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
    )


def _name(graph: torch.fx.Graph, target: Any) -> str | None:
    """Return the name that tracing would give to an operation's node; None if it is no torch operation."""
    packet = getattr(target, "overloadpacket", None)
    return None if packet is None else graph._target_to_str(packet.__name__)


def _last(tracer: Any) -> Node:
    last: Node = tracer.graph._root.prev
    return last


def _list_after(tracer: Any, before: Node) -> list[Node]:
    found, node = [], before.next
    while node is not tracer.graph._root:
        found.append(node)
        node = node.next
    return found


def _list_paths(tracer: Any, module: torch.nn.Module) -> list[str]:
    return [tracer.submodule_paths.get(part, "") for part in module.modules()]


def _find_node(tracer: Any, tensor: Any) -> Node | None:
    """Return the graph node of a traced tensor; None if it has none or is a constant."""
    slot = proxy_tensor.get_proxy_slot(tensor, tracer, None)
    if slot is None or slot.constant is not None:
        return None
    node: Node = slot.proxy.node
    return node


def _list_weights(tracer: Any, module: torch.nn.Module) -> list[Node | None]:
    return [
        None if tensor is None else _find_node(tracer, tensor)
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for tensor in table.values()
    ]


def _read_given(tracer: Any, args: Any, kwargs: Any) -> _Given | None:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    nodes: dict[Node, int] = {}
    told: list[Any] = []
    for leaf in leaves:
        node = _find_node(tracer, leaf) if type(leaf) is FakeTensor else None
        if node is not None:
            number = nodes.setdefault(node, len(nodes))
            told.append((number, _sign_tensor(leaf)))
        elif type(leaf) in _PLAIN:
            told.append((type(leaf), leaf))
        else:
            return None
    return _Given(leaves, spec, list(nodes), (str(spec), tuple(told)))


def _is_untouched(tracer: Any, arguments: Any, given: _Given) -> bool:
    """Return whether a traced call left its arguments unchanged; else its nodes can't be copied for
    another call.
    """
    args, kwargs = arguments
    after = _read_given(tracer, args, kwargs)
    return (
        after is not None
        and (after.sign, after.nodes) == (given.sign, given.nodes)
        and all(x is y for x, y in zip(after.leaves, given.leaves, strict=True))
    )


def _tell_output(tracer: Any, output: Any, given: _Given) -> tuple[list[Any], Any] | None:
    leaves, spec = pytree.tree_flatten(output)
    places = {id(x): number for number, x in enumerate(given.leaves) if type(x) is FakeTensor}
    told: list[Any] = []
    for leaf in leaves:
        if id(leaf) in places:
            told.append(_Argument(places[id(leaf)]))
        elif type(leaf) is FakeTensor:
            node = _find_node(tracer, leaf)
            if node is None or _sign_tensor(node.meta.get("val")) != _sign_tensor(leaf):
                return None
            told.append(node)
        elif type(leaf) in _PLAIN:
            told.append(leaf)
        else:
            return None
    return told, spec


def _are_whole(nodes: list[Node], known: set[Node | None], output: list[Any]) -> bool:
    """Return whether a call's nodes can be copied: they read only one another or `known` nodes.

    Their sizes must be constants, and they may not depend on an offset in storage.

    Args:
        known: nodes of the call's arguments and weights, and the nodes themselves.
        output: leaves of the call's output; nodes among them must be the call's own.
    """
    made = {*nodes}
    return all(x in made for x in output if isinstance(x, Node)) and all(
        node.op == "call_function"
        and node.target not in _OF_STORAGE
        and "unbacked_bindings" not in node.meta
        and all(x in known for x in node.all_input_nodes)
        and all(map(_has_numbers, pytree.tree_leaves(node.meta.get("val"))))
        for node in nodes
    )


def _has_numbers(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return all(type(x) is int for x in (*value.shape, *value.stride()))
    return value is None or type(value) in _PLAIN


def _place(
    nodes: list[Node], depth: int, numbers: Mapping[str, int], calls: Mapping[str, int]
) -> list[list[tuple[int, int, str]]] | None:
    """Return where in the traced block each node was computed, so that copies get the same module paths.

    Args:
        depth: number of modules around the block.
        numbers: maps paths of the block's parts to their indices.
        calls: number of calls of each part before the block was called.

    Returns:
        For each node, the modules around it inside the block: index of the part, number of its earlier
        calls within the block, and class. None if a node isn't inside the block.
    """
    placed = []
    for node in nodes:
        found = []
        for key, (path, kind) in list(node.meta["nn_module_stack"].items())[depth:]:
            if path not in numbers:
                return None
            done = int(key[len(path) + 1 :] or 0)
            found.append((numbers[path], done - calls.get(path, 0), kind))
        placed.append(found)
    return placed


def _make_output(
    tracer: Any, known: _Traced, places: Mapping[Any, Any], given: _Given
) -> list[Any]:
    """Make the output of a module call that is copied, not run: fake tensors that the tracer links to
    the copied nodes.
    """
    made: dict[Node, Any] = {}
    with torch._C.DisableTorchFunction(), proxy_tensor.disable_proxy_modes_tracing():
        for node in (x for x in known.output if isinstance(x, Node)):
            if node not in made:
                made[node] = proxy_tensor.extract_val(node.meta["val"])
                slot = proxy_tensor._ProxyTensor(Proxy(places[node], tracer), None)
                proxy_tensor.set_proxy_slot(made[node], tracer, slot)
    leaves = []
    for leaf in known.output:
        if isinstance(leaf, _Argument):
            leaves.append(given.leaves[leaf.number])
        else:
            leaves.append(made[leaf] if isinstance(leaf, Node) else leaf)
    return leaves


def _sign_tensor(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return None
    with torch._C.DisableTorchFunction():
        return (
            *(tuple(tensor.shape), tensor.stride(), tensor.dtype),
            *(tensor.device, tensor.requires_grad),
        )


class _Description:
    """Comparison key of everything that decides a module's behaviour: classes, attributes, weights'
    shapes, hooks.

    Two modules with equal keys run the same code, so one's traced nodes can be copied for the other.
    Objects of unknown kinds compare by identity.
    """

    def __init__(self, module: torch.nn.Module, held: list[Any]) -> None:
        self._parts = list(module.modules())
        self._numbers = {id(x): number for number, x in enumerate(self._parts)}
        self._tensors: dict[int, int] = {}
        self._held, self._around = held, set[int]()

    def sign(self) -> Any:
        """Return the comparison key; None if foreign hooks or a replaced `forward` may have other
        effects.
        """
        told = []
        for part in self._parts:
            hooks = self._sign_hooks(part)
            if hooks is None or "forward" in vars(part):
                return None
            attributes = tuple(
                (name, self._tell(value))
                for name, value in vars(part).items()
                if name not in _COMPARED
                and not (name.endswith(("_hooks_with_kwargs", "_hooks_always_called")))
            )
            children = tuple(
                (name, None if x is None else self._numbers[id(x)])
                for name, x in part._modules.items()
            )
            weights = tuple(
                (name, None if x is None else self._tell_weight(x))
                for table in (part._parameters, part._buffers)
                for name, x in table.items()
            )
            told.append((type(part), attributes, children, weights, hooks))
        return tuple(told)

    def _tell_weight(self, tensor: torch.Tensor) -> Any:
        number = self._tensors.setdefault(id(tensor), len(self._tensors))
        return number, _sign_tensor(tensor)

    def _sign_hooks(self, part: torch.nn.Module) -> Any:
        told: list[Any] = []
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            for number, hook in vars(part)[name].items():
                if isinstance(hook, CallObserver):
                    continue
                if type(hook) is not partial or not hook.func.__module__.startswith("stopdown."):
                    return None
                flags = [
                    number in vars(part).get(f"{name}{flag}", ())
                    for flag in ("_with_kwargs", "_always_called")
                ]
                told.append((name, self._tell(hook), *flags))
        return tuple(told)

    def _tell(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is RunningCalls:  # what hooks keep while a call runs says nothing of the module
            return kind
        if id(value) in self._numbers:
            return torch.nn.Module, self._numbers[id(value)]
        if id(value) in self._around:
            return self._tell_itself(value)
        self._around.add(id(value))
        try:
            return self._look_into(value)
        finally:
            self._around.discard(id(value))

    def _look_into(self, value: Any) -> Any:
        kind = type(value)
        if kind in (tuple, list):
            return kind, tuple(map(self._tell, value))
        if kind in (set, frozenset):
            return kind, frozenset(map(self._tell, value))
        if kind in (dict, OrderedDict):
            return kind, tuple((self._tell(name), self._tell(x)) for name, x in value.items())
        if kind is partial:
            return kind, self._tell([value.func, value.args, value.keywords])
        if kind is types.MethodType:
            return kind, self._tell([value.__func__, value.__self__])
        if not isinstance(value, (torch.nn.Module, type)) and _is_plain_object(value):
            return kind, self._tell(vars(value))
        return self._tell_itself(value)

    def _tell_itself(self, value: Any) -> Any:
        self._held.append(value)
        return type(value), id(value)


class _Plain:
    """Empty class, whose instances have no state outside their `__dict__`.

    A class whose memory layout has the same sizes has none either.
    """


def _is_plain_object(value: Any) -> bool:
    """Return whether all state of an object is in its `__dict__`, so that comparing this suffices.

    An example is an attention processor.
    """
    kind = type(value)
    sizes = kind.__basicsize__, kind.__itemsize__
    return sizes == (_Plain.__basicsize__, _Plain.__itemsize__) and hasattr(value, "__dict__")
