"""Validation of argument types in public functions, before anything is done, with one-sentence errors.

**Does not catch** missing or unknown arguments, which Python's own error names.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from stopdown.errors import OptionError

_MOST = 60
"""Maximum number of characters of a value in an error."""

RANGES = ("measured", "bound", "auto")
"""Modes of ranges on which the exponents of a component can rest."""

RESIDUALS = ("native", "fp32")
"""Precisions of the residual stream: the model's own, or fp32."""


def check_type(
    place: str, value: object, kinds: type | tuple[type, ...], expected: str, remedy: str
) -> None:
    """Raise `OptionError` for a value of a type that a function does not accept.

    Args:
        place: function and argument, for the message: `make_plan(request=...)`.
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
    """Raise `OptionError` for a value that is not a function of a given number of arguments.

    Args:
        place: function and argument, for the message.
        value: the value; None is accepted.
        example: a valid function, for the message: `lambda: model(x)`.
        arguments: number of positional arguments with which it is called.
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
            f"{place} was given a function that can't be called with {count}: {error}.",
            remedy=f"Use {example}.",
        ) from None


def check_ranges(ranges: str | None) -> str:
    """Return a valid mode of ranges, `measured`, `bound` or `auto`; None means `measured`."""
    what = f"The mode of ranges {ranges!r}"
    return _choose(what, ranges, RANGES, 'Use ranges="auto", or leave it out.')


def check_residual(residual: str | None) -> str:
    """Return a valid precision of the residual stream, `native` or `fp32`; None means `native`."""
    what = f"The precision {residual!r} of the residual stream"
    return _choose(what, residual, RESIDUALS, 'Use residual="fp32", or leave it out.')


def _choose(what: str, given: str | None, known: Sequence[str], remedy: str) -> str:
    """Return a known value; None means the first. Refuse others, which `what` describes."""
    if given is None or given in known:
        return given or known[0]
    expected = f"Known values are {', '.join(known)}."
    raise OptionError(f"{what} is unknown.", expected=expected, remedy=remedy)
