"""The tree of exceptions, and the parts of a message."""

from __future__ import annotations

import inspect
import re

import pytest

from stopdown import errors
from stopdown.errors import StopdownError

EXCEPTIONS = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, Exception) and value.__module__ == errors.__name__
]


def test_a_message_joins_its_parts() -> None:
    """What, expected and remedy are kept apart and joined into one message."""
    error = StopdownError("It is wide.", expected="It must be narrow.", remedy="Use --width 8.")
    assert str(error) == "It is wide. It must be narrow. Use --width 8."
    assert (error.what, error.expected, error.remedy) == (
        "It is wide.",
        "It must be narrow.",
        "Use --width 8.",
    )


def test_absent_parts_leave_no_gap() -> None:
    """A message of one part is that part."""
    assert str(StopdownError("It is wide.")) == "It is wide."
    assert str(StopdownError("It is wide.", remedy="Use --width 8.")) == (
        "It is wide. Use --width 8."
    )


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_every_exception_has_the_root(kind: type[Exception]) -> None:
    """Whoever catches StopdownError catches all exceptions; the warning is a UserWarning."""
    assert issubclass(kind, StopdownError | UserWarning)
    assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.StopdownError, 1),
        (errors.InputError, 2),
        (errors.OptionError, 2),
        (errors.SourceError, 2),
        (errors.OutputError, 2),
        (errors.NonFiniteError, 1),
        (errors.PlanError, 2),
    ],
)
def test_every_exception_has_its_exit_code(kind: type[StopdownError], code: int) -> None:
    """What the user asked wrongly ends with 2, what went wrong with 1."""
    assert kind("It is wide.").exit_code == code


def test_the_drawn_tree_is_the_real_one() -> None:
    """The tree in the module's docstring names every class below the right parent."""
    drawn, parents = {}, {0: "Exception"}
    for indent, name in re.findall(r"^ {4}([│├└─ ]*)(\w+) {2,}", errors.__doc__ or "", re.M):
        depth = len(indent) // 4
        drawn[name] = "UserWarning" if name == "StopdownWarning" else parents[depth]
        parents[depth + 1] = name
    assert drawn == {kind.__name__: kind.__bases__[0].__name__ for kind in EXCEPTIONS}
