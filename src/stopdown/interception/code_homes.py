"""Whose code a function, a hook or a callable object is: ours, a library's or a user's."""

from __future__ import annotations

from types import FunctionType
from typing import Any

OWN = "stopdown."


def find_home(value: Any) -> str:
    """Return the Python module with the code of a function, property or callable object, and a dot."""
    value = _unwrap(value.fget if isinstance(value, property) else value)
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        return f"{value.__globals__.get('__name__', '')}."
    return f"{type(value).__module__}."


def is_from(value: Any, homes: tuple[str, ...]) -> bool:
    """Return whether a hook's code, and the class that it is bound to if any, are from these modules.

    A library's method may call code of the user's class that overrides another method.
    """
    bound = getattr(_unwrap(value), "__self__", None)
    is_bound = bound is None or f"{type(bound).__module__}.".startswith(homes)
    return is_bound and find_home(value).startswith(homes)


def is_own(value: Any) -> bool:
    """Return whether a hook is one of Stopdown's."""
    return is_from(value, (OWN,))


def _unwrap(value: Any) -> Any:
    while (inner := getattr(value, "func", None)) is not None:
        value = inner
    return value
