"""Run functions around each outermost module call: one that isn't made inside another module's call.

While there are listeners, `torch.nn.Module.__call__` is replaced: each listener is entered around each
call that a thread makes outside of all modules. A method that a program calls on a module (`vae.decode`)
counts as such a call while it is `entered`, or if `intercept_methods` has wrapped it.

Not covered: calls inside of compiled code, and those in traced or transformed code (`torch.jit`,
`torch.func`, recording of a CUDA graph), where no value can be read.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from stopdown.interception.patches import Patches
from stopdown.interception.tracing import CALLS_REPLACED, is_traced

Ending = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""A function from a call's output and its arguments to what the caller receives."""

Listener = Callable[[torch.nn.Module, str], AbstractContextManager[Ending | None]]
"""A function from a module and the name of its called method to a context manager around the call.

What the context manager yields, if anything, is called once all listeners' contexts are left.
"""


class _Thread(threading.local):
    """What a thread is inside of: an outermost call, and owners whose methods have no layers here."""

    outermost: tuple[torch.nn.Module, str] | None = None
    bared: tuple[object, ...] = ()


THREAD = _Thread()
_listeners: tuple[
    tuple[weakref.ref[Listener], bool], ...
] = ()  # replaced, never changed: a call keeps its own
_call_on: Callable[..., Any] | None = None  # a tracer may have put back what was there before it
_patches = Patches()


def find_outermost() -> torch.nn.Module | None:
    """Return the module of this thread's outermost call in progress; None outside of calls."""
    return None if THREAD.outermost is None else THREAD.outermost[0]


def is_enclosed(module: torch.nn.Module, method: str) -> bool:
    """Return whether this thread is inside an outermost call of another module or method than this one."""
    found = THREAD.outermost
    return found is not None and (found[0] is not module or found[1] != method)


@contextlib.contextmanager
def entered(module: torch.nn.Module, method: str) -> Iterator[None]:
    """Count a call as its thread's outermost one inside the block, unless another is in progress."""
    before = THREAD.outermost
    THREAD.outermost = before if before is not None else (module, method)
    try:
        yield
    finally:
        THREAD.outermost = before


def listen(listener: Listener, patches: Patches, *, in_transforms: bool = False) -> None:
    """Enter a context around each module call that isn't made inside another, until `patches` is undone.

    Args:
        listener: returns the context manager for a module and the name of its method. If it's collected,
            listening ends as well.
        in_transforms: enter it also inside `torch.func` transforms, where no tensor value can be read.
    """
    global _listeners
    refer = weakref.WeakMethod if inspect.ismethod(listener) else weakref.ref
    entry = refer(listener, _stop)
    with CALLS_REPLACED:
        # first: a listener that is collected now leaves the calls on
        _listeners = (*_listeners, (entry, in_transforms))
        if vars(torch.nn.Module)["__call__"] is not _call_on:
            _put_on()
    patches.defer(functools.partial(_leave, listener, entry))  # and holds the listener


def _leave(listener: Listener, entry: weakref.ref[Listener]) -> None:
    _stop(entry)


def _stop(entry: weakref.ref[Listener]) -> None:
    global _listeners
    with CALLS_REPLACED:
        _listeners = tuple(x for x in _listeners if x[0] is not entry)
        if not _listeners:
            _patches.undo()


def _put_on() -> None:
    global _call_on
    original = vars(torch.nn.Module)["__call__"]

    @functools.wraps(original)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or THREAD.outermost is not None:
            return original(self, *args, **kwargs)
        if _hands_on(self, args, kwargs):
            return original(self, *args, **kwargs)
        return _call_met(self, "forward", lambda: original(self, *args, **kwargs), args, kwargs)

    _call_on = call
    _patches.set_class_attribute(torch.nn.Module, "__call__", call)


def _hands_on(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a module only passes a call on to a module among its arguments, as sgm's denoiser
    does.

    It then has no weights, and the other module's call is the outermost one.
    """
    is_given = any(isinstance(x, torch.nn.Module) for x in (*args, *kwargs.values()))
    return is_given and next(module.parameters(), None) is None


def _call_met(
    module: torch.nn.Module, method: str, call: Callable[[], Any], args: Any, kwargs: Any
) -> Any:
    """Make an outermost call inside all listeners' contexts, and apply their endings to its output."""
    with entered(module, method), contextlib.ExitStack() as stack:
        wanted = _listeners
        if not is_plain():
            wanted = tuple(x for x in wanted if x[1]) if is_transformed() else ()
        found = [entry() for entry, _ in wanted]
        ends = [stack.enter_context(x(module, method)) for x in found if x is not None]
        output = call()
    for end in ends:
        output = output if end is None else end(output, args, kwargs)
    return output


def intercept_methods(methods: tuple[str, ...], patches: Patches) -> None:
    """Count calls of methods such as `decode` as outermost calls of their modules, until `patches` is
    undone.

    Args:
        methods: names. They are wrapped in each class that has all of them, once a module of it is created.
    """
    original = vars(torch.nn.Module)["__init__"]
    known: set[type] = set()

    @functools.wraps(original)
    def init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) not in known:
            known.add(type(self))
            _wrap_methods(type(self), methods, patches)
        original(self, *args, **kwargs)

    patches.set_class_attribute(torch.nn.Module, "__init__", init)


def _wrap_methods(kind: type, methods: tuple[str, ...], patches: Patches) -> None:
    owners = [next((k for k in kind.__mro__ if name in vars(k)), object) for name in methods]
    found = [vars(owner).get(name) for name, owner in zip(methods, owners, strict=True)]
    if not all(map(inspect.isfunction, found)):
        return
    for name, owner, function in zip(methods, owners, found, strict=True):
        if function is not None and not hasattr(function, _MARK):
            patches.set_class_attribute(owner, name, _wrap_method(function, name))


def _wrap_method(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_own = getattr(type(self), name, None) is call  # and not that of a parent, called by hand
        if is_traced() or THREAD.outermost is not None or not is_own:
            return original(self, *args, **kwargs)
        # looked up late: with what the listeners put around it
        return _call_met(self, name, lambda: getattr(self, name)(*args, **kwargs), args, kwargs)

    setattr(call, _MARK, True)
    return call


_MARK = "stopdown_intercepted"


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Call no listener for this thread's module calls inside the block, because they are guarded
    otherwise.
    """
    with entered(_NOBODY, ""):
        yield


_NOBODY = torch.nn.Identity()


def is_in_training(module: torch.nn.Module) -> bool:
    """Return whether a call of a module made now is part of training, so that it isn't guarded.

    Training mode alone isn't enough, because it is a module's default.

    Cost: that of `wants_gradients`, for the first call in training mode with gradients enabled.
    """
    if not (module.training and torch.is_grad_enabled()):
        return False
    if module not in _trained:
        _trained[module] = wants_gradients(module)
    return _trained[module]


_trained: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def wants_gradients(module: torch.nn.Module) -> bool:
    """Return whether a module is being trained: a parameter has a gradient or is in an optimizer.

    Cost: if parameters require gradients, a search of all objects of the process, up to a second.
    """
    wanted = {id(x): x for x in module.parameters() if x.requires_grad}
    if not wanted or not torch.is_grad_enabled():
        return False
    if any(x.grad is not None for x in wanted.values()):
        return True
    optimizers: list[Any] = [x for x in gc.get_objects() if issubclass(type(x), Optimizer)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return any(id(x) in wanted for group in groups for x in group["params"])


def is_plain() -> bool:
    """Return whether tensor values can be read now, outside of traces, transforms and CUDA graphs."""
    is_recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)  # `make_fx`
    return not (is_recorded or is_transformed() or proxies or torch.jit.is_tracing())


def hides_overflow(module: torch.nn.Module) -> bool:
    """Return whether a call of a module runs in fp16 inside `torch.func`, where no overflow can be seen."""
    return is_transformed() and any(x.dtype == torch.float16 for x in module.parameters())


def is_transformed() -> bool:
    """Return whether this code runs inside a `torch.func` transform, where tensors are batched or dual."""
    return torch._C._functorch.peek_interpreter_stack() is not None
