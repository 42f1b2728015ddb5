"""Intercept the calls of each component: every one of them goes through functions put there.

A stack of layers on one method of one object is called from the outermost to the innermost. Each layer
has a declared `Rank`, which says how far outside it lies, whoever comes first. The stack sits in the
instance's own `__dict__` and is gone with its last layer, so layers come off in any order and leave
nothing behind. The original is called last; what it returns is passed on
untouched. Of a module that was compiled in place the stack sits around the compiled code;
code that is compiled later around a stack goes past it, without a graph break.

Not covered: calls of a submodule from outside (`text_encoder.encoder(...)`), or of other methods
(`get_image_features`), unless a `PartCall` is there.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from stopdown.interception.own_hooks import run_with_hooks
from stopdown.interception.patches import CHANGING, Patches
from stopdown.interception.tracing import is_traced
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.module_calls.entrances import Entrance

Layer = Callable[[ComponentCall], Any]
"""Called instead of a method; goes on by `call.proceed()`, and returns the call's output."""

_Layers = tuple[tuple["Rank", Callee, Layer], ...]


class Rank(enum.IntEnum):
    """The layers around a call, from next to the component outwards; of one rank, the later is outside."""

    ENDS = 0  # multiplies arguments as the exponents of the weights need it
    COMPONENT = 1  # keeps what the component is called with, and casts it as its weights were cast
    PLAN = 2  # casts at boundaries, sets how sums are done, compares adapters
    MEMORY = 3  # brings weights to the device, cuts attention into pieces
    FAULT = 4  # makes a call go wrong, for tests
    GUARD = 5  # checks what came out; repairs the component and runs the call again
    RECORD = 6  # measures and keeps calls for comparisons, plans and dry runs
    JOURNAL = 7  # answers a call from a file, or writes it there
    TURN = 8  # keeps other threads from changing the module during a call
    EXPONENTS = 9  # has calls refused that exponents do not hold for


class _Stack:
    """The layers on one method of one object, innermost first."""

    def __init__(self, owner: object, method: str) -> None:
        self.original: Callable[..., Any] = getattr(owner, method)
        is_class = isinstance(owner, type)
        self.method, self._is_inherited = method, not is_class and method not in vars(owner)
        self.layers: _Layers = ()  # replaced, never changed: a call keeps its own
        self.patches = Patches()

        self.call = call = _StackCall(self)
        put: Any = self.patches.set_class_attribute if is_class else self.patches.set_attribute
        put(owner, method, call)
        self.owner: Any = owner
        self.is_forward = method == "forward" and isinstance(owner, torch.nn.Module)

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method without layers; a module's `forward` with the hooks that are part of it."""
        if self.is_forward:
            return run_with_hooks(self.owner, self.original, args, kwargs)
        return self.original(*args, **kwargs)

    def follow(self) -> None:
        """Lead to the function that the owner's class has now, if the owner had none of its own."""
        now = getattr(type(self.owner), self.method, None)
        if self._is_inherited and getattr(self.original, "__func__", now) is not now:
            self.original = types.MethodType(cast(Any, now), self.owner)

    def hide(self, patches: Patches, method: str) -> None:
        """Hide the stack from this thread, until `patches` is undone: it finds the original method."""
        patches.set_attribute(self.owner, method, _Bypass(self))

    def add(self, entry: tuple[Rank, Callee, Layer]) -> None:
        self.layers = tuple(sorted((*self.layers, entry), key=lambda one: one[0]))

    def remove(self, entry: tuple[Rank, Callee, Layer]) -> None:
        """Remove one layer, and the stack with the last one, unless somebody replaced it."""
        with CHANGING:
            self.layers = tuple(other for other in self.layers if other is not entry)
            found = vars(self.owner).get(self.method)
            if not self.layers and (found is self.call or isinstance(found, _Bypass)):
                self.patches.undo()


class _StackCall:
    """What is in the place of a method; a copy of the module has the method itself there, its own."""

    def __init__(self, stack: _Stack) -> None:
        functools.update_wrapper(self, stack.original)
        self.stopdown_stack = stack
        self.__code__ = type(self).__call__.__code__  # `module.compile()` asks for it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = self.stopdown_stack
        if is_traced():
            return stack.original(*args, **kwargs)
        stack.follow()
        return _enter(stack.call_original, stack.layers, args, kwargs)

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


def _enter(original: Callable[..., Any], layers: _Layers, args: Any, kwargs: Any) -> Any:
    """Call the outermost of these layers, or the original when there is none."""
    if not layers:
        return original(*args, **kwargs)

    def go_on(*args: Any, **kwargs: Any) -> Any:
        return _enter(original, layers[:-1], args, kwargs)

    _, callee, outermost = layers[-1]
    return outermost(ComponentCall(callee, args, kwargs, go_on))


def put_layer(
    owner: Any,
    method: str,
    layer: Layer,
    patches: Patches,
    rank: Rank,
    callee: Callee | None = None,
) -> None:
    """Lead the calls of a method through `layer`, until `patches` is undone.

    Args:
        rank: outside of the layers of a lower or the same rank, inside of those of a higher one.
        callee: the call's name for the layer; None for the method itself.
    """
    entry = (rank, callee or Callee(method, owner, method, "call"), layer)
    with CHANGING:
        found = vars(owner).get(method)
        stack = _find_stack(found)
        if (
            stack is None or stack.call is not found
        ):  # a wrapper copies the attributes of a function
            stack = _Stack(owner, method)
        stack.add(entry)
    patches.defer(functools.partial(stack.remove, entry))


def has_layer(owner: object, method: str, rank: Rank) -> bool:
    stack = _find_stack(vars(owner).get(method))
    return stack is not None and any(x is rank for x, *_ in stack.layers)


def _find_stack(found: object) -> _Stack | None:
    return getattr(found, "stopdown_stack", None)


def intercept(callee: Callee, layer: Layer, patches: Patches, rank: Rank) -> None:
    """Lead one component call through `layer`, until `patches` is undone."""
    put_layer(callee.owner, find_slot(callee), layer, patches, rank, callee)


def find_slot(callee: Callee) -> str:
    """Return the attribute that a component call goes through: the compiled code, else the method."""
    is_compiled = callee.method == "forward" and find_code(callee.owner) is not None
    return _COMPILED if is_compiled else callee.method


_COMPILED = "_compiled_call_impl"


class PartCall:
    """In the place of a part's compiled code: calls of the part alone go here. Copies do not have it."""

    __slots__ = ("callee", "code", "layer", "own", "whole")

    def __init__(self, whole: torch.nn.Module, callee: Callee, layer: Layer) -> None:
        """
        Args:
            callee: the part, under its path.
            layer: around calls that are none of the whole's.
        """
        self.whole, self.callee, self.layer = whole, callee, layer
        self.own = vars(callee.owner)
        self.code: Any = None  # what was there before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        below = self.code or self.callee.owner._call_impl
        if is_traced() or is_in_call(self.whole):
            return below(*args, **kwargs)
        return self.layer(ComponentCall(self.callee, args, kwargs, below))


_WHOLE = ("forward", "encode", "decode")


def is_in_call(whole: torch.nn.Module) -> bool:
    """Return whether this thread is in a module's own call, compiled or repeated by a backward pass.

    Cost: a look at each frame of the stack.
    """
    compiling = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    if compiling is not None or torch._C._current_graph_task_id() != -1:
        return True
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_meant = any(name in code.co_name for name in _WHOLE) and code.co_varnames
        if is_meant and frame.f_locals.get(code.co_varnames[0]) is whole:
            return True
        frame = frame.f_back
    return False


def show_parts(parts: list[PartCall]) -> None:
    """Lead calls of these parts through their layers. Cost: a tenth of a microsecond each."""
    for one in parts:
        if (found := one.own.get(_COMPILED)) is not one:
            one.code = found
            one.own[_COMPILED] = one


def hide_parts(parts: list[PartCall]) -> None:
    """Undo `show_parts`; code that was compiled since stays."""
    for one in parts:
        if one.own.get(_COMPILED) is one:
            if one.code is None:
                del one.own[_COMPILED]
            else:
                one.own[_COMPILED] = one.code


def find_code(module: object) -> Any:
    """Return the code that `compile()` gave a module, without our layers; None if it is not compiled."""
    found = getattr(module, _COMPILED, None)
    return found.code if isinstance(found, PartCall) else found


@contextlib.contextmanager
def bared(module: torch.nn.Module) -> Iterator[None]:
    """Hide all layers of a module in this thread, for a capture that must find no trace of them."""
    stacks = {name: stack for name, found in vars(module).items() if (stack := _find_stack(found))}
    with Patches() as patches:
        for name, stack in stacks.items():
            stack.hide(patches, name)
        yield


def copy_layers(source: torch.nn.Module, target: torch.nn.Module, below: Rank) -> None:
    """Put the layers of one module on a copy of it, in their order: those `below` a rank.

    The layer that scales the ends of a call is left out: a copy without weights has no exponents.
    """
    patches = Patches()  # never undone: they belong to the copy
    for name, found in list(vars(source).items()):
        stack = _find_stack(found)
        for rank, callee, layer in stack.layers if stack is not None else ():
            if Rank.ENDS < rank < below:
                put_layer(target, name, layer, patches, rank, callee)


def drop_upcast(module: torch.nn.Module, patches: Patches) -> bool:
    """Tell a pipeline that an autoencoder needs no fp32 any more; whether it would have used it."""
    config: Any = getattr(module, "config", None)
    if not getattr(config, "force_upcast", False):
        return False
    patches.set_attribute(module, "_internal_dict", type(config)({**config, "force_upcast": False}))
    return True


def put_cast(
    callee: Callee, dtype: torch.dtype, patches: Patches, *, as_plain: bool = True
) -> None:
    """Bring a component call's floating arguments to the dtype of its weights, and its outputs back.

    Args:
        dtype: of most of its weights. Pipelines that cast a component for one call (Stable Video
            Diffusion does so with its autoencoder) are followed.
        as_plain: arguments that `dtype` cannot hold are Inf then, as in any cast; False hands them on in
            fp32 (`entrances`).
    """
    module = find_module(callee)
    entrance = Entrance(module, patches)
    sample = next((weight for weight in module.parameters() if weight.dtype == dtype), None)

    def cast(call: ComponentCall) -> Any:
        wanted = sample.dtype if sample is not None else dtype
        now = {x.dtype for x in module.parameters()} if sample is None else set()
        if len(now) == 1 and now < {torch.float32, torch.bfloat16, torch.float16}:
            wanted = now.pop()  # a guard cast it, the plan is off again, or a thread takes it off
        if as_plain:
            return call.proceed_in(wanted)
        is_guarded = has_layer(callee.owner, find_slot(callee), Rank.GUARD)
        return entrance.proceed(call, wanted, refuses=not is_guarded)

    intercept(callee, cast, patches, Rank.PLAN)


def find_module(callee: Callee) -> torch.nn.Module:
    """Return the module whose weights a component call uses: its owner, or the owner of a bound method."""
    method = getattr(callee.owner, callee.method)
    method = inspect.unwrap(method, stop=lambda found: hasattr(found, "__self__"))
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else callee.owner
