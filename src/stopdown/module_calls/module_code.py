"""Notice that somebody replaced code that a module's calls run: methods, classes, functionals and hooks.

Exponents hold for the code that they were found for. If a layer's `forward` is replaced afterwards, as by
adapters, step caches and token mergers, it computes with tensors that have no exponents.

**Catches** functions set on a submodule in place of its class's methods; another class of a submodule;
changed methods of submodules' classes and of callable objects that they hold, such as attention
processors; functions of `torch.nn.functional`; forward hooks on submodules and on all modules.

**Does not catch** hooks and wrappers of libraries that place weights, compile or count, and then call the
original, or that skip whole blocks; attention kernels, which compute the same; functions of other Python
modules; changes inside functions that the known ones call.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.utils.hooks import RemovableHandle

from stopdown.interception.code_homes import OWN, find_home, is_from, is_own
from stopdown.module_calls.step_caches import list_hooks

MISSING: Any = object()
"""The value of an attribute that doesn't exist; for code, it means that the class's own method runs."""

_LIBRARIES = (OWN, "accelerate.", "diffusers.", "transformers.", "peft.", "torch.")
_WRAPPING = ("accelerate.", "diffusers.hooks.", "torch._dynamo.")
"""Libraries that wrap a module's method by a function which calls the original (`__wrapped__`)."""

_SKIPPING = ("FeedForwardSkipHook", "AttentionProcessorSkipHook")
"""Diffusers' hooks that skip a layer whose input and output may have other exponents. A skipped block
keeps those of the residual stream, and attention without scores those of its values."""

_KERNELS = ("scaled_dot_product_attention",)
"""Functions of PyTorch that users replace by faster ones."""

_RUN = ("forward", "__call__")
"""Methods of `torch.nn.Module` that a call runs; the others move, cast and name weights."""

_BARE = (object, torch.nn.Module)

CODE_WORDS = ("another ", "a hook on ")
"""Beginnings of the parts of a signature that describe replaced code and hooks."""


def is_code(part: torch.nn.Module, name: str) -> bool:
    """Return whether a module's attribute of this name would replace a method that its calls may run."""
    kind = type(part)
    if not callable(getattr(kind, name, None)):
        return False
    return name in _RUN or not hasattr(torch.nn.Module, name)


def is_method(part: torch.nn.Module, name: str) -> bool:
    return callable(getattr(type(part), name, None))


def find_own_code(part: torch.nn.Module, name: str, value: Any) -> Any:
    """Return the function that a user has set in place of a module's method; `MISSING` if the class's
    own runs.

    Wrappers of libraries, which call the original, don't count.

    Args:
        name: of the method.
        value: the instance attribute of that name.
    """
    of_class = _strip(inspect.getattr_static(type(part), name, None))
    while value is not MISSING:
        stack = getattr(value, "stopdown_stack", None)
        home = find_home(value)
        if stack is not None and home.startswith(OWN):
            value = stack.original
        elif home.startswith((OWN, *_WRAPPING)) and not _is_skipped(part):
            value = getattr(value, "__wrapped__", MISSING)
        elif getattr(value, "__self__", part) is part:
            return MISSING if _strip(getattr(value, "__func__", value)) is of_class else value
        else:
            return value
    return MISSING


def _is_skipped(part: torch.nn.Module) -> bool:
    """Return whether a hook of Diffusers returns a layer's input in place of its output."""
    return any(
        type(x).__name__ in _SKIPPING and not getattr(x, "skip_attention_scores", False)
        for x in list_hooks(part)
    )


def list_differences(
    known: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each name whose objects in two mappings differ, with both; `MISSING` stands for none."""
    for name in {**known, **now}:
        before, value = known.get(name, MISSING), now.get(name, MISSING)
        if before is not value:
            yield name, before, value


@dataclass
class Functions:
    """The functions of a class or Python module, with a snapshot to find replaced ones.

    Attributes:
        path: of the class or module, for messages.
        known: the snapshot.
    """

    path: str
    owner: Any
    known: dict[str, Any] = field(default_factory=dict)

    def note(self) -> None:
        self.known = dict(vars(self.owner))

    def is_same(self) -> bool:
        try:
            return vars(self.owner) == self.known
        except Exception:  # what a class holds need not be comparable
            return False

    def list_changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield each function that was replaced since this object was made: its name, before and now."""
        for name, before, value in list_differences(self.known, vars(self.owner)):
            if name not in _KERNELS:
                before, value = _strip(before), _strip(value)
                is_stated = any(isinstance(x, property) and is_own(x) for x in (before, value))
                if (
                    before is not value
                    and not is_stated
                    and any(map(_is_function, (before, value)))
                ):
                    yield name, before, value


def _strip(value: Any) -> Any:
    """Return a class's method without the layers that Stopdown put on it."""
    while True:
        stack = getattr(value, "stopdown_stack", None)
        if stack is not None:
            value = getattr(stack.original, "__func__", stack.original)
        elif find_home(value).startswith(OWN) and hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        else:
            return value


def _is_function(value: Any) -> bool:
    value = getattr(value, "__func__", value)  # of static methods and those of classes
    return isinstance(value, (FunctionType, property)) and not find_home(value).startswith(OWN)


def list_functions(parts: Iterable[torch.nn.Module]) -> list[Functions]:
    """List the classes whose functions a module's calls may run, and `torch.nn.functional`.

    They are the classes of these submodules and of callables in their attributes, with base classes.
    """
    kinds: dict[type, None] = {}
    for part in parts:
        kinds[type(part)] = None
        for value in vars(part).values():
            kind = type(value)
            if kind.__module__ != "builtins" and isinstance(
                vars(kind).get("__call__"), FunctionType
            ):
                kinds[kind] = None
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    owners = [x for x in bases if x not in _BARE and x.__module__ not in ("builtins", "typing")]
    found = [Functions(kind.__qualname__, kind) for kind in owners]
    return [*found, Functions("torch.nn.functional", torch.nn.functional)]


class Hooks:
    """A snapshot of the forward hooks on submodules and on all modules, to find new ones of users."""

    def __init__(self, parts: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Take a snapshot of the hooks that are registered now.

        Args:
            parts: path and module of each submodule. The module itself is left out, because its hooks run
                outside of its code.
        """
        self._tables = _list_hook_tables(parts)
        self._first = {number for _, table in self._tables for number in table}
        self._new: list[tuple[str, Any, int]] = []
        self._registered = RemovableHandle.next_id

    def list_new(self) -> list[str]:
        """Describe each place with hooks that users have registered since the snapshot: `a hook on PATH`.

        Cost: a comparison of two numbers if no hook was registered in the process.
        """
        if self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            self._new = [
                (path, table, number)
                for path, table in self._tables
                for number, hook in table.items()
                if number not in self._first and not is_from(hook, _LIBRARIES)
            ]
        places = dict.fromkeys(path for path, table, number in self._new if number in table)
        return [f"a hook on {path}" if path else "a hook on all modules" for path in places]


def is_alike_code(before: Any, now: Any) -> bool:
    """Return whether two values are the same function; bound methods are compared by `==`."""
    return before is now or (isinstance(before, Callable) and before == now)  # type: ignore[arg-type]


def sign_code(parts: Sequence[tuple[str, torch.nn.Module]]) -> tuple[object, ...]:
    """Return a key of the code that a module's calls run; it is equal as long as nobody replaces any.

    It is valid in this process. It has weak references and no ids, because the next function may be at the
    address of one that is gone.

    Args:
        parts: (path, module) of the module itself and then of each submodule.
    """
    own = [(path, name, _identify(found)) for path, name, found in _list_set_code(parts)]
    functions = [(one.path, name, _refer(found)) for one, name, found in _list_class_code(parts)]
    hooks = [(path, _refer(hook)) for path, hook in _list_hooks(parts)]
    return *((path, _refer(type(part))) for path, part in parts), *own, *functions, *hooks


def _list_set_code(
    parts: Sequence[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, name and function of each attribute that replaces a method of the class."""
    for path, part in parts:
        for name, value in vars(part).items():
            if is_code(part, name):
                found = find_own_code(part, name, value)
                if found is not MISSING:
                    yield path, name, found


def _list_class_code(
    parts: Sequence[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[Functions, str, Any]]:
    """Yield the class, name and function of each method that a module's calls may run."""
    for one in list_functions(part for _, part in parts):
        for name, value in vars(one.owner).items():
            found = _strip(value)
            if name not in _KERNELS and _is_function(found):
                yield one, name, found


def _identify(value: Any) -> object:
    """Return a key of a function's identity: a bound method's object and function."""
    return _refer(getattr(value, "__self__", None)), _refer(getattr(value, "__func__", value))


def _refer(value: Any) -> object:
    """Return a weak reference, which is equal to another one as long as both are of one live object."""
    value = value.fget if isinstance(value, property) else value
    value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    try:
        return weakref.ref(value)
    except TypeError:  # of a class without weak references
        return id(value)


def list_foreign_code(module: torch.nn.Module) -> tuple[str, ...]:
    """List the names of functions that users have put on a module or its classes."""
    parts = list(module.named_modules())
    own = [
        ".".join(filter(None, (path, name)))
        for path, name, found in _list_set_code(parts)
        if not is_from(found, _LIBRARIES)
    ]
    functions = [
        f"{one.path}.{name}"
        for one, name, found in _list_class_code(parts)
        if _is_elsewhere(one, found)
    ]
    return tuple(dict.fromkeys((*own, *functions)))


def _is_elsewhere(functions: Functions, value: Any) -> bool:
    """Return whether a function comes from another package than its class, other than a known library."""
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType):
        return False
    owner = functions.owner
    package = getattr(owner, "__module__", None) or owner.__name__
    home = find_home(inspect.unwrap(value))
    return home.partition(".")[0] != package.partition(".")[0] and not home.startswith(_LIBRARIES)


def _list_hooks(parts: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, Any]]:
    """Yield the path and hook of each user's forward hook, except those on the module itself."""
    for path, table in _list_hook_tables(parts[1:]):
        yield from ((path, x) for x in table.values() if not is_from(x, _LIBRARIES))


def _list_hook_tables(parts: Iterable[tuple[str, torch.nn.Module]]) -> list[tuple[str, Any]]:
    """List the path and the hook dict of each module's forward hooks, and with "" the global ones."""
    return [
        *((path, table) for path, x in parts for table in (x._forward_hooks, x._forward_pre_hooks)),
        ("", module_hooks._global_forward_hooks),
        ("", module_hooks._global_forward_pre_hooks),
    ]
