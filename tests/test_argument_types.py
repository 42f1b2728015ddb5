"""Arguments of a wrong type are refused in one sentence that says what to give instead."""

from __future__ import annotations

import pytest

from stopdown.argument_types import check_function, check_type
from stopdown.errors import OptionError


def test_a_wrong_type_is_named_with_its_value() -> None:
    """The message shows the value, cut to a line, and its type; the right type passes."""
    check_type("f(x=...)", 3, (int, str), "", "")
    with pytest.raises(OptionError) as caught:
        check_type("f(x=...)", ["a" * 100], int, "It is a number.", "Use x=1.")
    assert caught.value.what.startswith("f(x=...) was given ['aaa")
    assert caught.value.what.endswith("…, a list.")
    assert (caught.value.expected, caught.value.remedy) == ("It is a number.", "Use x=1.")


def test_a_function_takes_as_many_arguments_as_it_is_called_with() -> None:
    """None and a function that fits pass; a number, and a function of another signature, do not."""
    check_function("f(run=...)", None, "lambda: 1")
    check_function("f(run=...)", lambda a, b=1: a, "lambda a: a", arguments=1)
    with pytest.raises(OptionError, match="is a function that takes no arguments"):
        check_function("f(run=...)", 3, "lambda: 1")
    with pytest.raises(OptionError, match="can't be called with 2 arguments: too many positional"):
        check_function("f(run=...)", lambda a: a, "lambda a, b: a", arguments=2)
