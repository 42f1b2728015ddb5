"""What a page says to type, and typing it.

A block of `sh` or `console` is typed line by line, and a block of `python` is run. A line may end with
`# exit 1`, and a `console` line may be followed by `exit 1`: the code that it promises. A comment before a
block says why it is not run: `<!-- not run: downloads 21 GB -->`. A block whose title is a file name is
that file, for the commands of the page.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import typer

from stopdown.app import commands

Run = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: what stands behind the fence; "" without.
        text: its lines, without their common indentation.
        left: why it is not run; "" when it is.
        file: name of the file that it is; "" for others.
    """

    language: str
    text: str
    left: str
    file: str = ""


def read_blocks(page: str, *languages: str) -> list[Block]:
    """The fenced blocks of some languages, of all when none is named, in order."""
    found = [
        Block(
            match["language"],
            re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE),
            match["why"] or "",
            "".join(re.findall(r'title="([^"]+)"', match["info"])),
        )
        for match in _BLOCK.finditer(page)
    ]
    return [block for block in found if not languages or block.language in languages]


def read_files(page: str) -> dict[str, str]:
    """The files that a page shows whole: names and texts."""
    return {block.file: block.text for block in read_blocks(page) if block.file}


def read_lines(block: Block) -> Iterator[tuple[str, int]]:
    """Each command of a block of `sh` or `console`, with the exit code that it promises."""
    commands: list[tuple[str, int]] = []
    for line in re.sub(r" *\\\n *", " ", block.text).splitlines():
        if block.language == "console" and (match := re.fullmatch(r"\s*exit (\d+)", line)):
            commands[-1] = (commands[-1][0], int(match[1]))
        elif block.language == "sh" or line.startswith(("$ ", "stopdown ")):
            command, _, comment = line.removeprefix("$ ").partition("  #")
            promised = re.fullmatch(r" exit (\d+)", comment)
            commands.append((command.strip(), int(promised[1]) if promised else 0))
    return (command for command in commands if command[0])


def read_console(page: str) -> list[tuple[str, int]]:
    """Every command of a page that is run, with the exit code that it promises."""
    blocks = read_blocks(page, "sh", "console")
    return [line for block in blocks if not block.left for line in read_lines(block)]


def find_commands(page: str) -> list[str]:
    """Every `stopdown …` of a page: in its blocks, run or not, between backticks, in nodes of a diagram."""
    prose = _BLOCK.sub("", page)
    spans = re.findall(r"`(stopdown [^`\n]+)`", prose)
    lines = [
        line for block in read_blocks(page, "sh", "console", "") for line, _ in read_lines(block)
    ]
    diagrams = "".join(block.text for block in read_blocks(page, "mermaid"))
    labels = [label.replace("<br/>", " ") for label in re.findall(r'"([^"]*)"', diagrams)]
    nodes = [part.strip() for label in labels for part in re.split(r"(?=\bstopdown )", label)]
    return [found for found in (*spans, *lines, *nodes) if found.startswith("stopdown ")]


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


def parse_command(command: str) -> str:
    """What the command line has against a command, without running it; "" when it takes it."""
    root = typer.main.get_command(commands.app)
    _, name, *words = shlex.split(command)
    context = click.Context(root, info_name="stopdown")
    found = root.get_command(context, name)  # type: ignore[attr-defined]
    if found is None:
        return f"there is no command {name}"
    if not words:
        return ""  # the command's name, as prose has it
    hidden = {flag for x in found.params if getattr(x, "hidden", False) for flag in x.opts}
    if used := hidden.intersection(words):
        return f"{min(used)} is refused when the command runs"
    try:
        found.make_context(name, words, parent=context).close()
    except Exception as refused:  # Typer brings its own copy of click's exceptions
        return str(getattr(refused, "message", "")) or type(refused).__name__
    return ""


def find_missing_evidence(shown: str) -> str:
    """What is wrong with a test, command, file or remark that is to show a sentence; "" for nothing."""
    if shown.startswith("stopdown "):
        return parse_command(shown) or ""
    name, _, test = shown.partition("::")
    if name.startswith("by hand: "):
        return "" if len(name.split()) > 4 else "it does not say what to do by hand"
    if not (ROOT / name).exists():
        return "there is no such file"
    if not test:
        return ""
    body = ast.parse((ROOT / name).read_text(encoding="utf-8")).body
    return "" if test in {getattr(x, "name", "") for x in body} else "there is no such test"
