"""Prose on a console: whole words below their indent in a terminal, one line elsewhere."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

import stopdown
from stopdown.app.progress import STAGES, open_console, print_prose
from stopdown.errors import StopdownError, StopdownWarning

REMEDY = "  - Use [this] --precision text_encoder=bf16, or make a plan: stopdown plan SOURCE"


def show(text: str, *, is_terminal: bool) -> list[str]:
    """The lines of a paragraph, 40 columns wide."""
    console = Console(force_terminal=is_terminal, width=40, file=io.StringIO(), color_system=None)
    print_prose(console, text, "yellow")
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_terminal_gets_lines_of_whole_words() -> None:
    """Further lines stand below the first word of an entry, and options stay whole."""
    assert show(REMEDY, is_terminal=True) == [
        "  - Use [this] --precision",
        "    text_encoder=bf16, or make a plan:",
        "    stopdown plan SOURCE",
    ]
    assert show("\n      one two three four five six seven eight", is_terminal=True) == [
        "",
        "      one two three four five six seven",
        "      eight",
    ]


def test_a_pipe_gets_one_line() -> None:
    """What reads it decides how wide it is."""
    assert show(REMEDY, is_terminal=False) == [REMEDY]


HOSTILE = "a[bold]b[/bold] :fire: \x1b[2J\x1b]0;title\x07\x9b31m c\x08"


def test_a_console_obeys_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Markup, emoji codes and control sequences in names come out as text, in cells and titles too."""
    console = open_console()
    table = Table(box=None)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    console.print(HOSTILE, soft_wrap=True)
    console.print(table)
    page = capsys.readouterr().out
    assert page.count("a[bold]b[/bold] :fire:") == 3
    assert not set(page) & set("\x1b\x07\x08\x9b")


def test_styles_of_our_own_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bold text is still bold in a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = open_console()
    with console.capture() as shown:
        console.print("word", style="bold")
    assert "\x1b[1mword" in shown.get()


def test_a_message_holds_no_control_sequence() -> None:
    """What an error quotes of a file's name or content is printable in each of its parts."""
    error = StopdownError(HOSTILE, expected="\udcff", remedy="\u202etxt.exe")
    assert str(error) == "a[bold]b[/bold] :fire: \ufffd31m c\ufffd \ufffd \ufffdtxt.exe"
    assert error.what.isprintable()
    assert str(StopdownWarning(HOSTILE)).isprintable()


def test_every_stage_has_words() -> None:
    """A stage that the package tells of, by a call such as `progress("load", what, done, total)`."""
    told = set()
    for path in Path(stopdown.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and len(node.args) == 4:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                first = node.args[0]
                if name in ("progress", "_progress", "told", "_tell") and isinstance(
                    first, ast.Constant
                ):
                    told.add(first.value)
    assert {"load", "predict", "certify", "bench", "compare"} <= told
    assert told <= set(STAGES)
