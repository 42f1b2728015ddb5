"""The README is true: its commands run, its Python runs, its tree and its links exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAKE = ("make demo", "make test")
"""Not run here: the first installs everything anew, the second is this very run."""


def read_blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def read_commands() -> list[tuple[str, int]]:
    """Each command of the `console` blocks with the exit code that stands below it (0 without)."""
    commands: list[tuple[str, int]] = []
    for line in "".join(read_blocks("console")).splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], 0))
        elif match := re.fullmatch(r"exit (\d)", line):
            commands[-1] = (commands[-1][0], int(match[1]))
    return commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all commands, as a reader has: a plan that one writes, another reads."""
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize(("command", "expected"), read_commands())
def test_commands_run(command: str, expected: int, folder: Path) -> None:
    """Every command of the README ends with the exit code that it promises, and writes its file."""
    words = shlex.split(command)
    assert words[0] == "stopdown"
    run = subprocess.run(
        [sys.executable, "-m", "stopdown.app.cli", *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == expected, run.stderr
    assert "Traceback" not in run.stderr
    if "-o" in words:
        output = folder / words[words.index("-o") + 1]
        assert output.exists() == (expected == 0)


def test_python_runs() -> None:
    """Every Python block of the README runs as it stands."""
    blocks = read_blocks("python")
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})  # our own text


def test_the_first_block_holds_the_two_commands() -> None:
    """The README begins with the two commands, and the Makefile has them."""
    first = re.search(r"^```\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert first is not None
    assert tuple(line.split("#")[0].strip() for line in first[1].splitlines()) == MAKE
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


def test_the_tree_is_true() -> None:
    """Every path of the README's tree exists, and every module of the package stands in it."""
    tree = README.split("## The tree")[1].split("```")[1]
    named, parent = set(), ""
    for line in tree.strip().splitlines():
        path = line.split()[0]
        parent = path if not line.startswith(" ") else parent
        named.add(path if path == parent else parent + path)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert missing == []
    package = ROOT / "src" / "stopdown"
    present = {
        f"src/stopdown/{p.name}{'/' if p.is_dir() else ''}"
        for p in package.iterdir()
        if not p.name.startswith(("_", ".")) and p.name not in ("py.typed", "models")
    }
    assert present <= named


def test_links_exist() -> None:
    """Every relative link and picture of the README exists."""
    links = re.findall(r"\]\(([^)#]+)\)", README)
    broken = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert broken == []


def test_every_option_is_documented() -> None:
    """`stopdown generate --help` names every option of the command with a sentence."""
    run = subprocess.run(
        [sys.executable, "-m", "stopdown.app.cli", "generate", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "PATH": "", "TERM": "dumb"},
    )
    from dataclasses import fields

    from stopdown.app.commands import GenerateOptions

    for entry in fields(GenerateOptions):
        flag = f"--{entry.name.replace('_', '-')}"
        name = {"source": "SOURCE", "prompt": "PROMPT"}.get(entry.name, flag)
        line = next(
            line for line in run.stdout.splitlines() if name in line and "Usage" not in line
        )
        assert len(line.split()) > 3
