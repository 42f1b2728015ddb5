"""The undo stack: all changes to pipelines, modules and other objects go through it.

Every change is recorded with the earlier state, including "absent", and undone in reverse order. Undoing
twice is harmless. The old values of tensors that are changed in place are kept as clones. Ctrl-C waits
until a change is recorded, and until all of them are undone.

Not covered: other code's changes to the same attribute in the meantime, which are overwritten.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from types import FrameType
from typing import Any, NoReturn, Self

import torch

from stopdown.errors import InputError
from stopdown.interception.tracing import is_traced

Place = tuple[slice, ...]
"""An index into a tensor: `()` for all of it, or slices for some rows or columns."""

CHANGING = threading.RLock()
"""Held while state that threads share is changed: layers, classes, functions of libraries."""

_ABSENT = object()

_MOST_INTERRUPTS = 3
"""Ctrl-C this often isn't postponed any longer: something may be waiting in vain."""


@contextlib.contextmanager
def interrupts_postponed() -> Iterator[None]:
    """Postpone Ctrl-C to the end of the block.

    An interrupt between a write and its record would leave weights scaled for good.
    """
    given = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(given):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) >= _MOST_INTERRUPTS:
            given(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if (now := signal.signal(signal.SIGINT, given)) is not note:
            signal.signal(signal.SIGINT, now)  # somebody else's since
        if 0 < len(came) < _MOST_INTERRUPTS:
            given(*came[0])


class Patches:
    """A stack of changes that are undone in reverse order; also a context manager.

    Source: the idea is that of `monkeypatch` in pytest.

    Examples:
        >>> tensor = torch.tensor([1.0, 3.0])
        >>> with Patches() as patches:
        ...     patches.scale_tensor(tensor, 4)
        ...     tensor.tolist()
        [16.0, 48.0]
        >>> tensor.tolist()
        [1.0, 3.0]
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set_attribute(self, target: object, name: str, value: object) -> None:
        """Set an attribute in the instance's own `__dict__`; undoing restores or removes it."""
        self.set_item(vars(target), name, value)

    def set_class_attribute(self, target: type, name: str, value: object) -> None:
        """Set an attribute of a class; undoing restores it, or removes it if it was inherited."""
        before = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        restore = (
            functools.partial(delattr, target, name)
            if before is _ABSENT
            else functools.partial(setattr, target, name, before)
        )
        self._undo.append(restore)

    def remove_attribute(self, target: object, name: str) -> None:
        """Remove an attribute from the instance's own `__dict__`; undoing restores it."""
        before = vars(target).pop(name, _ABSENT)
        self._undo.append(lambda: _restore(vars(target), name, before))

    def set_item(self, target: MutableMapping[Any, Any], key: Any, value: object) -> None:
        """Set an entry of a mapping; undoing restores or removes it."""
        before = target.get(key, _ABSENT)
        self._undo.append(lambda: _restore(target, key, before))
        target[key] = value

    def write_tensor(self, target: torch.Tensor, value: torch.Tensor, place: Place = ()) -> None:
        """Overwrite a tensor's values in place, all or those at an index; undoing restores every bit.

        Cost: a copy of the old values until undone.
        """
        before = _take(target, place).detach().clone()
        self._undo.append(lambda: _rewrite(target, before, place))
        _rewrite(target, value, place)

    def scale_tensor(
        self, target: torch.Tensor, exponent: int | torch.Tensor, place: Place = ()
    ) -> None:
        """Multiply a tensor, or a part of it, in place by `2**exponent`.

        A tensor of exponents is broadcast. The old values are kept only if multiplying back wouldn't
        restore every bit. Undoing scales the tensor's values at that time, so it works for a parameter
        that was cast in the meantime.
        """
        if isinstance(exponent, int) and exponent == 0:
            return
        before = _take(target, place).detach()
        scaled = _scale(before, exponent)
        if torch.equal(_scale(scaled, -exponent), before):
            with interrupts_postponed():
                _rewrite(target, scaled, place)
                self._undo.append(lambda: _rescale(target, -exponent, place))
        else:
            self.write_tensor(target, scaled, place)

    def defer(self, undo: Callable[[], object]) -> None:
        """Record any other change by the function that undoes it."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo every change, newest first. A second call does nothing."""
        if self._undo:
            with interrupts_postponed():
                while self._undo:
                    self._undo.pop()()

    def __len__(self) -> int:
        return len(self._undo)

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class RunningCalls:
    """What a pair of hooks has begun before the calls that run, to be ended after them, by thread.

    A copy of a module has a copy of its hooks, in which no call runs.
    """

    def __init__(self) -> None:
        self._traced: list[Callable[[], object]] = []

    def begin(self, end: Callable[[], object]) -> None:
        """Have `end` called once the call that begins now has ended."""
        if is_traced():  # a compiler doesn't follow what belongs to threads
            self._traced.append(end)
        else:
            _list_running().append((self, end))

    def end(self) -> None:
        """End what was begun before the innermost call; do nothing if another hook raised first."""
        if is_traced():
            if self._traced:
                self._traced.pop()()
            return
        running = _list_running()
        at = next((at for at in reversed(range(len(running))) if running[at][0] is self), None)
        if at is not None:
            running.pop(at)[1]()

    def __reduce__(self) -> tuple[type[RunningCalls], tuple[()]]:
        return RunningCalls, ()


@contextlib.contextmanager
def ended_calls() -> Iterator[None]:
    """End what hooks have begun in the block, also after Ctrl-C, for which PyTorch calls no hooks."""
    running = _list_running()
    depth = len(running)
    try:
        yield
    finally:
        while len(running) > depth:
            running.pop()[1]()


def _list_running() -> list[tuple[RunningCalls, Callable[[], object]]]:
    """List what this thread's calls have begun, the innermost last: whose hooks, and what ends it."""
    return _running.setdefault(threading.get_ident(), [])


_running: dict[int, list[tuple[RunningCalls, Callable[[], object]]]] = {}


class SameInCopies:
    """Base class of objects that `copy.deepcopy` returns unchanged and that aren't pickled, because they
    belong to the original only.
    """

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> str:
        refuse_pickling()


def refuse_pickling() -> NoReturn:
    """Raise an error in place of pickling what watches a module's calls."""
    raise InputError(
        "A module can't be pickled while its calls are watched, as torch.save(module) does.",
        expected="Its hooks belong to a guard or a plan, and would be saved with it.",
        remedy="Take that off first (.remove(), .undo(), or leave the with block), or save the weights "
        "alone: module.state_dict().",
    )


def call_while_alive(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method as long as its object lives, and does not keep it
    alive.
    """
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := found()) is not None:
            alive(*args)

    return call


def _restore(target: MutableMapping[Any, Any], key: Any, before: object) -> None:
    if before is _ABSENT:
        target.pop(key, None)
    else:
        target[key] = before


def _take(target: torch.Tensor, place: Place) -> torch.Tensor:
    return target[place] if target.dim() else target


def _rewrite(target: torch.Tensor, value: torch.Tensor, place: Place) -> None:
    with torch.no_grad():
        _take(target, place).copy_(value)


def _rescale(target: torch.Tensor, exponent: int | torch.Tensor, place: Place) -> None:
    _rewrite(target, _scale(_take(target, place).detach(), exponent), place)


def _scale(values: torch.Tensor, exponent: int | torch.Tensor) -> torch.Tensor:
    if isinstance(exponent, torch.Tensor):
        return torch.ldexp(values, exponent.to(values.device)).to(values.dtype)
    is_held = values.dtype != torch.float16 or -14 <= exponent <= 15  # the factor itself, in fp16
    return ((values if is_held else values.float()) * 2.0**exponent).to(values.dtype)
