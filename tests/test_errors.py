"""The tree of exceptions, and the parts of a message."""

from __future__ import annotations

import inspect
import re
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from stopdown import errors
from stopdown.errors import StopdownError, ignoring_warnings

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


def test_a_foreign_text_gets_its_full_stop() -> None:
    """What another program said often ends without a stop; ours are joined as they are."""
    error = StopdownError("It ran out of memory: 8 GiB (CUDA)", expected="Why?", remedy="Use -v")
    assert str(error) == "It ran out of memory: 8 GiB (CUDA). Why? Use -v"
    assert error.what == "It ran out of memory: 8 GiB (CUDA)"
    assert (
        str(StopdownError('It was "calibrated."', remedy="Use -v")) == 'It was "calibrated." Use -v'
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


def test_blocks_of_two_threads_that_overlap_leave_no_filter() -> None:
    """The one that began first ends first: each ignores its own, and no list keeps anything."""
    before = list(warnings.filters)
    first, second = ignoring_warnings(FutureWarning, "old"), ignoring_warnings(RuntimeWarning)
    first.__enter__()
    with warnings.catch_warnings():  # of another thread: it copies the list
        warnings.simplefilter("error")
        second.__enter__()
        first.__exit__(None, None, None)
        warnings.warn("NaN", RuntimeWarning, stacklevel=1)
        with pytest.raises(FutureWarning, match="old"):
            warnings.warn("old", FutureWarning, stacklevel=1)
    second.__exit__(None, None, None)
    assert warnings.filters == before


def test_filters_that_threads_put_on_and_take_off_are_all_gone() -> None:
    """Eight threads that come and go leave the list as it was."""
    before = list(warnings.filters)

    def come_and_go(number: int) -> None:
        with ignoring_warnings(UserWarning, str(number % 3)):
            time.sleep(0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, range(400)))
    assert warnings.filters == before
