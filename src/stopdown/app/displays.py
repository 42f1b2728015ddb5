"""One progress display over downloading, loading, encoding, denoising and decoding."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LABELS = {
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


class Bars:
    """A display with a bar for each stage, on a console; as a context manager.

    Nothing is shown where nobody looks: in a file, or through a pipe.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}"),
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
        console = self._progress.console
        console.print(text, style="yellow", soft_wrap=not console.is_terminal, highlight=False)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
