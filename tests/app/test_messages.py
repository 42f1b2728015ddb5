"""Why a command failed, and what to do next."""

from __future__ import annotations

import pytest

from stopdown.app.messages import describe_interrupt, find_command, report_failure
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
