"""Why a command failed, and what to do next."""

from __future__ import annotations

import json
from typing import get_type_hints

import pytest

from stopdown.app.messages import (
    RUN_VALUES,
    describe_interrupt,
    find_command,
    list_own_words,
    report_failure,
)
from stopdown.app.run_command import ScriptOptions
from stopdown.errors import InputError


def test_a_users_mistake_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """All of the error comes on standard error, in one line if that is no terminal."""
    error = InputError("It is none.", expected="It is one.", remedy="Use one.")
    assert report_failure(error, ["generate"]) != 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "stopdown: It is none. It is one. Use one.\n"


def test_the_command_is_the_first_word_that_is_one() -> None:
    """Options before it do not hide it."""
    assert find_command(["generate", "shapes"]) == "generate"
    assert find_command(["--version"]) == ""


def test_an_interrupted_run_says_how_to_go_on() -> None:
    """What is named depends on the command and its options."""
    plain = " ".join(describe_interrupt(["generate", "shapes"]))
    assert "--journal FOLDER" in plain
    assert "--journal FOLDER" not in " ".join(describe_interrupt(["compare", "shapes"]))


SCRIPT = ["run", "--device", "cpu", "script.py", "-v", "--json"]


def test_options_of_a_script_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """`-v` and `--json` after the script ask Stopdown for no traceback and no JSON; before it, they do."""
    assert list_own_words(SCRIPT) == ["run", "--device", "cpu"]
    assert list_own_words(["run", "-m", "package.module", "x", "-v"])[1:] == [
        "-m",
        "package.module",
    ]
    assert list_own_words(SCRIPT[3:]) == SCRIPT[3:]
    report_failure(InputError("It is none."), SCRIPT)
    assert capsys.readouterr() == ("", "stopdown: It is none.\n")
    report_failure(InputError("It is none."), ["run", "--json", *SCRIPT[1:4]])
    out, err = capsys.readouterr()
    assert json.loads(out)["message"] == "It is none."
    assert "Traceback" not in err


def test_options_with_a_value_are_those_of_run() -> None:
    """Each option that is no switch, by all of its names."""
    hints = get_type_hints(ScriptOptions, include_extras=True)
    found = set[str]()
    for name, hint in hints.items():
        kind, option = hint.__origin__, hint.__metadata__[0]
        if kind is not bool and name not in ("script", "arguments"):
            names = [x for x in (option.default, *option.param_decls) if isinstance(x, str)]
            found.update(names or [f"--{name}"])
    assert found == set(RUN_VALUES)
