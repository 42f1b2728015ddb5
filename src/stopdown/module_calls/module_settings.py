"""Notice that somebody changed a module between calls: attributes, submodules, code.

Exponents hold for the branches that code took. `module.mode = "b"` selects another branch as an argument
does, so changed settings are part of a call's signature. The weights of a replaced submodule, and the
tensors of a replaced function, have no exponents.

**Catches** attributes that are set between calls, numbers and flags by value, other objects by type;
changes inside short lists and mappings of numbers, flags and strings, such as an IP-Adapter's scales;
submodules that are replaced, added or removed, except for adapters and compiled code around the original;
functions, classes and hooks, as `module_code` finds them; training mode.

**Does not catch** attributes that a call sets itself (`kept_state`); changes inside of other containers and
objects; attributes that libraries set to load and place weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.interception.module_paths import OWN_ATTRIBUTES
from stopdown.module_calls.call_signatures import describe_argument
from stopdown.module_calls.module_code import (
    MISSING,
    Functions,
    Hooks,
    find_own_code,
    is_alike_code,
    is_code,
    is_method,
    list_differences,
    list_functions,
    sign_code,
)

_FOREIGN = (
    *("stopdown", "_hf_", "_old_forward", "_diffusers_hook", "_compiled", "_is_torch"),
    *("hf_", "is_quantized", "quantization_method", "_is_hf_", "_use_kernels", "generation_config"),
)
"""Prefixes of attributes that Stopdown and libraries set to load and place weights and to run code."""

_INNER = ("base_layer", "_orig_mod")
"""Attributes under which adapters and compiled code hold the original module."""

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, frozenset)
_MOST_ITEMS = 64
_CLASS = "__class__"

Place = tuple[str, str]
"""Path of a module, and the name of one of its attributes."""


@dataclass
class _Part:
    path: str
    module: torch.nn.Module
    attributes: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    copies: dict[str, Any] = field(default_factory=dict)
    kind: type | None = None

    def note(self) -> None:
        self.kind = type(self.module)
        self.attributes, self.parts = dict(vars(self.module)), dict(self.module._modules)
        self.copies = {
            name: copied
            for name, value in self.attributes.items()
            if isinstance(value, _CONTAINERS) and name not in OWN_ATTRIBUTES
            if (copied := _copy_plain(value)) is not MISSING
        }

    def is_same(self) -> bool:
        now = vars(self.module)
        try:
            return (
                type(self.module) is self.kind
                and now == self.attributes
                and self.module._modules == self.parts
                and all(now[name] == copied for name, copied in self.copies.items())
            )
        except Exception:  # tensors and arrays are not equal or unequal as a whole
            return False

    def list_changes(self) -> Iterator[tuple[Place, Any, Any]]:
        """Yield each changed attribute or submodule: its place, the earlier and the current value."""
        now = vars(self.module)
        for name in {**self.attributes, **now}:
            before, value = self.attributes.get(name, MISSING), now.get(name, MISSING)
            if name in self.copies and (copied := _copy_plain(value)) is not MISSING:
                before, value = (
                    self.copies[name],
                    copied,
                )  # the same object may have been written to
                if before == value:
                    continue
            if before is not value and not (
                name in OWN_ATTRIBUTES or name.startswith(_FOREIGN) or is_method(self.module, name)
            ):
                yield (self.path, name), before, value
        for name, before, value in list_differences(self.parts, self.module._modules):
            is_around = any(x is before for x in _list_inner(value))
            if not (is_around or any(x is value for x in _list_inner(before))):
                yield (self.path, name), before, value

    def list_code(self) -> Iterator[tuple[Place, Any, Any]]:
        """Yield replaced code of this submodule, its class or its methods: place, earlier and present
        function.
        """
        kind = type(self.module)
        for name, before, value in list_differences(self.attributes, vars(self.module)):
            if is_code(self.module, name):
                found = [find_own_code(self.module, name, x) for x in (before, value)]
                yield (self.path, name), *found
        if kind is not self.kind:
            yield (self.path, _CLASS), self.kind, kind


def _copy_plain(value: Any, depth: int = 2) -> Any:
    """Copy a plain value or a short container of numbers, flags and strings; else return `MISSING`."""
    if isinstance(value, _PLAIN):
        return value
    if depth == 0 or not isinstance(value, (*_CONTAINERS, tuple)) or len(value) > _MOST_ITEMS:
        return MISSING
    if isinstance(value, dict):
        found = {name: _copy_plain(item, depth - 1) for name, item in value.items()}
        return MISSING if any(x is MISSING for x in found.values()) else found
    items = [_copy_plain(item, depth - 1) for item in value]
    if any(x is MISSING for x in items):
        return MISSING
    return type(value)(items) if type(value) in (list, tuple, set, frozenset) else items


def _list_inner(part: Any) -> Iterator[Any]:
    """Yield a module and those that it wraps, as adapters and compiled modules do, from outside in.

    The end of the chain is yielded as well: None, or `MISSING` for a missing part.
    """
    while part is not None and part is not MISSING:
        yield part
        part = next((x for name in _INNER if (x := getattr(part, name, None)) is not None), None)
    yield part


def sign_settings(module: torch.nn.Module) -> tuple[object, ...]:
    """Return a key of the code and plain attributes that decide what a module's calls do.

    It's valid in this process only, and keeps no reference to the module.
    """
    named = list(module.named_modules())
    plain = [
        (path, name, copied)
        for path, part in named
        for name, value in sorted(vars(part).items())
        if not (name in OWN_ATTRIBUTES or name.startswith(_FOREIGN))
        if (copied := _copy_plain(value)) is not MISSING
    ]
    return hashlib.sha256(repr(plain).encode()).hexdigest(), *sign_code(named)


class ModuleSettings:
    """Finds which settings of a module (attributes, submodules, code) differ from those at this
    object's creation.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._is_training = module, module.training
        named = list(module.named_modules())
        self._parts = [_Part(path, part) for path, part in named]
        self._functions = list_functions(part for _, part in named)
        self._hooks = Hooks(named[1:])
        self._first: dict[Place, Any] = {}
        self._set: dict[Place, Any] = {}
        self._first_code: dict[Place, Any] = {}
        self._code: dict[Place, Any] = {}
        self._put: list[str] = []
        self.note()

    def note(self) -> None:
        """Accept the module's present settings as unchanged, because a call or the folding of exponents
        has set them.
        """
        held: list[_Part | Functions] = [*self._parts, *self._functions]
        for one in held:
            if not one.is_same():
                one.note()

    def read(self) -> None:
        """Find the settings that were changed since the last `read` or `note`, for `describe`.

        Cost: a comparison of two dicts for each submodule and class, below 1 µs.
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
            for place, before, value in one.list_code():
                self._note_code(place, before, value)
            one.note()
        for kind in self._functions:
            if not kind.is_same():
                for name, before, value in kind.list_changes():
                    self._note_code((f"{kind.path}", name), before, value)
                kind.note()
        self._put = self._hooks.list_new()

    def _note_code(self, place: Place, before: Any, value: Any) -> None:
        if is_alike_code(self._first_code.setdefault(place, before), value):
            self._code.pop(place, None)
        else:
            self._code[place] = value

    @property
    def is_other_code(self) -> bool:
        """Whether functions, hooks or submodules were changed, which a copy of the module doesn't have."""
        return bool(self._code or self._put) or any(
            isinstance(x, torch.nn.Module)
            for place, value in self._set.items()
            for x in (value, self._first[place])
        )

    def describe(self) -> tuple[str, ...]:
        """Describe the differences as parts of a signature, such as `mode=b` or `another blocks.0`."""
        found = ["training=True"] if self._module.training > self._is_training else []
        for (path, name), value in self._set.items():
            full = f"{path}.{name}".removeprefix(".")
            if isinstance(value, torch.nn.Module) or isinstance(
                self._first[path, name], torch.nn.Module
            ):
                found.append(f"another {full}")
            elif value is MISSING or value is None:
                found.append(f"{full}=None")
            else:
                kind = getattr(value, "__qualname__", None)
                found += [f"{full}:{kind}"] if kind else describe_argument(full, value)
        found += [f"another {'.'.join(filter(None, place))}" for place in self._code]
        return tuple(sorted((*found, *self._put)))

    def set_on(self, skeleton: torch.nn.Module) -> None:
        """Give a copy of the module the same changed attributes and training mode."""
        parts = dict(skeleton.named_modules())
        for place, first in self._first.items():
            value = self._set.get(place, first)
            part = parts.get(place[0])
            if part is not None and not isinstance(value, torch.nn.Module):
                if value is MISSING:
                    part.__dict__.pop(place[1], None)
                else:
                    part.__dict__[place[1]] = value
        skeleton.train(self._module.training)


def _is_alike(before: Any, now: Any) -> bool:
    """Return whether an attribute's change from one value to another leaves the branches that code
    takes the same.

    Tensors always do, plain values if they are equal, other objects only if they are identical.
    """
    if now is before:
        return True
    if isinstance(now, _CONTAINERS) or isinstance(before, _CONTAINERS):
        known = MISSING not in (_copy_plain(before), _copy_plain(now))
        return bool(before == now) if known else True
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return True
    return type(now) is type(before) and isinstance(now, _PLAIN) and bool(now == before)
