"""Locks that keep a thread from changing a module while other threads call it.

A repair folds exponents into weights and hooks modules; another thread must not run a half-repaired
module. So the repair waits until other threads' calls of the module have finished, and new calls wait for
the repair. A module has one lock, however many guards it has.

Not covered: calls of a submodule by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import torch

_ONE_CHANGE = threading.RLock()
"""Held while any module is changed, because simultaneous captures in two threads disturb each other."""


class _Thread(threading.local):
    is_changing = False


_thread = _Thread()


Notice = Callable[[], None]


def _ignore() -> None: ...


class ComponentLock:
    """A lock on a module: shared by threads that call it, exclusive for a thread that changes it.

    Attributes:
        begin: called when the first of overlapping calls begins, except for replays by a thread that is
            changing the module.
        end: called when the last of overlapping calls ends, in any thread.
    """

    def __init__(self) -> None:
        self.begin: Notice = _ignore
        self.end: Notice = _ignore
        self._to_end: Notice = _ignore
        self._turn = threading.Condition()
        self._calls: dict[int, int] = {}  # how many, by thread
        self._owner: int | None = None

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Hold the shared lock while this thread calls the module; wait while another thread changes
        the module.

        A thread that is changing any module doesn't wait.
        """
        own = threading.get_ident()
        with self._turn:
            while not (self._owner in (None, own) or own in self._calls or _thread.is_changing):
                self._turn.wait()
            is_replay = self._owner == own  # in the middle of a change, from an earlier state
            if not (self._calls or is_replay):
                self._to_end = self.end  # of the same: another may be put on in the middle of calls
                self.begin()
            self._calls[own] = self._calls.get(own, 0) + 1
        try:
            yield
        finally:
            with self._turn:
                self._calls[own] -= 1
                if not self._calls[own]:
                    del self._calls[own]
                    self._turn.notify_all()
                    if not (self._calls or is_replay):
                        self._to_end()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Hold the lock's mutex in a short block that records results of calls; the block must not wait."""
        with self._turn:
            yield

    @property
    def is_calling(self) -> bool:
        """Whether this thread is inside of a call of the module."""
        return threading.get_ident() in self._calls

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the lock exclusively: wait until no other thread calls the module, and let none begin.

        If this thread is inside a call of the module, that call doesn't count meanwhile, so that several
        threads that wait inside calls don't deadlock.
        """
        own = threading.get_ident()
        with self._turn:
            is_inside = self._owner == own
            resting = 0 if is_inside else self._calls.pop(own, 0)
            if resting:
                self._turn.notify_all()
            while self._owner not in (None, own):
                self._turn.wait()
            self._owner = own
            while not is_inside and self._calls:
                self._turn.wait()
        try:
            yield
        finally:
            with self._turn:
                if resting:
                    self._calls[own] = resting
                self._owner = own if is_inside else None
                self._turn.notify_all()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock to change the module: no other thread calls it meanwhile, or changes any module."""
        with self.owned(), _ONE_CHANGE:
            before, _thread.is_changing = _thread.is_changing, True
            try:
                yield
            finally:
                _thread.is_changing = before


def is_changing() -> bool:
    return _thread.is_changing


_locks: WeakKeyDictionary[torch.nn.Module, ComponentLock] = WeakKeyDictionary()


def find_lock(module: torch.nn.Module) -> ComponentLock:
    return _locks.setdefault(module, ComponentLock())  # one step: two threads get the same
