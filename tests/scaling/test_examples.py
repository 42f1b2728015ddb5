"""Each public name of the core has an example in its docstring, and the example is true."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch

import stopdown.scaling

NAMES = {name: getattr(stopdown.scaling, name) for name in stopdown.scaling.__all__}
GIVEN = {"torch": torch, **NAMES}


@pytest.mark.parametrize("name", stopdown.scaling.__all__)
def test_the_example_of_a_public_name_is_true(name: str, capsys) -> None:
    text = inspect.getdoc(NAMES[name]) or ""
    example = doctest.DocTestParser().get_doctest(text, dict(GIVEN), name, None, None)
    assert example.examples, f"{name} has no example"

    found = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(example)

    assert found.failed == 0, capsys.readouterr().out
