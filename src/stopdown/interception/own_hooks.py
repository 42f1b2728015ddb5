"""Casts and scalings of a module's inputs and outputs by hooks that belong to it as its weights do.

They are registered as forward hooks, so that compiled code, copies and calls without layers run them. But
forward hooks run outside of all layers on `forward`: a guard there would check another output than its
caller gets, and a call during which they are registered would run them never or twice. So below the layers,
`run_with_hooks` runs them, and the registered hooks do nothing in that call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from stopdown.interception.arguments import (
    Change,
    Replaced,
    hook_arguments,
    put_back,
    replace_tensors,
)
from stopdown.interception.patches import Patches
from stopdown.interception.tracing import is_traced

Hook = Callable[[torch.nn.Module, Any, Any], Any]
"""A forward hook from module, positional arguments and output to a new output; None keeps the output."""

_OWN = "stopdown_own_hooks"
"""Name of the module attribute that holds its own hooks."""


class _Done(threading.local):
    """Modules whose hooks `run_with_hooks` has run in this thread's current call, and which run once."""

    def __init__(self) -> None:
        self.modules = WeakSet[torch.nn.Module]()


_done = _Done()


class _OwnHooks:
    """Hooks that cast and scale one module's arguments and outputs.

    A copy of the module has a copy of them, which stays if the original's are removed.
    """

    def __init__(self) -> None:
        self.__setstate__({"changes": [], "hooks": []})

    def __getstate__(self) -> dict[str, Any]:
        return {"changes": list(self.changes), "hooks": list(self.hooks)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.changes: list[tuple[Change, Change | None]] = state["changes"]
        self.hooks: list[Hook] = state["hooks"]
        self.patches = Patches()

    def add(self, found: list[Any], one: Any, patches: Patches, *, first: bool = False) -> None:
        found.insert(0 if first else len(found), one)
        patches.defer(partial(self._remove, found, one))

    def _remove(self, found: list[Any], one: Any) -> None:
        found.remove(one)
        if not (self.changes or self.hooks):
            self.patches.undo()


def hook_own_output(
    module: torch.nn.Module, hook: Hook, patches: Patches, *, prepend: bool = False
) -> None:
    """Register a hook that casts or scales a module's output before a guard or other layer sees it.

    Args:
        patches: undoing it removes the hook.
        prepend: run the hook before others.
    """
    own = _find_own(module)
    own.add(own.hooks, hook, patches, first=prepend)
    led = partial(_run_once, hook)
    patches.defer(module.register_forward_hook(led, prepend=prepend).remove)


def hook_part_arguments(
    module: torch.nn.Module,
    path: str,
    change: Change,
    patches: Patches,
    *,
    rest: Change | None = None,
) -> None:
    """Register hooks that cast the tensors in the arguments of a submodule, or of the module itself.

    Those of the module are cast after a guard or other layer saw them.

    Args:
        path: of the submodule; "" for the module.
        change: a cast, because it may be applied twice.
        patches: undoing it removes the hooks.
        rest: the cast of all tensors but the first; None applies `change` to all.
    """
    hook_arguments(module.get_submodule(path), change, patches, rest=rest)
    if not path:
        own = _find_own(module)
        own.add(own.changes, (change, rest), patches)


def run_with_hooks(
    owner: torch.nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a module's `forward`, and cast and scale its arguments and output by the module's own hooks.

    A guard or other layer around the call sees the arguments before that, and the output after it.
    """
    own: _OwnHooks | None = vars(owner).get(_OWN)
    if own is None:
        return original(*args, **kwargs)
    _done.modules.discard(owner)
    replaced: list[Replaced] = []
    try:
        for change, rest in tuple(own.changes):
            args, kwargs, more = replace_tensors(args, kwargs, change, rest=rest)
            replaced += more
        output = original(*args, **kwargs)
    finally:
        put_back(replaced)
    if owner in _done.modules:  # somebody put a function of theirs between two stacks of layers
        return output
    for hook in tuple(own.hooks):
        found = hook(owner, args, output)
        output = output if found is None else found
    _done.modules.add(owner)
    return output


def _find_own(module: torch.nn.Module) -> _OwnHooks:
    own: _OwnHooks | None = vars(module).get(_OWN)
    if own is None:
        own = _OwnHooks()
        own.patches.set_attribute(module, _OWN, own)
        own.patches.defer(module.register_forward_pre_hook(_begin).remove)
    return own


def _begin(module: torch.nn.Module, args: Any) -> None:
    if not is_traced():
        _done.modules.discard(module)


def _run_once(hook: Hook, module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Run a hook that casts or scales a module's output, unless `run_with_hooks` ran it in this call.

    Compiled code doesn't call `run_with_hooks`.
    """
    if is_traced() or module not in _done.modules:
        return hook(module, args, output)
    return None
