"""Intercept the calls of each component: every one of them goes through functions put there.

A stack of layers on one method of one object is called from the outermost to the innermost. Each layer
has a declared `Rank`, which says how far outside it lies, whoever comes first. The stack sits in the
instance's own `__dict__` and is gone with its last layer, so layers come off in any order and leave
nothing behind. The original is called last; what it returns is passed on
untouched. Of a module that was compiled in place the stack sits around the compiled code;
code that is compiled later around a stack goes past it, without a graph break.

**Catches** calls of whole components, as pipelines make them.
**Does not catch** calls of a submodule from outside (`text_encoder.encoder(...)`), or of other
methods (`get_image_features`).
"""

from __future__ import annotations

import contextlib
import copy
import enum
import fnmatch
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stopdown.component_calls.components import DIFFUSERS_KEEPS, GENERAL_KEEPS, Callee, find_adapter
from stopdown.component_calls.outermost_calls import entered, listen
from stopdown.interception.arguments import put_back, replace_tensors
from stopdown.interception.patches import Patches
from stopdown.interception.tracing import is_traced

Call = Callable[..., Any]
Layer = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a method: what to call next, its positional and its keyword arguments."""

_CHANGING = threading.RLock()
"""Held while layers are put on or taken off; those of one method may belong to several threads."""

_Layers = tuple[tuple["Rank", Layer], ...]

UNPLANNED = "stopdown_unplanned"
"""Attribute of a module while it runs in fp32 without its plan, which does not hold for a call."""


class Rank(enum.IntEnum):
    """The layers around a call, from next to the component outwards; of one rank, the later is outside."""

    DEVICES = 0  # shares the rows of a call among several devices
    COMPONENT = 1  # keeps what the component is called with, and casts it as its weights were cast
    PLAN = 2  # casts at boundaries, sets how sums are done, compares adapters
    MEMORY = 3  # brings weights to the device, cuts attention into pieces
    FAULT = 4  # makes a call go wrong, for tests
    GUARD = 5  # checks what came out; repairs the component and runs the call again
    RECORD = 6  # measures and keeps calls for comparisons, plans and dry runs
    BRANCHES = 7  # makes calls that come one after the other on several devices at once
    JOURNAL = 8  # answers a call from a file, or writes it there
    TURN = 9  # keeps other threads from changing the module during a call
    EXPONENTS = 10  # takes exponents off for calls that they do not hold for


class _Stack:
    """The layers on one method of one object, innermost first."""

    def __init__(self, owner: object, method: str) -> None:
        self.original: Call = getattr(owner, method)
        self.layers: _Layers = ()  # replaced, never changed: a call keeps its own
        self.patches = Patches()

        self.call = call = _StackCall(self)
        is_class = isinstance(owner, type)
        put: Any = self.patches.set_class_attribute if is_class else self.patches.set_attribute
        put(owner, method, call)
        self.owner = owner

    def hide(self, patches: Patches, method: str) -> None:
        """Let this thread find what was there before in the stack's place, until `patches` is undone."""
        patches.set_attribute(self.owner, method, _Bypass(self))

    def add(self, entry: tuple[Rank, Layer]) -> None:
        """Put one layer at the place of its rank."""
        self.layers = tuple(sorted((*self.layers, entry), key=lambda one: one[0]))

    def remove(self, entry: tuple[Rank, Layer]) -> None:
        """Take one layer off, and the stack with the last one."""
        with _CHANGING:
            self.layers = tuple(other for other in self.layers if other is not entry)
            if not self.layers:
                self.patches.undo()


class _StackCall:
    """What stands in the place of a method; a copy of the module has the method itself there, its own."""

    def __init__(self, stack: _Stack) -> None:
        functools.update_wrapper(self, stack.original)
        self.stopdown_stack = stack
        self.__code__ = type(self).__call__.__code__  # `module.compile()` asks for it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = self.stopdown_stack
        if is_traced():
            return stack.original(*args, **kwargs)
        return _enter(stack.original, stack.layers, args, kwargs)

    def __get__(self, instance: object, owner: type) -> Any:
        """Bind it like a function: a stack of a class is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.stopdown_stack.original, memo)


class _Bypass:
    """In the place of a stack: for the thread that made it and for copies of the module it is not there."""

    def __init__(self, stack: _Stack) -> None:
        functools.update_wrapper(self, stack.original)
        if owner := getattr(stack.original, "__self__", None):
            self.__self__ = owner
        self.stopdown_stack, self._thread = stack, threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = self.stopdown_stack
        is_own = threading.get_ident() == self._thread
        return (stack.original if is_own else stack.call)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.stopdown_stack.original, memo)


def _enter(original: Call, layers: _Layers, args: Any, kwargs: Any) -> Any:
    """Call the outermost of these layers, or the original when there is none."""
    if not layers:
        return original(*args, **kwargs)

    def call_next(*args: Any, **kwargs: Any) -> Any:
        return _enter(original, layers[:-1], args, kwargs)

    _, outermost = layers[-1]
    return outermost(call_next, args, kwargs)


def put_layer(owner: object, method: str, layer: Layer, patches: Patches, rank: Rank) -> None:
    """Lead the calls of a method through `layer`, until `patches` is undone.

    Args:
        rank: outside of the layers of a lower or the same rank, inside of those of a higher one.
    """
    entry = (rank, layer)
    with _CHANGING:
        found = vars(owner).get(method)
        stack = _find_stack(found)
        if (
            stack is None or stack.call is not found
        ):  # a wrapper copies the attributes of a function
            stack = _Stack(owner, method)
        stack.add(entry)
    patches.defer(functools.partial(stack.remove, entry))


def has_layer(owner: object, method: str, rank: Rank) -> bool:
    """Whether a layer of a rank lies on a method."""
    stack = _find_stack(vars(owner).get(method))
    return stack is not None and any(x is rank for x, _ in stack.layers)


def _find_stack(found: object) -> _Stack | None:
    return getattr(found, "stopdown_stack", None)


def intercept(callee: Callee, layer: Layer, patches: Patches, rank: Rank) -> None:
    """Lead one component call through `layer`, until `patches` is undone."""
    put_layer(callee.owner, find_slot(callee), layer, patches, rank)


def intercept_components(
    program: Any, put: Callable[[Callee, Patches], object], patches: Patches
) -> None:
    """Put something around every component call of a program, until `patches` is undone.

    Args:
        put: given a call, and the patches that take off what it puts there. Around calls that are found as
            they happen it is there during the call alone.
    """
    adapter = find_adapter(program)
    for callee in adapter.find_callees(program):
        put(callee, patches)
        if not adapter.is_pipeline:
            intercept(callee, functools.partial(_enter_call, callee), patches, Rank.JOURNAL)
    names = {id(module): name for name, module in adapter.name_modules(program).items()}

    @contextlib.contextmanager
    def meet(module: torch.nn.Module, method: str) -> Iterator[None]:
        with Patches() as layers:
            if method == "forward" and id(module) in names:
                put(Callee(names[id(module)], module, method, "call", GENERAL_KEEPS), layers)
            yield

    if names:
        listen(meet, patches)


def _enter_call(callee: Callee, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A method that a program calls is the outermost call, and what it calls is inside."""
    with entered(callee.owner, callee.method):
        return call(*args, **kwargs)


def find_slot(callee: Callee) -> str:
    """The attribute through which a component call go: the compiled code of a module that has it."""
    is_compiled = getattr(callee.owner, _COMPILED, None) is not None
    return _COMPILED if callee.method == "forward" and is_compiled else callee.method


_COMPILED = "_compiled_call_impl"


@contextlib.contextmanager
def bared(module: torch.nn.Module) -> Iterator[None]:
    """The module as it is beneath all layers, in this thread: a capture must find no trace of them."""
    stacks = {name: stack for name, found in vars(module).items() if (stack := _find_stack(found))}
    with Patches() as patches:
        for name, stack in stacks.items():
            stack.hide(patches, name)
        yield


def copy_layers(source: torch.nn.Module, target: torch.nn.Module, below: Rank | None) -> None:
    """Put the layers of one module on a copy of it, in their order; those `below` a rank alone."""
    patches = Patches()  # never undone: they belong to the copy
    for name, found in list(vars(source).items()):
        stack = _find_stack(found)
        for rank, layer in stack.layers if stack is not None else ():
            if below is None or rank < below:
                put_layer(target, name, layer, patches, rank)


def drop_upcast(module: torch.nn.Module, patches: Patches) -> bool:
    """Tell a pipeline that an autoencoder needs no fp32 any more; whether it would have used it."""
    config: Any = getattr(module, "config", None)
    if not getattr(config, "force_upcast", False):
        return False
    patches.set_attribute(module, "_internal_dict", type(config)({**config, "force_upcast": False}))
    return True


def put_cast(callee: Callee, dtype: torch.dtype, patches: Patches) -> None:
    """Bring a component call's floating arguments to the dtype of its weights, and its outputs back.

    What a decoder returns stays as it is: it is the picture, and nothing computes with it.

    Args:
        callee: where.
        dtype: of most of its weights. Pipelines that cast a component for one call (Stable Video
            Diffusion does so with its autoencoder) are followed.
        patches: where the layer is put.
    """
    module = find_module(callee)
    sample = next((weight for weight in module.parameters() if weight.dtype == dtype), None)

    def cast(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wanted = dtype if sample is None else sample.dtype
        is_left = sample is None and {x.dtype for x in module.parameters()} == {torch.float32}
        if is_left or vars(module).get(UNPLANNED, False):
            wanted = torch.float32  # the plan is off again, or another thread is taking it off
        return call_cast(callee, call, args, kwargs, wanted)

    intercept(callee, cast, patches, Rank.PLAN)


def call_cast(
    callee: Callee, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Any:
    """One component call with its floating arguments in `dtype`, its outputs as they came."""
    names = find_argument_names(callee)
    came_as = find_float_dtype({**dict(zip(names, args, strict=False)), **kwargs})
    cast = functools.partial(_cast, dtype=dtype)
    keeps = functools.partial(is_kept, keeps=callee.keeps)
    args, kwargs, replaced = replace_tensors(args, kwargs, cast, names=names, keeps=keeps)
    try:
        output = call(*args, **kwargs)
    finally:
        put_back(replaced)
    if came_as is None or callee.stage == "decode":
        return output
    return cast_floats(output, came_as)


def find_argument_names(callee: Callee) -> tuple[str, ...]:
    """The names of what a component call's method takes, in order."""
    return _read_names(type(callee.owner), callee.method)  # type: ignore[arg-type]


@functools.cache
def _read_names(owner: type, method: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(owner, method)).parameters)[1:]


def find_module(callee: Callee) -> torch.nn.Module:
    """The module whose weights a component call uses: its owner, or another one that serves for it."""
    method = getattr(callee.owner, callee.method)
    method = inspect.unwrap(method, stop=lambda found: hasattr(found, "__self__"))
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else callee.owner


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same nest with floating tensors in `dtype`; times and positions in dicts stay as they are."""
    return map_tensors(value, functools.partial(_cast, dtype=dtype), keeps=is_kept)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def map_tensors(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    *,
    keeps: Callable[[str], bool] = lambda name: False,
) -> Any:
    """The same nest with every tensor changed, also inside what an autoencoder encodes to.

    Args:
        keeps: whether what a dict has under a name stays as it is.
    """
    again = functools.partial(map_tensors, change=change, keeps=keeps)

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if isinstance(leaf, dict):
            changed = {k: x if keeps(str(k)) else again(x) for k, x in leaf.items()}
            return changed if type(leaf) is dict else type(leaf)(**changed)
        if isinstance(leaf, (list, tuple)):  # a class of these that pytree does not know
            return type(leaf)(map(again, leaf))
        if _is_distribution(leaf):
            leaf = copy.copy(leaf)
            vars(leaf).update({name: again(x) for name, x in vars(leaf).items()})
        return leaf

    return pytree.tree_map(visit, value, is_leaf=lambda x: isinstance(x, dict))


def sign_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What tells apart calls that give different graphs: shapes, dtypes and plain arguments."""
    leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    return "|".join([str(spec), *map(_sign, leaves)])


def _sign(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{tuple(leaf.shape)}"
    plain = (bool, int, float, str, bytes, type(None), torch.dtype)
    return repr(leaf) if isinstance(leaf, plain) else type(leaf).__name__


def _is_distribution(value: Any) -> bool:
    """Whether this is what an autoencoder encodes to: a mean and a spread, which is sampled later."""
    return callable(getattr(value, "sample", None)) and callable(getattr(value, "mode", None))


def find_float_dtype(arguments: dict[str, Any]) -> torch.dtype | None:
    """The dtype of the first floating tensor among arguments that are cast, None without one."""
    found: list[torch.dtype] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.extend([tensor.dtype] * tensor.is_floating_point())
        return tensor

    map_tensors(arguments, note, keeps=is_kept)
    return next(iter(found), None)


def is_kept(name: str, keeps: tuple[str, ...] = DIFFUSERS_KEEPS) -> bool:
    """Whether an argument of this name keeps its dtype: times and positions."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in keeps)
