"""What a page says to type, and typing it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., tuple[int, str, str]]


def read_console(text: str) -> list[tuple[str, int]]:
    """Each command of the `console` blocks with the exit code that stands below it (0 without)."""
    commands: list[tuple[str, int]] = []
    for block in re.findall(r"^ *```console\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if line.strip().startswith("$ "):
                commands.append((line.strip()[2:], 0))
            elif match := re.fullmatch(r"\s*exit (\d)", line):
                commands[-1] = (commands[-1][0], int(match[1]))
    return commands


def run_process(*arguments: object) -> tuple[int, str, str]:
    """A command in a process of its own: its exit code, and what it wrote to stdout and stderr."""
    command = [sys.executable, "-m", "stopdown.app.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def check_command(command: str, expected: int, run: Run) -> None:
    """Type a documented command: it ends with the code that it promises, and its file is there.

    Args:
        run: the fixture, in this process, where imports are paid for once; or `run_process`.
    """
    name, *words = shlex.split(command)
    assert name == "stopdown"
    code, _, errors = run(*words)
    assert code == expected, errors
    assert "Traceback" not in errors
    if "-o" in words:
        assert Path(words[words.index("-o") + 1]).exists() == (expected == 0)
