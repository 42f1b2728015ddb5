"""Tell whose a function, hook or callable is: Stopdown's, a library's, or the user's."""

from __future__ import annotations

from types import FunctionType
from typing import Any

OWN = "stopdown."


def find_home(value: Any) -> str:
    """Return the Python module that defines a function, property or callable, with a trailing dot."""
    value = _unwrap(value.fget if isinstance(value, property) else value)
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        return f"{value.__globals__.get('__name__', '')}."
    return f"{type(value).__module__}."


def is_from(value: Any, homes: tuple[str, ...]) -> bool:
    """Return whether a hook is defined in certain Python modules, by prefixes such as `diffusers.`.

    If it's a bound method, its object's class must be too, because the user's subclass of a library's class
    may override what the method calls.
    """
    bound = getattr(_unwrap(value), "__self__", None)
    is_bound = bound is None or f"{type(bound).__module__}.".startswith(homes)
    return is_bound and find_home(value).startswith(homes)


def is_own(value: Any) -> bool:
    """Return whether a hook or function was defined by Stopdown."""
    return is_from(value, (OWN,))


def _unwrap(value: Any) -> Any:
    while (inner := getattr(value, "func", None)) is not None:
        value = inner
    return value
