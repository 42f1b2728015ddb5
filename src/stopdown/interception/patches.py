"""The undo stack: the only way anything is put on a pipeline, a module or an object.

Every change is recorded with what was there before, "absent" included, and is taken back in reverse
order. Undoing twice is harmless. Values of tensors that are changed in place are kept as clones.

Not covered: what others change on the same object meanwhile: their change is overwritten when it sits on
the same attribute.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, MutableMapping
from typing import Any, Self

import torch

Place = tuple[slice, ...]
"""What of a tensor is meant, as in indexing it: all of it, some rows, or some columns."""

CHANGING = threading.RLock()
"""Held for the moment in which what threads share is changed: layers, classes, functions of libraries."""

_ABSENT = object()


class Patches:
    """A stack of changes that come off in reverse order, also as a context manager."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set_attribute(self, target: object, name: str, value: object) -> None:
        """Set an attribute in the instance's own `__dict__`; undoing restores or removes it."""
        before = vars(target).get(name, _ABSENT)
        vars(target)[name] = value
        self._undo.append(lambda: _restore(vars(target), name, before))

    def set_class_attribute(self, target: type, name: str, value: object) -> None:
        """Set an attribute of a class; undoing restores it, or removes it where it was inherited."""
        before = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        restore = (
            functools.partial(delattr, target, name)
            if before is _ABSENT
            else functools.partial(setattr, target, name, before)
        )
        self._undo.append(restore)

    def remove_attribute(self, target: object, name: str) -> None:
        """Remove an attribute from the instance's own `__dict__`; undoing puts it back."""
        before = vars(target).pop(name, _ABSENT)
        self._undo.append(lambda: _restore(vars(target), name, before))

    def set_item(self, target: MutableMapping[Any, Any], key: Any, value: object) -> None:
        """Set an entry of a mapping; undoing restores or removes it."""
        before = target.get(key, _ABSENT)
        target[key] = value
        self._undo.append(lambda: _restore(target, key, before))

    def write_tensor(self, target: torch.Tensor, value: torch.Tensor, place: Place = ()) -> None:
        """Overwrite a tensor's values, or those at some place, in place; undoing restores every bit.

        Cost: a copy of the tensor until it is undone.
        """
        before = _take(target, place).detach().clone()
        _rewrite(target, value, place)
        self._undo.append(lambda: _rewrite(target, before, place))

    def scale_tensor(
        self, target: torch.Tensor, exponent: int | torch.Tensor, place: Place = ()
    ) -> None:
        """Multiply a tensor, or one place in it, in place by `2**exponent`.

        Several exponents are spread over the tensor as in any arithmetic. The values are kept only
        when multiplying back would not restore every bit. Undoing acts on what the tensor holds by
        then, so a parameter that was cast meanwhile is scaled back too.
        """
        if isinstance(exponent, int) and exponent == 0:
            return
        before = _take(target, place).detach()
        scaled = _scale(before, exponent)
        if torch.equal(_scale(scaled, -exponent), before):
            _rewrite(target, scaled, place)
            self._undo.append(lambda: _rescale(target, -exponent, place))
        else:
            self.write_tensor(target, scaled, place)

    def defer(self, undo: Callable[[], object]) -> None:
        """Record any other change by the call that takes it back."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Take every change back, newest first. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __len__(self) -> int:
        return len(self._undo)

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class SameInCopies:
    """Stays itself when what holds it is copied: hooks name it, and it serves the original alone."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


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
    factor = torch.as_tensor(exponent, device=values.device)
    return torch.ldexp(values, factor).to(values.dtype)
