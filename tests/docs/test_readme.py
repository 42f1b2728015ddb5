"""The README is true: its commands run, its Python runs, its tree and its links exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from documentation import Run, check_command, read_console, run_process

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAKE = ("make demo", "make test")
"""Not run here: the first installs everything anew, the second is this very run."""


def read_blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


COMMANDS = read_console(README)
IN_A_PROCESS = ("generate", "doctor", "check", "explain")
"""The first command of each of these runs as it is installed; the others in this process."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all commands, as a reader has: a plan that one writes, another reads."""
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize(("command", "expected"), COMMANDS)
def test_commands_run(
    command: str, expected: int, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of the README ends with the exit code that it promises, and writes its file."""
    monkeypatch.chdir(folder)
    firsts = [next(c for c, _ in COMMANDS if c.split()[1] == name) for name in IN_A_PROCESS]
    check_command(command, expected, run_process if command in firsts else run)


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
    """Every path of the drawn tree exists, and every module of the package stands in it."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.split("## The tree")[1].split("```")[1]
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


def test_every_option_is_documented(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stopdown generate --help` names every option of the command with a sentence."""
    monkeypatch.setenv("COLUMNS", "200")
    code, shown, _ = run("generate", "--help")
    assert code == 0
    from dataclasses import fields

    from stopdown.app.generate_command import GenerateOptions

    for entry in fields(GenerateOptions):
        flag = f"--{entry.name.replace('_', '-')}"
        name = {"source": "SOURCE", "prompt": "PROMPT"}.get(entry.name, flag)
        line = next(line for line in shown.splitlines() if name in line and "Usage" not in line)
        assert len(line.split()) > 3
