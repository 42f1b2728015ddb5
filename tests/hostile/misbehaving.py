"""Commands that do what no command may, for the tests of the runner."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

HELD: list[bytes] = []


def behave() -> None:
    """Say one line and leave with 2."""
    sys.stderr.write("stopdown: This is wrong.\n")
    sys.exit(2)


def raise_error() -> None:
    """A traceback."""
    raise ValueError("stopdown: This is wrong.")


def colour() -> None:
    """A sequence that a terminal obeys."""
    sys.stderr.write("\x1b[2J")
    behave()


def hang() -> None:
    """Sleep for longer than a row may take."""
    time.sleep(1000)


def spin() -> None:
    """Compute for ever."""
    while True:
        pass


def grow() -> None:
    """Take memory until there is no more, and then leave as if nothing had been."""
    while True:
        HELD.append(b"x" * 2**24)


def leave_file() -> None:
    """A file that nobody asked for."""
    Path("left.part").touch()
    behave()


def change_file() -> None:
    """Another content in a file that was there."""
    Path("kept").write_text("other")
    behave()


def remove_file() -> None:
    """A file less."""
    Path("kept").unlink()
    behave()


def use_home() -> None:
    """A file in the home folder."""
    Path.home().mkdir()
    (Path.home() / "left").touch()
    behave()


def die() -> None:
    """A signal from below Python."""
    os.kill(os.getpid(), signal.SIGSEGV)
