"""Error messages and exit codes of failed or interrupted commands.

Imports nothing slow, since a signal handler may import it at any moment.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import textwrap
import traceback

from stopdown.errors import StopdownError, make_printable


def find_command(words: list[str]) -> str:
    """Return the name of the command in a command line; "" if there is none."""
    return next((word for word in words if not word.startswith("-")), "")


RUN_VALUES = ("-m", "--module", "--device", "--precision", "--plan", "--components")
"""Options of `stopdown run` that are followed by a value."""


def list_own_words(words: list[str]) -> list[str]:
    """Return the words of a command line without the script that `stopdown run` runs, and its arguments."""
    if find_command(words) != "run":
        return words
    own: list[str] = []
    for word in words:
        is_value = own[-1:] and own[-1] in RUN_VALUES
        if not is_value and not word.startswith("-") and "run" in own:
            break
        own.append(word)
    return own


def report_failure(error: BaseException, words: list[str], stopped_by: int = 0) -> int:
    """Print the reason that a command failed and return the exit code; a user's mistake has no traceback.

    Args:
        words: words of the command line after `stopdown`.
        stopped_by: number of the signal that stopped the command; 0 for none.

    Raises:
        BaseException: `error` itself if it is neither a `StopdownError` nor an interrupt.
    """
    if isinstance(error, KeyboardInterrupt):
        stopped_by = signal.SIGINT
    if stopped_by:
        report_interrupt(words, signal.Signals(stopped_by).name)
        return 128 + stopped_by
    if not isinstance(error, StopdownError):
        raise error
    own = list_own_words(words)
    if {"-v", "--verbose"} & set(own):
        traceback.print_exception(error)
    from stopdown.app.streams import StdoutError

    wants_json = "--json" in own and not isinstance(error, StdoutError)
    _report(type(error).__name__, error.parts, wants_json)
    return error.exit_code


def report_interrupt(words: list[str], name: str) -> None:
    kind, cause = ("KeyboardInterrupt", "Ctrl-C") if name == "SIGINT" else (name, name)
    _report(kind, describe_interrupt(words, cause), "--json" in list_own_words(words))


def describe_interrupt(words: list[str], cause: str = "Ctrl-C") -> list[str]:
    """Describe in sentences what Ctrl-C or another signal stopped, and how to continue.

    Args:
        cause: `Ctrl-C`, or the name of the signal.
    """
    command = find_command(words)
    if command == "run":
        return [f"Stopped by {cause}, while the script ran."]
    given = {word.partition("=")[0] for word in words}
    said = [f"Stopped by {cause}; no partial output was left."]
    if command == "batch":  # it has said how many are
        said = [f"Stopped by {cause}."]
    elif command == "generate" and "--num" in given:
        said = [f"Stopped by {cause}; the output that was being made wasn't finished."]
    if command in ("batch", "compare") or (command == "generate" and "--journal" in given):
        said.append("Run the same command again to continue.")
    elif command == "generate":
        said.append("To continue an interrupted run next time, use --journal FOLDER.")
    return said


def _report(kind: str, parts: list[str], wants_json: bool) -> None:
    """Write a message to standard error: each part on its own lines in a terminal, else one line.

    Errors of a closed stream are ignored, so that the exit code stays the same.
    """
    parts = [make_printable(part) for part in parts if part]  # names come from files of others
    message = " ".join(parts)
    shown = message
    if sys.stderr.isatty():
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        shown = "\n".join(_wrap(part, width) for part in parts)
    with contextlib.suppress(OSError):
        sys.stderr.write(f"stopdown: {shown}\n")
        sys.stderr.flush()
    if wants_json:
        from stopdown.app.streams import CheckedStdout

        with contextlib.suppress(OSError, SystemExit, StopdownError):
            stream = CheckedStdout(sys.stdout)
            stream.write(json.dumps({"error": kind, "message": message}) + "\n")
            stream.flush()


_WIDEST = 100
"""Columns at which a message is wrapped, even if the terminal is wider."""


def _wrap(text: str, width: int) -> str:
    """Wrap a text into lines without breaking paths and options."""
    return textwrap.fill(
        text,
        width - len("stopdown: "),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
