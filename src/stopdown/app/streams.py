"""Repair of closed standard streams, and errors of writing to stdout.

If the reader of stdout exits early (`stopdown doctor | head -1`), the program ends silently with code 141,
like programs that SIGPIPE ends. A full disk behind stdout is reported as an error; commands finish their
files before they print. Characters that a terminal cannot show are escaped.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stopdown.errors import StopdownError
from stopdown.files.outputs import explain_refusal


class StdoutError(StopdownError):
    """Raised if standard output cannot be written."""


class ReaderGone(SystemExit):
    """Raised if the reader of standard output has closed it; the exit code is that of SIGPIPE, 141."""

    def __init__(self) -> None:
        super().__init__(141)


def fill_streams() -> None:
    """Open the null device for closed standard streams, so that no later file gets descriptor 0, 1 or 2."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            _send_nowhere(number)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))


def _send_nowhere(number: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)


class CheckedStdout:
    """Wrapper of stdout that raises `StdoutError` or `ReaderGone`, unlike the `OSError` of other files."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._failure: StdoutError | ReaderGone | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._explained():
            return int(self._stream.write(text))

    def flush(self) -> None:
        with self._explained():
            self._stream.flush()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        if self._failure is not None:  # the first attempt (by Typer, with an empty text) kept it
            raise self._failure
        try:
            yield
        except OSError as error:
            with contextlib.suppress(
                OSError, ValueError
            ):  # the interpreter would fail on what is held
                _send_nowhere(self._stream.fileno())
            self._failure = _explain_failure(error)
            raise self._failure from error


def _explain_failure(error: OSError) -> StdoutError | ReaderGone:
    if isinstance(error, BrokenPipeError):
        return ReaderGone()
    cause = explain_refusal(Path(), error).what.partition(": ")[2]
    return StdoutError(
        f"Standard output couldn't be written: {cause}",
        expected="The command itself completed.",
        remedy="Send it elsewhere, or free some space.",
    )


@contextmanager
def checked_stdout(*, is_json: bool) -> Iterator[None]:
    """Replace `sys.stdout` by a `CheckedStdout` while the block runs, and flush it at the end.

    Characters that its encoding lacks are escaped.

    Args:
        is_json: write UTF-8, whichever encoding the terminal has.
    """
    stream = sys.stdout
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace", **({"encoding": "utf-8"} if is_json else {}))
    checked = CheckedStdout(stream)
    sys.stdout = checked
    try:
        yield
    finally:
        sys.stdout = stream
        checked.flush()
