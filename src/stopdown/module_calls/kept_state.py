"""What a module keeps from one call to the next: buffers that a call writes, attributes that it sets, hooks
that it registers.

Exponents are found for calls that are functions of their arguments. A module that adds to a running mean,
counts its calls or remembers a result computes something else the second time, so nothing can be compared,
and what it remembers would have to be rescaled as well.

**Catches** buffers that are written or replaced; attributes that are set; lists, sets and mappings in
attributes that grow, shrink or get other values; hooks that are put on parts, as Transformers puts its
recorders of hidden states on them at the first call that asks for some.
**Does not catch** what is kept inside of other objects, or in variables outside of the module.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from stopdown.interception.code_homes import is_own
from stopdown.interception.module_paths import OWN_ATTRIBUTES
from stopdown.interception.patches import Patches
from stopdown.number_formats import list_some
from stopdown.numerics import count_writes, has_values


class KeptState:
    """What a module keeps, as it is now.

    Cost: a copy of every buffer, for as long as this is held.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._parts = dict(module.named_modules())
        self._hooks = {path: set(_list_hooks(part)) for path, part in self._parts.items()}
        self._attributes = {path: _read_attributes(part) for path, part in self._parts.items()}
        self._buffers = {
            (path, name): (tensor, tensor.detach().clone(), count_writes(tensor))
            for path, part in self._parts.items()
            for name, tensor in part._buffers.items()
            if tensor is not None and has_values(tensor)
        }

    def list_changes(self) -> list[str]:
        """Return the names of the buffers, attributes and hooks that a call has changed since.

        Cost: of each buffer that was written a comparison and a host read; of others none.
        """
        changed = [
            f"{path}.{name}".removeprefix(".")
            for (path, name), held in self._buffers.items()
            if not _is_same(self._parts[path]._buffers.get(name), *held)
        ]
        for path, part in self._parts.items():
            before, now = self._attributes[path], _read_attributes(part)
            names = [x for x in (*before, *(now.keys() - before.keys()))]
            changed += [
                f"{path}.{name}".removeprefix(".")
                for name in names
                if _mark(before.get(name)) != _mark(now.get(name))
            ]
        return [*changed, *(f"{path}.{_HOOKS}".removeprefix(".") for path in self._list_hooked())]

    def _list_hooked(self) -> list[str]:
        """List the parts, by path, that a call put hooks on; hooks of Stopdown's repairs do not count."""
        return [path for path, part in self._parts.items() if self._list_new_hooks(path, part)]

    def _list_new_hooks(self, path: str, part: torch.nn.Module) -> list[int]:
        known = self._hooks[path]
        return [x for x, hook in _list_hooks(part).items() if x not in known and not is_own(hook)]

    def restore(self, names: list[str]) -> None:
        """Restore what `list_changes` named; everything else may have been cast or scaled since.

        Of hooks, those that later calls of the same kind put on go as well.
        """
        patches = Patches()  # never undone: this is how it was
        for full in names:
            path, _, name = full.rpartition(".")
            part = self._parts[path]
            if name == _HOOKS:
                for number in self._list_new_hooks(path, part):
                    for table in _list_tables(part):
                        table.pop(number, None)
            elif (path, name) in self._buffers:
                tensor, before, _ = self._buffers[path, name]
                patches.write_tensor(tensor, before)
                patches.set_item(part._buffers, name, tensor)
            elif name in self._attributes[path]:
                value, held = self._attributes[path][name]
                patches.set_attribute(part, name, value)
                _refill(value, held)
            else:
                patches.remove_attribute(part, name)


_HOOKS = "(hooks)"


def _list_hooks(part: torch.nn.Module) -> dict[int, Any]:
    return {**part._forward_hooks, **part._forward_pre_hooks}


def _list_tables(part: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the tables of a part's hooks and of their call options, keyed by hook number."""
    return (
        part._forward_hooks_with_kwargs,
        part._forward_hooks_always_called,
        part._forward_pre_hooks_with_kwargs,
        part._forward_hooks,
        part._forward_pre_hooks,
    )


def describe_kept(module: torch.nn.Module, names: list[str]) -> str:
    """Describe the state that a module keeps between calls, as a sentence."""
    return f"{type(module).__name__} keeps {list_some(names)} from one call to the next."


def _is_same(
    now: torch.Tensor | None, tensor: torch.Tensor, before: torch.Tensor, writes: int | None
) -> bool:
    if now is not tensor:
        return False
    if writes is not None and count_writes(now) == writes:
        return True
    return bool(((now == before) | (now.isnan() & before.isnan())).all())


def _read_attributes(part: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    return {name: (x, _hold(x)) for name, x in vars(part).items() if name not in OWN_ATTRIBUTES}


def _hold(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set, deque) else None


def _refill(value: Any, held: Any) -> None:
    if held is None:
        return
    value.clear()
    value.extend(held) if isinstance(value, list | deque) else value.update(held)


def _mark(found: tuple[Any, Any] | None) -> Any:
    """Return a mark that tells values of an attribute apart: plain ones by value, others by identity."""
    if found is None:
        return None
    value, held = found
    if isinstance(held, dict):
        return id(value), tuple((key, id(x)) for key, x in held.items())
    if held is not None:
        return id(value), tuple(map(id, held))
    return (type(value), value) if isinstance(value, bool | int | float | str) else id(value)
