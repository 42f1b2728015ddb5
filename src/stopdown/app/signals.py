"""Conversion of termination signals into exceptions, so that files are closed and temporary ones removed.

Python does so for Ctrl-C. SIGTERM (`kill`, `timeout`, a preempted job) and SIGHUP (a closed terminal) would
end the process at once and leave temporary files and locks behind. So would SIGBREAK on Windows
(Ctrl-Break, a closed console), where SIGTERM cannot be sent. A signal that is already ignored (`nohup`) or
handled is left alone, and in a forked child the signals have their previous handlers.

No exception is raised during an import. Libraries would catch it, or access the half-imported module (NumPy
until the recursion limit), and PyTorch's C++ code would abort. The signal is delayed until the import ends.
If the import takes long, the process exits without unwinding; the next process that writes to the same
place removes its temporary files. The time of an import is measured in CPU time, as a busy machine is slow
in wall-clock time. An import that waits for something else is given ten times as long by the clock.

An interrupt is raised again if Python could only print it (in `__del__` or a callback) or if a library
caught and dropped it. Under `stopdown run`, the user's script may drop it.

Not covered: signals before the program begins, or while a C function does not return.
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
"""CPU time in seconds for which a signal waits for an import to end."""

_MOST_WAITING = 10.0
"""Longest wait by the clock, as a multiple of `_PATIENCE_S`."""

_PAUSE_S = 0.02
"""Time between two checks of whether the import has ended."""


class Stopped(SystemExit):
    """Raised for a signal that ends the program; its exit code is 128 plus the number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class _Interrupted(KeyboardInterrupt):
    """Raised for Ctrl-C; unlike `KeyboardInterrupt` itself, it can be weakly referenced."""


class SignalTrap:
    """Context manager in which a termination signal raises an exception.

    The first signal raises `Stopped`, or `KeyboardInterrupt` for Ctrl-C. A second one ends the process.

    Attributes:
        leave: called with the name of a signal that arrives during a long import, before the process exits.
            If it is None, the exception is raised in the import, as scripts may run for hours inside one.
        number: number of the signal that was raised; 0 before.
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
        """Restore the signals' default action, so that one that arrives during exit prints nothing."""
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
        """Send a signal that arrived during an import once more after a pause.

        The thread is started without `threading`, as the interrupted code may hold that module's locks.
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
