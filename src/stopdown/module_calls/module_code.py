"""The code that calls of a module run: functions of its parts, their classes and of torch, and hooks.

Exponents were found for the code that ran then. A layer whose `forward` is another function since, as
adapters, step caches and token mergers have it, computes with tensors that have no exponents.

**Catches** functions that are set on a part in the place of its class's; another class of a part; functions
of the classes of parts, and of what parts hold to be called, as attention processors; functions of
`torch.nn.functional`; forward hooks on parts and on all modules.
**Does not catch** hooks and wrappers of libraries, which place weights, compile and count, and call what
was there; kernels of attention, which compute the same; functions of other modules of Python that code
calls; what a function that was there before calls now.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.utils.hooks import RemovableHandle

from stopdown.interception.code_homes import OWN, find_home, is_from, is_own

MISSING: Any = object()
"""What an attribute is that is not there; of code, that what runs is the class's own."""

_LIBRARIES = (OWN, "accelerate.", "diffusers.", "transformers.", "peft.", "torch.")
_WRAPPING = ("accelerate.", "diffusers.hooks.", "torch._dynamo.")
"""Libraries that set a function on a part which calls what was there, under `__wrapped__`."""

_KERNELS = ("scaled_dot_product_attention",)
"""Functions of torch that people replace by faster ones."""

_RUN = ("forward", "__call__")
"""What a call runs of `torch.nn.Module`; its other methods move, cast and name weights."""

_BARE = (object, torch.nn.Module)

CODE_WORDS = ("another ", "a hook on ")
"""How what a signature says of replaced code and of hooks begins."""


def is_code(part: torch.nn.Module, name: str) -> bool:
    """Return whether an attribute of a part replaces a method that its calls may run."""
    kind = type(part)
    if not callable(getattr(kind, name, None)):
        return False
    return name in _RUN or not hasattr(torch.nn.Module, name)


def is_method(part: torch.nn.Module, name: str) -> bool:
    return callable(getattr(type(part), name, None))


def find_own_code(part: torch.nn.Module, name: str, value: Any) -> Any:
    """Return the code that replaces a method, beneath libraries' wrappers; `MISSING` for the class's own.

    Args:
        value: the part's attribute of that name.
    """
    of_class = _strip(inspect.getattr_static(type(part), name, None))
    while value is not MISSING:
        stack = getattr(value, "stopdown_stack", None)
        home = find_home(value)
        if stack is not None and home.startswith(OWN):
            value = stack.original
        elif home.startswith((OWN, *_WRAPPING)):
            value = getattr(value, "__wrapped__", MISSING)
        elif getattr(value, "__self__", part) is part:
            return MISSING if _strip(getattr(value, "__func__", value)) is of_class else value
        else:
            return value
    return MISSING


@dataclass
class Functions:
    """The functions of a class, or of a module of Python."""

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
        """Yield the name, the function before and the function now of each replaced function."""
        now = vars(self.owner)
        for name in {**self.known, **now}:
            before, value = self.known.get(name, MISSING), now.get(name, MISSING)
            if before is not value and name not in _KERNELS:
                before, value = _strip(before), _strip(value)
                is_stated = any(isinstance(x, property) and is_own(x) for x in (before, value))
                if (
                    before is not value
                    and not is_stated
                    and any(map(_is_function, (before, value)))
                ):
                    yield name, before, value


def _strip(value: Any) -> Any:
    """Return the function beneath our own layers on a class."""
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
    """List the classes of parts and of the callable objects they hold, then `torch.nn.functional`."""
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
    """Forward hooks that are not there because of a library, on parts and on all modules."""

    def __init__(self, parts: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """
        Args:
            parts: path and module of each, without the module itself, whose hooks run outside of it.
        """
        self._tables = _list_hook_tables(parts)
        self._first = {number for _, table in self._tables for number in table}
        self._new: list[tuple[str, Any, int]] = []
        self._registered = RemovableHandle.next_id

    def list_new(self) -> list[str]:
        """List the places of hooks that were registered since this was made, in words.

        Cost: a comparison of two numbers if no hook was put on any module of the process.
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
    """Return whether two values are the same function; a bound method is a new object each time."""
    return before is now or (isinstance(before, Callable) and before == now)  # type: ignore[arg-type]


def sign_code(parts: Sequence[tuple[str, torch.nn.Module]]) -> tuple[object, ...]:
    """Return a signature of the code that calls of these parts run, valid in this process.

    Args:
        parts: path and module of each, the module itself first.
    """
    own = [(path, name, _identify(found)) for path, name, found in _list_set_code(parts)]
    functions = [
        (one.path, name, id(_strip(value)))
        for one in list_functions(part for _, part in parts)
        for name, value in vars(one.owner).items()
        if name not in _KERNELS and _is_function(_strip(value))
    ]
    hooks = [(path, id(hook)) for path, hook in _list_hooks(parts)]
    return *((path, id(type(part))) for path, part in parts), *own, *functions, *hooks


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


def _identify(value: Any) -> object:
    """Return a function's identity; a bound method is a new object each time."""
    return id(getattr(value, "__self__", None)), id(getattr(value, "__func__", value))


def list_foreign_code(module: torch.nn.Module) -> tuple[str, ...]:
    """List in words the functions of a module that are neither its classes' nor a library's."""
    parts = list(module.named_modules())
    own = [
        ".".join(filter(None, (path, name)))
        for path, name, found in _list_set_code(parts)
        if not is_from(found, _LIBRARIES)
    ]
    functions = [
        f"{one.path}.{name}"
        for one in list_functions(part for _, part in parts)
        for name, value in vars(one.owner).items()
        if name not in _KERNELS
        and _is_function(_strip(value))
        and _is_elsewhere(one, _strip(value))
    ]
    return tuple(dict.fromkeys((*own, *functions)))


def _is_elsewhere(functions: Functions, value: Any) -> bool:
    """Return whether a function comes from another package than its class, and from no library."""
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType):
        return False
    owner = functions.owner
    package = getattr(owner, "__module__", None) or owner.__name__
    home = find_home(inspect.unwrap(value))
    return home.partition(".")[0] != package.partition(".")[0] and not home.startswith(_LIBRARIES)


def _list_hooks(parts: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, Any]]:
    """Yield the path and hook of each foreign forward hook, except those of the module itself."""
    for path, table in _list_hook_tables(parts[1:]):
        yield from ((path, x) for x in table.values() if not is_from(x, _LIBRARIES))


def _list_hook_tables(parts: Iterable[tuple[str, torch.nn.Module]]) -> list[tuple[str, Any]]:
    """List the path and table of the forward hooks of each part, and of those on all modules."""
    return [
        *((path, table) for path, x in parts for table in (x._forward_hooks, x._forward_pre_hooks)),
        ("", module_hooks._global_forward_hooks),
        ("", module_hooks._global_forward_pre_hooks),
    ]
