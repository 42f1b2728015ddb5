"""Run functions ("layers") around a method of a module, to check, cast, record or repeat its calls.

The layers on one method of one object form a stack, called from the outermost to the innermost; the
original method is called last, and its output is passed on unchanged. Each layer has a `Rank`, which
decides how far outside it is, independent of the order in which layers are added. The stack is in the
instance's own `__dict__` and disappears with its last layer, so layers can be removed in any order and
leave nothing behind. If a module was compiled in place, the stack is around the compiled code; code that
is compiled later bypasses it, without a graph break.

Not covered: calls of a submodule from outside (`text_encoder.encoder(...)`), or of other methods
(`get_image_features`), unless there is a `PartCall`.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from stopdown.interception.module_paths import casts_weights
from stopdown.interception.own_hooks import run_with_hooks
from stopdown.interception.patches import CHANGING, Patches, ended_calls, refuse_pickling
from stopdown.interception.tracing import is_traced
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.module_calls.entrances import Entrance
from stopdown.module_calls.outermost_calls import THREAD

Layer = Callable[[ComponentCall], Any]
"""A function that runs around a method; it continues by `call.proceed()` and returns the output."""


@dataclass(frozen=True, eq=False)
class _Entry:
    rank: Rank
    callee: Callee
    layer: Layer


_Layers = tuple[_Entry, ...]


class Rank(enum.IntEnum):
    """The positions of layers around a call, innermost first; of the same rank, the later is outside.

    `ENDS` is next to the module, `EXPONENTS` is called first. A program's own layer usually has `RECORD`:
    it sees what the program passes and gets, repairs included.

    Examples:
        >>> Rank.PLAN < Rank.GUARD  # the guard is outside: it sees what the plan returns
        True
    """

    ENDS = 0  # multiplies arguments as the exponents of the weights require
    COMPONENT = 1  # records the component's actual arguments, and casts them like its weights
    PLAN = 2  # casts between components, checks adapters
    MEMORY = 3  # loads weights onto the device, computes attention in pieces
    FAULT = 4  # injects faults, for tests
    GUARD = 5  # checks the output; repairs the component and runs the call again
    RECORD = 6  # measures and records calls for comparisons, plans and dry runs
    JOURNAL = 7  # reads a call's output from a file, or writes it there
    TURN = 8  # keeps other threads from changing the module during a call
    EXPONENTS = 9  # refuses calls that the exponents don't hold for


class _Stack:
    """The layers (functions around a call) on one method of one object, innermost first."""

    def __init__(self, owner: object, method: str) -> None:
        self.original: Callable[..., Any] = getattr(owner, method)
        is_class = isinstance(owner, type)
        self.method = method
        self._is_inherited = (  # a compiled module passes on methods that its class doesn't have
            not is_class and method not in vars(owner) and hasattr(type(owner), method)
        )
        self.layers: _Layers = ()  # replaced, never changed: a call keeps its own
        self.patches = Patches()

        self.call = call = _StackCall(self)
        put: Any = self.patches.set_class_attribute if is_class else self.patches.set_attribute
        put(owner, method, call)
        self.owner: Any = owner
        self.is_forward = method == "forward" and isinstance(owner, torch.nn.Module)

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method without layers; a module's `forward` with its own hooks (`own_hooks`)."""
        if self.is_forward:
            return run_with_hooks(self.owner, self.original, args, kwargs)
        return self.original(*args, **kwargs)

    def follow(self) -> None:
        """Call the class's present function at the end, if the method was inherited and that has been
        replaced since.
        """
        now = getattr(type(self.owner), self.method, None)
        if self._is_inherited and getattr(self.original, "__func__", now) is not now:
            self.original = types.MethodType(cast(Any, now), self.owner)

    def add(self, entry: _Entry) -> None:
        self.layers = tuple(sorted((*self.layers, entry), key=lambda one: one.rank))

    def remove(self, entry: _Entry) -> None:
        """Remove one layer; with the last one, restore the method unless other code has replaced it."""
        with CHANGING:
            self.layers = tuple(other for other in self.layers if other is not entry)
            if not self.layers and vars(self.owner).get(self.method) is self.call:
                self.patches.undo()


class _StackCall:
    """Callable in place of a method, which runs the layers around it; a deep copy is that of the method."""

    def __init__(self, stack: _Stack) -> None:
        functools.update_wrapper(self, stack.original)
        self.stopdown_stack = stack
        self.__code__ = type(self).__call__.__code__  # `module.compile()` asks for it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = self.stopdown_stack
        if is_traced() or stack.owner in THREAD.bared:
            return stack.original(*args, **kwargs)
        stack.follow()
        with ended_calls():
            return _enter(stack.call_original, stack.layers, args, kwargs)

    @property
    def __self__(self) -> Any:
        return self.stopdown_stack.original.__self__  # type: ignore[attr-defined]

    def __get__(self, instance: object, owner: type) -> Any:
        """Bind like a function, so that a stack on a class is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.stopdown_stack.original, memo)

    def __reduce_ex__(self, protocol: object) -> str:
        refuse_pickling()


def _enter(original: Callable[..., Any], layers: _Layers, args: Any, kwargs: Any) -> Any:
    """Call the outermost of several layers around a method, or the method itself if there are none.

    The layer gets a `ComponentCall`, by which it calls the next one inwards.
    """
    if not layers:
        return original(*args, **kwargs)

    def go_on(*args: Any, **kwargs: Any) -> Any:
        return _enter(original, layers[:-1], args, kwargs)

    outermost = layers[-1]
    return outermost.layer(ComponentCall(outermost.callee, args, kwargs, go_on))


def put_layer(
    owner: Any,
    method: str,
    layer: Layer,
    patches: Patches,
    rank: Rank,
    callee: Callee | None = None,
) -> None:
    """Route the calls of a method through `layer`, until `patches` is undone.

    The patches don't keep the owner alive, so that a program can drop a component under a plan or guard.

    Args:
        owner: the module, object or class with the method.
        rank: the layer is outside of those of a lower or the same rank, and inside of higher ones.
        callee: describes the call to the layer; None names it by its method.
    """
    entry = _Entry(rank, callee or Callee(method, owner, method, "call"), layer)
    with CHANGING:
        found = vars(owner).get(method)
        stack = _find_stack(found)
        if (
            stack is None or stack.call is not found
        ):  # a wrapper copies the attributes of a function
            stack = _Stack(owner, method)
        stack.add(entry)
    patches.defer(functools.partial(_remove, weakref.ref(stack), weakref.ref(entry)))


def _remove(stack: weakref.ref[_Stack], entry: weakref.ref[_Entry]) -> None:
    if (held := stack()) is not None and (one := entry()) is not None:
        held.remove(one)


def has_layer(owner: object, method: str, rank: Rank) -> bool:
    found = vars(owner).get(method)
    stack = _find_stack(found.code if isinstance(found, PartCall) else found)
    return stack is not None and any(x.rank is rank for x in stack.layers)


def _find_stack(found: object) -> _Stack | None:
    return getattr(found, "stopdown_stack", None)


def intercept(callee: Callee, layer: Layer, patches: Patches, rank: Rank) -> None:
    """Route the calls of a component through `layer`, until `patches` is undone.

    Code that is compiled later bypasses the layer, and so does code that is being traced.

    Args:
        callee: the module, its method and the name that the layer sees.
        layer: receives each call as a `ComponentCall`; continues by `call.proceed()`, changed arguments
            (`proceed_with`) or casts (`proceed_in`); and returns the output.
        patches: undoing it removes the layer. Layers may be removed in any order.
        rank: the layer is outside of those of a lower or the same rank, and inside of higher ones.

    Raises:
        AttributeError: if the module has no such method.

    Examples:
        >>> module = torch.nn.Linear(4, 2)
        >>> def log(call):
        ...     output = call.proceed()
        ...     print(call.callee.name, tuple(output.shape))
        ...     return output
        >>> with Patches() as patches:
        ...     callee = Callee("denoiser", module, "forward", "denoise")
        ...     intercept(callee, log, patches, Rank.RECORD)
        ...     output = module(torch.ones(1, 4))
        denoiser (1, 2)
    """
    put_layer(callee.owner, find_slot(callee), layer, patches, rank, callee)


def find_slot(callee: Callee) -> str:
    """Return the attribute that a component's calls go through: its compiled code, or the method."""
    is_compiled = callee.method == "forward" and find_code(callee.owner) is not None
    return _COMPILED if is_compiled else callee.method


_COMPILED = "_compiled_call_impl"


class PartCall:
    """Callable in place of a submodule's compiled code, by which calls of the submodule alone are
    intercepted.

    Copies of the module don't have it.
    """

    __slots__ = ("callee", "code", "layer", "own", "whole")

    def __init__(self, whole: torch.nn.Module, callee: Callee, layer: Layer) -> None:
        """Prepare to intercept a submodule's calls; `show_parts` begins to.

        Args:
            whole: the component that the submodule belongs to.
            callee: the submodule, with its path as name.
            layer: runs around calls outside of a call of `whole`.
        """
        self.whole, self.callee, self.layer = whole, callee, layer
        self.own = vars(callee.owner)
        self.code: Any = None  # what was there before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        below = self.code or self.callee.owner._call_impl
        if is_traced() or is_in_call(self.whole):
            return below(*args, **kwargs)
        with ended_calls():
            return self.layer(ComponentCall(self.callee, args, kwargs, below))


_WHOLE = ("forward", "encode", "decode")


def is_in_call(whole: torch.nn.Module) -> bool:
    """Return whether this thread is inside a call of a module, or is compiling or running backward.

    Cost: one check for each frame of the Python stack.
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
    """Start to intercept calls of these submodules. Cost: 0.1 µs each."""
    for one in parts:
        if (found := one.own.get(_COMPILED)) is not one:
            one.code = found
            one.own[_COMPILED] = one


def hide_parts(parts: list[PartCall]) -> None:
    """Stop intercepting calls of these submodules; code that was compiled in the meantime stays."""
    for one in parts:
        if one.own.get(_COMPILED) is one:
            if one.code is None:
                del one.own[_COMPILED]
            else:
                one.own[_COMPILED] = one.code


def find_code(module: object) -> Any:
    """Return the code that `module.compile()` stored, without our wrapper; None if it isn't compiled."""
    found = getattr(module, _COMPILED, None)
    return found.code if isinstance(found, PartCall) else found


@contextlib.contextmanager
def bared(module: torch.nn.Module) -> Iterator[None]:
    """Bypass the layers that intercept a module's calls in this thread inside the block.

    A capture of the module therefore doesn't trace them.
    """
    before = THREAD.bared
    THREAD.bared = (*before, module)
    try:
        yield
    finally:
        THREAD.bared = before


def copy_layers(source: torch.nn.Module, target: torch.nn.Module, below: Rank) -> None:
    """Intercept the calls of a module's copy by the original's layers of a rank lower than `below`.

    The layer of rank `ENDS`, which scales arguments, is left out: a copy without weights has no exponents.
    """
    patches = Patches()  # never undone: they belong to the copy
    for name, found in list(vars(source).items()):
        stack = _find_stack(found)
        for one in stack.layers if stack is not None else ():
            if Rank.ENDS < one.rank < below:
                put_layer(target, name, one.layer, patches, one.rank, one.callee)


def drop_upcast(module: torch.nn.Module, patches: Patches) -> bool:
    """Clear `force_upcast` in an autoencoder's config, so that a pipeline doesn't cast it to fp32.

    Return whether it was set.
    """
    config: Any = getattr(module, "config", None)
    if not getattr(config, "force_upcast", False):
        return False
    patches.set_attribute(module, "_internal_dict", type(config)({**config, "force_upcast": False}))
    return True


def put_cast(
    callee: Callee,
    dtype: torch.dtype,
    patches: Patches,
    *,
    is_refusal: Callable[[Exception], bool] | None = None,
) -> None:
    """Cast a component's floating arguments to the dtype of its weights at each call, and its outputs back.

    If a pipeline casts the component for one call (Stable Video Diffusion does so with its autoencoder),
    its new dtype is used. Weights that the code casts at each call (`casts_weights`) don't count.

    Arguments such as timesteps and positions (`callee.keeps`) aren't cast. The output of a decoder, which
    is the picture, keeps the dtype in which it is computed.

    Args:
        callee: the module, its method and its stage.
        dtype: of most of its weights, or in which it computes.
        patches: undoing it ends the casts.
        is_refusal: recognises torch's error for two dtypes in one operation. With it, arguments that would
            overflow are passed on in fp32; None lets them overflow to Inf, as in any cast.

    Raises:
        ScalingError: from a call, with `is_refusal` and without a guard, if an argument would overflow and
            the component doesn't accept it in fp32.

    Cost: a cast for each argument and output of another dtype. With `is_refusal`, a host read for each
    argument tensor that is cast to fp16 and wasn't checked before.

    Examples:
        >>> module = torch.nn.Linear(4, 2).half()
        >>> with Patches() as patches:
        ...     callee = Callee("denoiser", module, "forward", "denoise")
        ...     put_cast(callee, torch.float16, patches)
        ...     module(torch.ones(1, 4)).dtype  # fp32 in, fp32 out
        torch.float32
    """
    module = find_module(callee)
    entrance = Entrance(module, patches)
    is_fixed = casts_weights(module)
    weights = () if is_fixed else module.parameters()
    sample = next((weight for weight in weights if weight.dtype == dtype), None)
    is_told = is_fixed or sample is not None

    def cast(call: ComponentCall) -> Any:
        wanted = sample.dtype if sample is not None else dtype
        now = set() if is_told else {x.dtype for x in module.parameters()}
        if len(now) == 1 and now < {torch.float32, torch.bfloat16, torch.float16}:
            wanted = now.pop()  # a guard cast it, the plan is off again, or a thread takes it off
        if is_refusal is None:
            return call.proceed_in(wanted)
        is_guarded = has_layer(callee.owner, find_slot(callee), Rank.GUARD)
        return entrance.proceed(call, wanted, None if is_guarded else is_refusal)

    intercept(callee, cast, patches, Rank.PLAN)


def find_module(callee: Callee) -> torch.nn.Module:
    """Return the module whose weights a component call uses.

    That is the module of the called method, which may be bound to another object than the call's owner.
    """
    method = getattr(callee.owner, callee.method)
    method = inspect.unwrap(method, stop=lambda found: hasattr(found, "__self__"))
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else callee.owner
