"""The standard streams of the process: closed ones are filled, and what stdout refuses is one message.

A reader that leaves early (`stopdown doctor | head -1`) ends the program without a word and with 141, as
SIGPIPE ends others. A full disk behind stdout is an error like any other; what the command made is
finished before it prints. Characters that a terminal cannot show are escaped.
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
    """Standard output that cannot be written."""


class ReaderGone(SystemExit):
    """The reader of standard output has closed it; the code is that of SIGPIPE."""

    def __init__(self) -> None:
        super().__init__(141)


def fill_streams() -> None:
    """Open the null device in place of closed standard streams, so that no file takes their numbers."""
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
    """A text stream whose errors are told apart from those of all other files."""

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
        f"Standard output could not be written: {cause}",
        expected="The command itself completed.",
        remedy="Send it elsewhere, or free some space.",
    )


@contextmanager
def checked_stdout(*, is_json: bool) -> Iterator[None]:
    """Check writes to `sys.stdout` within the block, and flush it at the end.

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
