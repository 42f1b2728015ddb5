"""The list of commands and the help of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from docs.documentation import parse_command
from stopdown.app import commands

COMMANDS = sorted(typer.main.get_command(commands.app).commands)  # type: ignore[attr-defined]


def test_the_list_of_commands_is_not_cut_off(run: Any, here: Path) -> None:
    """At 80 columns each command has its whole sentence, also by `-h`."""
    code, out, _ = run("-h")
    lines = [line for line in out.splitlines() if line.split()[:1] and line.split()[0] in COMMANDS]
    assert code == 0
    assert len(lines) == len(COMMANDS)
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_has_examples_that_are_taken(name: str, run: Any, here: Path) -> None:
    """Every command shows what to type, and the command line takes it."""
    code, out, _ = run(name, "-h")
    shown = out.split("Examples:")[1].split("\n\n")[0]
    examples = [line.strip() for line in shown.splitlines() if line.strip()]
    assert (code, bool(examples)) == (0, True)
    assert [found for line in examples if (found := parse_command(line))] == []
    assert "--quiet" in out
    assert "--verbose" in out


def test_help_shows_choices_and_defaults(run: Any, here: Path) -> None:
    """What an option takes, and what it is where nobody says."""
    _, out, _ = run("generate", "--help")
    shown = " ".join(out.split())
    assert "--on-fault <repair|raise>" in shown
    assert "[default: repair]" in shown
    assert "--steps N" in shown
    assert "list[str]" not in shown
