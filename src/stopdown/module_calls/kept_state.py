"""Notice and restore state that a call changes: a module's buffers, attributes and hooks, and containers
among the call's arguments.

Exponents are found for calls that depend only on their arguments. A module that updates a running mean,
counts its calls or caches a result computes something else the second time, so results can't be compared,
and the cached values would have to be rescaled as well.

**Catches** buffers that are written or replaced; attributes that are set; lists, sets and mappings in
attributes whose contents change; hooks on submodules, such as those that Transformers registers at the
first call that requests hidden states; fake tensors in global variables of the module's code.

**Does not catch** state inside of other objects, and other values in variables outside of the module.
"""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from stopdown.interception.arguments import count_writes
from stopdown.interception.code_homes import is_own
from stopdown.interception.module_paths import OWN_ATTRIBUTES
from stopdown.interception.patches import Patches
from stopdown.interception.randomness import find_random, find_weights_device
from stopdown.number_formats import list_some
from stopdown.numerics import has_values, iterate_tensors


class KeptState:
    """A snapshot of a module's buffers, attributes and hooks, to find and undo what a call changes.

    Cost: a copy of every buffer, as long as the snapshot exists.
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
        """Return the names of the buffers, attributes and hooks that have changed since the snapshot.

        Cost: for each buffer that was written, a comparison and a host read.
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
        """List the paths of submodules with new hooks, except those of Stopdown's own."""
        return [path for path, part in self._parts.items() if self._list_new_hooks(path, part)]

    def _list_new_hooks(self, path: str, part: torch.nn.Module) -> list[int]:
        known = self._hooks[path]
        return [x for x, hook in _list_hooks(part).items() if x not in known and not is_own(hook)]

    def restore(self, names: list[str]) -> None:
        """Restore the named buffers, attributes and hooks from the snapshot.

        Others may have been cast or scaled since, and are left alone. New hooks are removed.

        Args:
            names: from `list_changes`.
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
    """Return the dicts of a module's forward hooks and their options, keyed by hook id."""
    return (
        part._forward_hooks_with_kwargs,
        part._forward_hooks_always_called,
        part._forward_pre_hooks_with_kwargs,
        part._forward_hooks,
        part._forward_pre_hooks,
    )


def describe_kept(module: torch.nn.Module, names: list[str]) -> str:
    """Describe, in a sentence for an error, the state that a module keeps between calls.

    Args:
        names: from `KeptState.list_changes`.
    """
    return f"{type(module).__name__} keeps {list_some(names)} from one call to the next."


def read_kept(module: torch.nn.Module, names: list[str]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the tensors in a module's attributes of these names; buffers and weights are left out.

    Args:
        names: from `KeptState.list_changes`.
    """
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    for full in names:
        path, _, name = full.rpartition(".")
        held = tuple(iterate_tensors(vars(module.get_submodule(path)).get(name)))
        if held:
            found[full] = held
    return found


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
    """Copy the items of a container; None for other values, and for classes that may make their items."""
    return _copy_items(value) if type(value) in _CONTAINERS else None


def _copy_items(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _refill(value: Any, held: Any) -> None:
    if held is None:
        return
    value.clear()
    value.extend(held) if isinstance(value, list | deque) else value.update(held)


_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


def _mark(found: tuple[Any, Any] | None) -> Any:
    """Return a key that differs if an attribute was changed: the value of a plain one, else the
    object's identity.
    """
    if found is None:
        return None
    value, held = found
    if isinstance(held, dict):
        return id(value), tuple((key, id(x)) for key, x in held.items())
    if held is not None:
        return id(value), tuple(map(id, held))
    return (type(value), value) if isinstance(value, bool | int | float | str) else id(value)


def run_call(
    module: torch.nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
) -> tuple[Any, bool]:
    """Run a call so that it can be repeated: on copies of its arguments, with random generators
    restored afterwards.

    Returns:
        Its output, and whether it drew random numbers.
    """
    given = pytree.tree_map_only(torch.Tensor, torch.clone, (args, dict(kwargs or {})))
    sources = find_random(find_weights_device(module), pytree.tree_leaves(given))
    states = [source.read() for source in sources]
    try:
        with torch.no_grad():
            output = call(*given[0], **given[1])
        pairs = zip(sources, states, strict=True)
        return output, not all(torch.equal(source.read(), state) for source, state in pairs)
    finally:
        for source, state in zip(sources, states, strict=True):
            source.put(state)


class HeldContainers:
    """A snapshot of the lists, sets, dicts and objects in a nested value, which a call may fill.

    Of an object, such as a key/value cache, the dict of its attributes is saved. Tensors aren't copied.
    """

    def __init__(self, value: Any) -> None:
        found = list(list_containers(value, set()))
        self._containers = [(x, _copy_items(x)) for x, _ in found]
        self._in_objects = [x for x, is_inside in found if is_inside]

    @property
    def has_objects(self) -> bool:
        """Whether the value contains objects with attributes that a call may set."""
        return bool(self._in_objects)

    @property
    def has_kept_tensors(self) -> bool:
        """Whether objects in the value hold tensors."""
        return any(True for _ in iterate_tensors(self._in_objects))

    @property
    def is_filled(self) -> bool:
        """Whether new tensors have been put into the lists, sets, dicts or objects."""
        known = {id(x) for _, held in self._containers for x in _list_items(held)}
        return any(
            id(x) not in known and any(True for _ in iterate_tensors(x))
            for container, _ in self._containers
            for x in _list_items(container)
        )

    def restore(self) -> None:
        """Restore the contents that lists, sets, dicts and objects had."""
        for container, held in self._containers:
            if list(map(id, _list_items(container))) != list(map(id, _list_items(held))):
                _refill(container, held)


class KeptGlobals:
    """A snapshot of the global variables of a module's code, to take out fake tensors that a trace leaves
    there: a later call would compute with them.

    Attention processors and other objects in its attributes are its code as well.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        parts = [x for part in module.modules() for x in (part, *vars(part).values())]
        homes = {kind.__module__ for x in parts for kind in type(x).__mro__}
        homes |= {str(getattr(x, "__module__", "")) for x in parts}  # of functions set on them
        found = {x: sys.modules.get(x) for x in homes if x.partition(".")[0] not in _WITHOUT_STATE}
        self._tables = {name: vars(home) for name, home in found.items() if home is not None}
        self._before = {
            (home, name): (value, [(x, _hold(x)) for x in _list_nested(value)])
            for home, table in self._tables.items()
            for name, value in table.items()
            if not name.startswith("__") and not _holds_fake(value)
        }

    def take_out_fakes(self) -> list[str]:
        """Restore the variables that hold a fake tensor now, and return their names."""
        patches, found = Patches(), []  # never undone: this is how it was
        for home, table in self._tables.items():
            for name, value in list(table.items()):
                if name.startswith("__") or not _holds_fake(value):
                    continue
                found.append(f"{home}.{name}")
                if (home, name) not in self._before:
                    table.pop(name)
                    continue
                before, containers = self._before[home, name]
                patches.set_item(table, name, before)
                for container, held in containers:
                    _refill(container, held)
        return found


_WITHOUT_STATE = ("builtins", "torch", "typing", "abc")
"""Packages whose code isn't a model's."""


def _list_nested(value: Any) -> list[Any]:
    """Return a container and the containers in it."""
    if _hold(value) is None:
        return []
    return [value, *(x for x in _list_items(value) if _hold(x) is not None)]


def _holds_fake(value: Any) -> bool:
    if isinstance(value, FakeTensor):
        return True
    items = [x for one in _list_nested(value) for x in _list_items(one)]
    return any(
        isinstance(x, FakeTensor) for x in (*items, *(value if type(value) is tuple else ()))
    )


def _list_items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def list_containers(
    value: Any, seen: set[int], *, is_inside: bool = False
) -> Iterator[tuple[Any, bool]]:
    """List the lists, sets, dicts and objects' attribute dicts in a value, each once, and whether an object
    has them.
    """
    for item in value.values() if isinstance(value, dict) else value:
        if id(item) in seen:
            continue
        if type(item) in _CONTAINERS:
            seen.add(id(item))
            yield item, is_inside
        if type(item) in (*_CONTAINERS, tuple):
            yield from list_containers(item, seen, is_inside=is_inside)
        elif _is_object(item):
            seen.add(id(item))
            yield vars(item), True
            yield from list_containers(vars(item), seen, is_inside=True)


def _is_object(value: Any) -> bool:
    """Return whether a value is an object with attributes that a call may set: no tensor, module, type
    or function.
    """
    plain = (torch.Tensor, torch.nn.Module, type, torch.Generator, enum.Enum)
    return hasattr(value, "__dict__") and not (isinstance(value, plain) or callable(value))
