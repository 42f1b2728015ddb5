"""One progress display over downloading, loading, encoding, denoising and decoding; prose in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from stopdown.errors import make_printable

_LABELS = {
    "batch": "Making",
    "download": "Downloading",
    "compare": "Comparing",
    "load": "Loading",
    "observe": "Observing",
    "measure": "Measuring",
    "encode": "Encoding",
    "denoise": "Denoising",
    "decode": "Decoding",
    "write": "Writing",
}


class _PlainConsole(Console):
    """A console on which no text is obeyed: neither as markup nor as a control sequence.

    Names of models, files and prompts are printed as they are, wherever they stand.
    """

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else make_printable(text), style, control)


def open_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """A console on stdout or stderr, for text of any origin."""
    return _PlainConsole(stderr=stderr, highlight=highlight, markup=False, emoji=False)


def print_prose(console: Console, text: str | Text, style: str = "") -> None:
    """Print a paragraph: in a terminal in lines of whole words below its indent, elsewhere in one line."""
    said = Text(text, style) if isinstance(text, str) else text
    if not console.is_terminal:
        console.print(said, soft_wrap=True)
        return
    for line in said.split("\n", allow_blank=True):
        indent = len(line.plain) - len(line.plain.lstrip(" "))
        hanging = indent + 2 * line.plain[indent:].startswith(("- ", "→ "))
        if hanging > indent:
            _print_item(console, line, indent, hanging)
        else:
            console.print(Padding(line[indent:], (0, 0, 0, indent)))


def _print_item(console: Console, line: Text, indent: int, hanging: int) -> None:
    """An entry of a list, its further lines below its first word."""
    lines = line[hanging:].wrap(console, max(console.width - hanging, 20))
    for number, part in enumerate(lines):
        mark = line[indent:hanging] if number == 0 else Text(" " * (hanging - indent))
        console.print(Text.assemble(" " * indent, mark, part), soft_wrap=True)


class Bars:
    """A display with a bar for each stage, on a console; as a context manager.

    Nothing is shown where nobody looks: in a file, or through a pipe.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def progress(self, stage: str, what: str, done: int, total: int) -> None:
        """A stage has come this far; `total` 0 when its end is unknown."""
        if stage not in self._tasks:
            label = f"{_LABELS.get(stage, stage):<11}"
            self._tasks[stage] = self._progress.add_task(label, total=None, detail="")
        detail = f"step {done} of {total}" if stage == "denoise" and total else what
        if stage in ("encode", "decode"):
            done, total = 1, 1
        self._progress.update(
            self._tasks[stage], completed=done, total=total or None, detail=detail
        )

    def announce(self, text: str) -> None:
        """Above the bars, whole; also where nobody looks at bars."""
        print_prose(self._progress.console, text, "yellow")

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
