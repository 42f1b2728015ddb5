"""What somebody sets on a module between its calls: attributes, other parts, hooks on its parts.

Exponents were found for the code that ran then. `module.mode = "b"` leads that code elsewhere as an
argument does, so what differs from then is a part of a call's signature. A part that was replaced has
weights without exponents.

**Catches** attributes that are set between calls, numbers and flags by value, other objects by kind; what
is written into short lists and mappings of numbers, flags and words, as an IP-Adapter's scales are; parts
that are replaced, added or removed, but for adapters and compiled code around the part that was there;
forward hooks that are put on parts; training mode.
**Does not catch** what a call sets itself, which is a state of its own (`kept_state`); what is inside of
other containers and objects; methods that are replaced; names that begin with an underscore and hook, as
Accelerate's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from stopdown.graph.call_signatures import describe_argument
from stopdown.interception.module_paths import OWN_ATTRIBUTES

_FOREIGN = ("stopdown", "_hf_", "_old_forward", "_diffusers_hook", "_compiled")
"""Beginnings of names that Stopdown and libraries set while they place weights and run code."""

_INNER = ("base_layer", "_orig_mod")
"""Attributes under which adapters and compiled code hold the part that was there."""

_LIBRARIES = ("stopdown.", "accelerate.", "diffusers.", "transformers.", "peft.", "torch.")
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, frozenset)
_MOST_ITEMS = 64
_MISSING = object()

Place = tuple[str, str]
"""Path of a part, and the name of an attribute of it."""


@dataclass
class _Part:
    path: str
    module: torch.nn.Module
    attributes: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    copies: dict[str, Any] = field(default_factory=dict)
    hooks: set[int] = field(default_factory=set)

    def note(self) -> None:
        self.attributes, self.parts = dict(vars(self.module)), dict(self.module._modules)
        self.copies = {
            name: copied
            for name, value in self.attributes.items()
            if isinstance(value, _CONTAINERS) and name not in OWN_ATTRIBUTES
            if (copied := _copy_plain(value)) is not _MISSING
        }

    def is_same(self) -> bool:
        now = vars(self.module)
        try:
            return (
                now == self.attributes
                and self.module._modules == self.parts
                and all(now[name] == copied for name, copied in self.copies.items())
            )
        except Exception:  # tensors and arrays are not equal or unequal as a whole
            return False

    def list_changes(self) -> Iterator[tuple[Place, Any, Any]]:
        """Place, value before and value now of what was set."""
        now = vars(self.module)
        for name in {**self.attributes, **now}:
            before, value = self.attributes.get(name, _MISSING), now.get(name, _MISSING)
            if name in self.copies and (copied := _copy_plain(value)) is not _MISSING:
                before, value = (
                    self.copies[name],
                    copied,
                )  # the same object may have been written to
                if before == value:
                    continue
            is_method = callable(getattr(type(self.module), name, None))
            if before is not value and not (
                name in OWN_ATTRIBUTES or name.startswith(_FOREIGN) or is_method
            ):
                yield (self.path, name), before, value
        parts = self.module._modules
        for name in {**self.parts, **parts}:
            before, value = self.parts.get(name, _MISSING), parts.get(name, _MISSING)
            is_around = any(x is before for x in _list_inner(value))
            if not (is_around or any(x is value for x in _list_inner(before))):
                yield (self.path, name), before, value


def _copy_plain(value: Any, depth: int = 2) -> Any:
    """A copy of a short container of numbers, flags and words; `_MISSING` of anything else."""
    if isinstance(value, _PLAIN):
        return value
    if depth == 0 or not isinstance(value, (*_CONTAINERS, tuple)) or len(value) > _MOST_ITEMS:
        return _MISSING
    if isinstance(value, dict):
        found = {name: _copy_plain(item, depth - 1) for name, item in value.items()}
        return _MISSING if any(x is _MISSING for x in found.values()) else found
    items = [_copy_plain(item, depth - 1) for item in value]
    if any(x is _MISSING for x in items):
        return _MISSING
    return type(value)(items) if type(value) in (list, tuple, set, frozenset) else items


def _list_inner(part: Any) -> Iterator[Any]:
    """What a part is around, from outside in, itself first."""
    while part is not None and part is not _MISSING:
        yield part
        part = next((x for name in _INNER if (x := getattr(part, name, None)) is not None), None)
    yield part


class ModuleSettings:
    """What is set on a module now, against what was set when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._is_training = module, module.training
        self._parts = [_Part(path, part) for path, part in module.named_modules()]
        for one in self._parts:
            one.hooks = set(_list_hooks(one.module))
        self._first: dict[Place, Any] = {}
        self._set: dict[Place, Any] = {}
        self._registered = RemovableHandle.next_id
        self.note()

    def note(self) -> None:
        """Take what is set now as the work of a call, or of exponents that were put on or taken off."""
        for one in self._parts:
            if not one.is_same():
                one.note()

    def read(self) -> None:
        """Look for what was set since the last look or `note`.

        Cost: a comparison of two dicts for each part, below a microsecond.
        """
        for one in self._parts:
            if one.is_same():
                continue
            for place, before, value in one.list_changes():
                first = self._first.setdefault(place, before)
                if _is_alike(first, value):
                    self._set.pop(place, None)
                else:
                    self._set[place] = value
            one.note()

    @property
    def is_other_code(self) -> bool:
        """Whether parts were replaced, added or removed."""
        return any(
            isinstance(x, torch.nn.Module)
            for place, value in self._set.items()
            for x in (value, self._first[place])
        )

    def describe(self) -> tuple[str, ...]:
        """What differs, as parts of a signature: `mode=b`, `other blocks.0`."""
        found = ["training=True"] if self._module.training > self._is_training else []
        for (path, name), value in self._set.items():
            full = f"{path}.{name}".removeprefix(".")
            if isinstance(value, torch.nn.Module) or isinstance(
                self._first[path, name], torch.nn.Module
            ):
                found.append(f"another {full}")
            elif value is _MISSING or value is None:
                found.append(f"{full}=None")
            else:
                kind = getattr(value, "__qualname__", None)
                found += [f"{full}:{kind}"] if kind else describe_argument(full, value)
        return tuple(sorted(found))

    def set_on(self, skeleton: torch.nn.Module) -> None:
        """Set on a copy of the module what is set on the module."""
        parts = dict(skeleton.named_modules())
        for place, first in self._first.items():
            value = self._set.get(place, first)
            part = parts.get(place[0])
            if part is not None and not isinstance(value, torch.nn.Module):
                if value is _MISSING:
                    part.__dict__.pop(place[1], None)
                else:
                    part.__dict__[place[1]] = value
        skeleton.train(self._module.training)

    def list_new_hooks(self) -> list[str]:
        """Paths of parts that somebody put forward hooks on since the last look.

        Cost: a comparison of two numbers if no hook was put on any module of the process.
        """
        if self._registered == RemovableHandle.next_id:
            return []
        self._registered, found = RemovableHandle.next_id, []
        for one in self._parts[1:]:  # hooks of the module itself see what its caller sees
            hooks = _list_hooks(one.module)
            if any(_is_foreign(x) for number, x in hooks.items() if number not in one.hooks):
                found.append(one.path)
            one.hooks = set(hooks)
        return found


def _list_hooks(part: torch.nn.Module) -> dict[int, Any]:
    return {**part._forward_hooks, **part._forward_pre_hooks}


def _is_foreign(hook: Any) -> bool:
    """Whether a hook is the user's: neither ours nor a library's."""
    while (inner := getattr(hook, "func", None)) is not None:
        hook = inner
    owner = type(hook.__self__) if hasattr(hook, "__self__") else hook
    module = getattr(owner, "__module__", None) or type(hook).__module__
    return not f"{module}.".startswith(_LIBRARIES)


def _is_alike(before: Any, now: Any) -> bool:
    """Whether code that asks for an attribute goes the same way."""
    if now is before:
        return True
    if isinstance(now, _CONTAINERS) or isinstance(before, _CONTAINERS):
        known = _MISSING not in (_copy_plain(before), _copy_plain(now))
        return bool(before == now) if known else True
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return True
    return type(now) is type(before) and isinstance(now, _PLAIN) and bool(now == before)
