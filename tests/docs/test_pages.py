"""The pages in docs/ are true: every command on them is one that the command line takes, what stands in
`console` blocks runs, and a diagram has its text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from documentation import Run, check_command, read_console
from stopdown.app import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")
"""The log is left out: it tells what was, and what was typed then."""


def find_commands(text: str) -> list[str]:
    """Every `stopdown …` of a page: in its blocks, between backticks, and in nodes of a diagram."""
    spans = re.findall(r"`(stopdown [^`\n]+)`", text)
    lines = re.findall(r"^\s*\$ (stopdown .+)$", text, re.MULTILINE)
    nodes = [part for label in re.findall(r'"([^"]*)"', text) for part in label.split("<br/>")]
    return [*spans, *lines, *(node for node in nodes if node.startswith("stopdown "))]


def parse_command(command: str) -> str:
    """What the command line has against a command, without running it; "" when it takes it."""
    root = typer.main.get_command(cli.app)
    _, name, *words = shlex.split(command)
    context = click.Context(root, info_name="stopdown")
    found = root.get_command(context, name)  # type: ignore[attr-defined]
    if found is None:
        return f"there is no command {name}"
    try:
        found.make_context(name, words, parent=context).close()
    except Exception as refused:  # Typer brings its own copy of click's exceptions
        return str(getattr(refused, "message", "")) or type(refused).__name__
    return ""


def list_wrong_commands(text: str) -> list[str]:
    """Commands of a page that the command line would refuse, each with why."""
    commands = dict.fromkeys(find_commands(text))
    return [f"{c}: {problem}" for c in commands if (problem := parse_command(c))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_taken(page: Path) -> None:
    """No page names a command or a flag that does not exist."""
    assert list_wrong_commands(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`stopdown paint SOURCE`", "there is no command paint"),
        ("    $ stopdown generate SOURCE --colour red", "No such option"),
        ('a["stopdown explain x<br/>stopdown doctor --loud"]', "No such option"),
        ("`stopdown plan`", "Missing"),
    ],
)
def test_a_wrong_command_is_found(text: str, wrong: str) -> None:
    """A command, a flag or an argument that is not there is found in text, block and diagram."""
    (found,) = list_wrong_commands(text)
    assert wrong.lower() in found.lower()


def test_a_right_command_passes() -> None:
    """Parsing refuses nothing that the command line takes, and runs nothing."""
    assert (
        list_wrong_commands("`stopdown generate nowhere 'a cat' --precision fp16 -o a.mp4`") == []
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all commands, as a reader has: what one writes, another reads."""
    return tmp_path_factory.mktemp("pages")


RUNS = [run for page in PAGES for run in read_console(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("command", "expected"), RUNS)
def test_commands_run(
    command: str, expected: int, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command in a `console` block ends with the exit code that it promises."""
    monkeypatch.chdir(folder)
    check_command(command, expected, run)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of a page runs as it stands."""
    monkeypatch.chdir(folder)
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(compile(block, page.name, "exec"), {})  # our own text


def test_the_flowchart_is_told_in_words() -> None:
    """Whoever cannot see the diagram finds each of its commands in the text below it."""
    page = (ROOT / "docs" / "black.md").read_text(encoding="utf-8")
    diagram, words = page.split("## The same in words")
    assert diagram.count("```mermaid") == 1
    drawn = set(find_commands(diagram.split("```mermaid")[1]))
    assert len(drawn) >= 10
    assert drawn <= set(find_commands(words))


def test_every_branch_of_the_flowchart_ends() -> None:
    """Each node is drawn and reached, and whatever is no end leads on."""
    page = (ROOT / "docs" / "black.md").read_text(encoding="utf-8")
    diagram = page.split("```mermaid")[1].split("```")[0]
    edges = re.findall(r"^\s*(\w+)[^\n]*?-->\s*(\w+)", diagram, re.MULTILINE)
    drawn = set(re.findall(r"(\w+)(?:\[\"|\{\"|\(\[\")", diagram))
    named = {name for edge in edges for name in edge}
    assert named == drawn
    reached = {target for _, target in edges}
    assert drawn - reached == {"start"}
