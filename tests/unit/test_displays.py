"""Prose on a console: whole words below their indent in a terminal, one line elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from stopdown.app.displays import print_prose

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
