"""Progress displays for all stages of a run, from download to decoding, and printing of wrapped text.

In a terminal, progress is shown as bars. Elsewhere, as in a job's log file, it is printed as plain lines.
"""

from __future__ import annotations

import datetime
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Self

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
from rich.table import Table
from rich.text import Text

from stopdown.app.display import Display
from stopdown.app.flags import CommandOptions
from stopdown.devices.environment import has_moving_cursor
from stopdown.errors import make_printable
from stopdown.records import to_json

STAGES = {
    "batch": "Making",
    "bench": "Measuring",
    "certificate": "Writing",
    "certify": "Planning",
    "choose": "Choosing",
    "import": "Loading",
    "download": "Downloading",
    "compare": "Comparing",
    "load": "Loading",
    "observe": "Observing",
    "measure": "Measuring",
    "predict": "Predicting memory",
    "encode": "Encoding",
    "denoise": "Denoising",
    "decode": "Decoding",
    "write": "Writing",
}
"""Label of each stage of a run, as shown in the display."""


class _PlainConsole(Console):
    """Console that escapes control sequences in text, such as names of files and prompts."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else make_printable(text), style, control)


def open_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Return a console on stdout or stderr that interprets no markup or control sequences in text."""
    return _PlainConsole(stderr=stderr, highlight=highlight, markup=False, emoji=False)


def print_prose(console: Console, text: str | Text, style: str = "") -> None:
    """Print text: in a terminal each line is wrapped with a hanging indent, elsewhere not at all."""
    said = Text(text, style) if isinstance(text, str) else text
    if not console.is_terminal:
        console.print(said, soft_wrap=True)
        return
    for line in said.split("\n", allow_blank=True):
        indent = len(line.plain) - len(line.plain.lstrip(" "))
        hanging = indent + 2 * line.plain[indent:].startswith(("- ", "→ "))
        if hanging > indent:
            # further lines of an entry stand below its first word
            lines = line[hanging:].wrap(console, max(console.width - hanging, 20))
            for number, part in enumerate(lines):
                mark = line[indent:hanging] if number == 0 else Text(" " * (hanging - indent))
                console.print(Text.assemble(" " * indent, mark, part), soft_wrap=True)
        else:
            console.print(Padding(line[indent:], (0, 0, 0, indent)))


def print_parts(console: Console, *parts: str | tuple[str, str]) -> None:
    """Join texts, or (text, style) pairs, and print them as `print_prose` does."""
    print_prose(console, Text.assemble(*parts))


SECONDS_BETWEEN_LINES = 10.0
"""A log gets one line of progress in this time, and one at the beginning of each stage."""

LEAST_SHARE = 0.1
"""Share of a stage that must be done before its remaining time is estimated."""


class Lines(Display):
    """Display that prints progress as plain lines, for logs; a context manager.

    Each stage has a line when it first begins. After that, a line follows every ten seconds, whether
    there was progress or not.
    """

    _style = ""

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._quiet, self._verbose, self._clock = console, quiet, verbose, clock
        self._begun = self._printed = clock()
        self._stages: set[str] = set()
        self._current, self._since, self._shown = "", 0.0, ""
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if not self._quiet:
            threading.Thread(target=self._repeat, name="stopdown-progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _repeat(self) -> None:
        while not self._ended.wait(1.0):
            self.tick()

    def tick(self) -> None:
        """Print the progress again if nothing was printed for ten seconds."""
        now = self._clock()
        if self._shown and now - self._printed >= SECONDS_BETWEEN_LINES:
            self._print(self._shown, now)

    def progress(self, stage: str, what: str, done: int, total: int) -> None:
        """Show the progress of a stage; `total` is 0 if it is unknown."""
        now, key = self._clock(), what if stage == "import" else stage
        if key != self._current:
            self._current, self._since = key, now
        self._shown = f"{STAGES.get(stage, stage)} {_word(stage, what, done, total)}"
        is_new = key not in self._stages
        if self._quiet or (not is_new and now - self._printed < SECONDS_BETWEEN_LINES):
            return
        self._stages.add(key)
        share, spent = done / total if total else 0.0, now - self._since
        left = (
            f", {_show_time(spent / share - spent)} left"
            if spent >= SECONDS_BETWEEN_LINES and LEAST_SHARE <= share < 1
            else ""
        )
        self._print(self._shown, now, left)

    def _print(self, shown: str, now: float, left: str = "") -> None:
        self._printed = now
        print_prose(self._console, f"{shown} ({_show_time(now - self._begun)}{left})")

    def announce(self, text: str) -> None:
        print_prose(self._console, text, self._style)

    def inform(self, text: str) -> None:
        if not self._quiet:
            print_prose(self._console, text)

    def detail(self, text: str) -> None:
        if self._verbose:
            print_prose(self._console, text)


class Bars(Lines):
    """Display with a bar for each stage, for a terminal; a context manager."""

    _style = "yellow"

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        super().__init__(console, verbose=verbose)
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}", markup=False),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def progress(self, stage: str, what: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            label = f"{STAGES.get(stage, stage):<11}"
            self._tasks[stage] = self._progress.add_task(label, total=None, detail="")
        self._progress.update(self._tasks[stage], visible=True)
        if stage != "import" and "import" in self._tasks:
            self._progress.update(self._tasks["import"], visible=False)
        detail = _word(stage, what, done, total)
        if stage in ("encode", "decode"):
            done, total = 1, 1
        self._progress.update(
            self._tasks[stage], completed=done, total=total or None, detail=detail
        )
        if stage == "import":
            self._progress.refresh()  # at once: the import keeps the thread that draws from its turn

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def open_display(options: CommandOptions, *, is_short: bool = False) -> Display:
    """Return the display of a command's progress on standard error: bars in a terminal, else lines.

    With `--quiet` only urgent messages are shown. With `--json` no lines of progress are printed.

    Args:
        is_short: the command takes only seconds, so no plain lines are printed.
    """
    console = open_console(stderr=True)
    if console.is_terminal and has_moving_cursor() and not options.quiet:
        return Bars(console, verbose=options.verbose)
    is_hushed = options.quiet or is_short or options.json
    return Lines(console, quiet=is_hushed, verbose=options.verbose)


def print_result(
    options: CommandOptions,
    record: object,
    draw: Callable[[Console], object],
    *,
    name: object = None,
    highlight: bool = True,
) -> None:
    """Print the result of a command on standard output: as JSON, as a file name, or with `draw`.

    Args:
        record: the record without its pictures.
        name: name of the file that was written; `--quiet` prints nothing else. None if there is no file.
    """
    if options.json:
        sys.stdout.write(to_json(record))
    elif options.quiet and name is not None:
        sys.stdout.write(f"{name}\n")
    else:
        draw(open_console(highlight=highlight))


def make_table(*headings: str, right: Collection[str] = (), **options: Any) -> Table:
    """Return an empty table without borders.

    Args:
        right: headings of the columns to align right.
        options: passed to `rich.table.Table.add_column`.
    """
    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in headings:
        justify: Any = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, **options)
    return table


def _word(stage: str, what: str, done: int, total: int) -> str:
    if stage in ("import", "decode"):
        return "the result" if stage == "decode" else what
    if stage == "encode":
        return "the prompt" if what.startswith("text_encoder") else "the input"
    return (
        f"step {done} of {total}" if stage == "denoise" and total else what.removeprefix("loading ")
    )


def _show_time(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: `0:01:48`."""
    return str(datetime.timedelta(seconds=int(seconds)))
