"""Each public name, of the core and of `stopdown`, has an example in its docstring, which is true.

The names are those of both stubs. An example runs alone, in an empty folder.
"""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import stopdown
import stopdown.scaling

CORE = {name: getattr(stopdown.scaling, name) for name in stopdown.scaling.__all__}
NAMES = [*CORE, *(name for name in stopdown.__all__ if name not in CORE)]

SECONDS = {
    *("apply_plan", "check", "compare", "convert", "fp16", "guard", "load", "make_plan", "mend"),
    *("quantization", "read_plan", "write_plan", "StopdownConfig"),
}
"""Names whose example takes a second or more, mostly to import Diffusers."""


def find_value(name: str) -> Any:
    """Return what a public name is; those of `stopdown` load Diffusers, which collecting tests needn't."""
    return CORE.get(name) or getattr(stopdown, name)


def run_example(name: str, text: str) -> doctest.TestResults:
    """Run the example in a docstring; what it gives and should give is printed where these differ.

    It needs not import what `docs/api.md` assumes.
    """
    given = {"torch": torch} | (CORE if name in CORE else {"stopdown": stopdown})
    example = doctest.DocTestParser().get_doctest(text, given, name, None, None)
    assert example.examples, f"{name} has no example"
    return doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(example)


def list_missing(value: Any) -> list[str]:
    """Return the arguments of a public name that its docstring, and that of its `__init__`, don't list."""
    text = f"{inspect.getdoc(value)}\n{inspect.getdoc(getattr(value, '__init__', None))}"
    known = [line.strip().partition(":")[0] for line in text.splitlines() if ":" in line]
    listed = {name.strip(" *") for names in known for name in names.split(",")}
    names = [x for x in inspect.signature(value).parameters if not x.startswith("_")]
    return [x for x in names if x not in listed]


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.thorough] if x in SECONDS else []) for x in NAMES],
)
def test_the_example_of_a_public_name_is_true(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It returns and prints what it says."""
    monkeypatch.chdir(tmp_path)
    found = run_example(name, inspect.getdoc(find_value(name)) or "")
    assert found.failed == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", CORE)
def test_an_example_of_the_core_needs_public_names_alone(name: str) -> None:
    """What a name takes can be made with the others of the list."""
    assert ">>> from stopdown" not in (inspect.getdoc(CORE[name]) or "")


def test_a_false_example_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Another result fails, and so does a docstring without an example."""
    text = inspect.getdoc(CORE["relative_l2"]) or ""
    assert run_example("relative_l2", text).failed == 0
    assert run_example("relative_l2", text.replace("\n    0.1", "\n    0.2")).failed == 1
    assert "- 0.2" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="relative_l2 has no example"):
        run_example("relative_l2", text.partition("Examples:")[0])


@pytest.mark.parametrize("name", [x for x in NAMES if x != "Rank"])
def test_each_argument_of_a_public_name_is_described(name: str) -> None:
    """A reader needn't guess one from its name."""
    assert list_missing(find_value(name)) == []


def test_an_argument_that_is_not_described_is_found() -> None:
    """One that the text mentions without a colon doesn't count."""

    def scale(module: object, exponent: int, *rest: int) -> None:
        """Scale a module by an exponent.

        Args:
            module: to scale.
            *rest: ignored.
        """

    assert list_missing(scale) == ["exponent"]
