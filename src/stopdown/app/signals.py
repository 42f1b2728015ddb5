"""Signals that end a program, as exceptions: what is open is closed and removed on the way out.

Python does so for Ctrl-C. SIGTERM (`kill`, `timeout`, a queue that takes its machine back) and SIGHUP (a
terminal that is closed) would end the process on the spot, with temporary files and locks left. A signal
that is ignored (`nohup`) or handled already stays so, and in a child process both end it as ever.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_ENDING = ("SIGTERM", "SIGHUP")

INTERRUPTED = 130
"""The code of a program that Ctrl-C ended: 128 and the number of the signal. Typer leaves with it, too."""


class Stopped(SystemExit):
    """A signal came that ends the program; its code is 128 and the number of the signal.

    Attributes:
        name: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


@contextmanager
def raised_signals() -> Iterator[None]:
    """Within the block the first signal that ends programs raises `Stopped`; a second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for other in taken:
            signal.signal(other, signal.SIG_DFL)
        if os.getpid() != owner:  # a child that was forked, such as a loader of data
            os.kill(os.getpid(), number)
        raise Stopped(number)

    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) is stop:
                signal.signal(number, signal.SIG_DFL)
