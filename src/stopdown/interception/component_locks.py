"""Calls of one module by several threads, and the thread that changes it: never both at once.

A repair folds exponents into weights and hooks modules; another thread would meet it half done. So it
waits until the calls that other threads make of the module are over, and new ones wait for it.
A module has one lock, however many guards it has.

Not covered: calls of a part of the module by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import torch

_ONE_CHANGE = threading.RLock()
"""Held while a module is changed: captures of two threads at once disturb each other."""


class _Thread(threading.local):
    is_changing = False


_thread = _Thread()


Notice = Callable[[], None]


def _ignore() -> None: ...


class ComponentLock:
    """Who calls a module, and who changes it.

    Attributes:
        begin: called before the first of the calls that run at once, except for replays of a thread that
            changes the module.
        end: called after the last of them, whoever began it.
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
        """Hold a place among the module's calls during a call of this thread.

        The thread that changes a module does not wait for one that will change another after it.
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
        """Count what calls of several threads did, one at a time; wait for nothing inside."""
        with self._turn:
            yield

    @property
    def is_calling(self) -> bool:
        """Whether this thread is inside of a call of the module."""
        return threading.get_ident() in self._calls

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Own the module inside the block: no other thread calls it.

        Inside of a call of this thread the call rests meanwhile: others that wait in theirs come first.
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
        """Change the module inside the block: no other thread calls it, and none changes any."""
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
