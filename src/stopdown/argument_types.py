"""Refuse what Python callers give by mistake, before anything is done, in one sentence.

**Does not catch** a missing or an unknown argument: Python's own error names it.
"""

from __future__ import annotations

import inspect
from typing import Any

from stopdown.errors import OptionError

_MOST = 60
"""Characters of a value that are shown."""


def check_type(
    place: str, value: object, kinds: type | tuple[type, ...], expected: str, remedy: str
) -> None:
    """Refuse a value of a type that a function does not take.

    Args:
        place: the function and its argument: `make_plan(request=...)`.
        kinds: accepted types; `type(None)` for None.
    """
    if not isinstance(value, kinds):
        shown = repr(value).split("\n")[0]
        shown = shown if len(shown) <= _MOST else f"{shown[: _MOST - 1]}…"
        raise OptionError(
            f"{place} was given {shown}, a {type(value).__name__}.",
            expected=expected,
            remedy=remedy,
        )


def check_function(place: str, value: Any, example: str, arguments: int = 0) -> None:
    """Refuse a value that is not a function, or that does not accept so many arguments.

    Args:
        value: None is taken.
        example: a function that would do: `lambda: model(x)`.
        arguments: how many it is called with.
    """
    if value is None:
        return
    count = f"{arguments} arguments" if arguments else "no arguments"
    if not callable(value):
        check_type(place, value, (), f"It is a function that takes {count}.", f"Use {example}.")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # built-in functions do not say
        return
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        raise OptionError(
            f"{place} was given a function that cannot be called with {count}: {error}.",
            remedy=f"Use {example}.",
        ) from None
