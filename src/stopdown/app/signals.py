"""Signals that end a program, as exceptions: what is open is closed and removed on the way out.

Python does so for Ctrl-C. SIGTERM (`kill`, `timeout`, a queue that takes its machine back) and SIGHUP (a
terminal that is closed) would end the process on the spot, with temporary files and locks left. So would
SIGBREAK on Windows (Ctrl-Break, a console that is closed), where SIGTERM cannot be sent. A signal
that is ignored (`nohup`) or handled already stays so, and in a child process all of them end it as ever.

No exception is raised while a module is imported. Libraries catch it there, or look up the module that is
half made (NumPy until no recursion is left), and C++ of PyTorch ends with SIGABRT. The signal waits until
the import is over. A long import is not waited for: the process leaves, and what it had under temporary
names is removed by the next one that writes there. How long an import is, is counted in processor time, so
that a busy machine makes none long; one that waits for something else is left after ten times as long.

An interrupt that Python could only print, out of `__del__` or a callback, and one that a library caught and
dropped come again. A program of others may drop them (`stopdown run`).

Not covered: signals before the program begins, or while a function of C does not return.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Self

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
_IMPORTER = "<frozen importlib._bootstrap>"

_PATIENCE_S = 1.0
"""Processor time of an import that is waited for."""

_MOST_WAITING = 10.0
"""Times as long by the clock."""

_PAUSE_S = 0.02
"""Between two looks at whether it is over."""


class Stopped(SystemExit):
    """A signal came that ends the program; its code is 128 and the number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C; a class of ours, since no weak reference to one of Python's can be made."""


class SignalTrap:
    """Within the block the first signal that ends programs raises `Stopped`, or `KeyboardInterrupt` for
    Ctrl-C; a second one ends at once.

    Attributes:
        leave: told the name of a signal that comes during a long import, before the process is left; None
            still raises, for programs of others that may run for hours inside of an import, and may catch
            what is raised.
        number: of the signal that was raised; 0 before.
    """

    def __init__(self, leave: Callable[[str], None] | None = None) -> None:
        self.number = 0
        self.leave = leave
        self._before: dict[int, Any] = {}
        self._waiting: signal.Signals | None = None
        self._since = self._worked = 0.0
        self._is_reminder = self._is_over = False
        self._raised: weakref.ref[BaseException] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._owner, self._outermost = os.getpid(), sys._getframe(1)
        for name in _ENDING:
            number = getattr(signal, name, None)
            if number and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = signal.signal(number, self._receive)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._receive_lost
        return self

    def __exit__(self, *_: object) -> None:
        self._raised = None
        self._is_over = True
        if not self._before:
            return
        del self._outermost
        if sys.unraisablehook == self._receive_lost:
            sys.unraisablehook = self._hook
        for number in self._before:
            self._give_back(number)
        if self._waiting:  # an import was the last that was done, or another error hid this one
            self._raise(self._waiting)

    def end_by_default(self) -> None:
        """Have the signals end the process without a word, as an interpreter that ends should."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.SIG_DFL)

    def _give_back(self, number: int) -> None:
        if signal.getsignal(number) == self._receive:
            signal.signal(number, self._before[number])

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a child that was forked, such as a loader of data
            self._give_back(number)
            signal.raise_signal(number)
            return
        is_reminder, self._is_reminder = self._is_reminder, False
        is_second = self._waiting and not is_reminder
        waiting = self._waiting or self._begin_waiting(number)
        if not self._is_importing(frame):
            self._raise(waiting)
        worked_s, waited_s = time.thread_time() - self._worked, time.monotonic() - self._since
        is_long = worked_s >= _PATIENCE_S or waited_s >= _PATIENCE_S * _MOST_WAITING
        if not (is_second or is_long):
            self._remind(signal.Signals(number))
            return
        if self.leave is None:
            self._raise(waiting)
        self.leave(waiting.name)
        os._exit(128 + waiting)

    def _begin_waiting(self, number: int) -> signal.Signals:
        self._waiting, self._since = signal.Signals(number), time.monotonic()
        self._worked = time.thread_time()
        return self._waiting

    def _is_importing(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self._outermost:
            if frame.f_code.co_filename == _IMPORTER:
                return True
            frame = frame.f_back
        return False

    def _remind(self, number: signal.Signals) -> None:
        """Send a signal again after a pause.

        It avoids `threading`, whose locks may be held by the interrupted code.
        """

        def send() -> None:
            time.sleep(_PAUSE_S)
            if self._waiting:
                self._is_reminder = True
                _thread.interrupt_main(number)

        _thread.start_new_thread(send, ())

    def _raise(self, number: signal.Signals) -> NoReturn:
        self._waiting, self.number = None, number
        for other in self._before:
            self._give_back(other)
        raise self._make_error(number)  # a name for it would keep it alive in this frame

    def _make_error(self, number: signal.Signals) -> BaseException:
        error = _Interrupted() if number == signal.SIGINT else Stopped(number)
        if self.leave is not None and not self._is_over:
            self._raised = weakref.ref(error, lambda _: self._raise_again())
        return error

    def _receive_lost(self, lost: Any) -> None:
        """Raise an interrupt again if Python discarded it where it could not be caught."""
        if self.number and issubclass(lost.exc_type, KeyboardInterrupt | Stopped):
            self._raise_again()
        else:
            self._hook(lost)

    def _raise_again(self) -> None:
        if self._waiting is None:
            self._begin_waiting(self.number)
            signal.signal(self.number, self._receive)
            self._remind(signal.Signals(self.number))
