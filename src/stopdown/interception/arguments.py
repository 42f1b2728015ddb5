"""A call's arguments with other tensors in them, in the lists and mappings that the caller gave.

Modules write into lists that they are given: the autoencoders of Wan and Qwen-Image keep the frames of
the chunk before in `feat_cache` and count in `feat_idx`. A copy of such a list would lose what they
write. So a list or mapping stays the caller's own: tensors in it are replaced there for the call, and
put back afterwards where the module did not write. Tuples and the call's own keywords are made anew.

Not covered: tensors in attributes of other objects (a `DynamicCache`): they stay as they are.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from stopdown.interception.patches import Patches

Change = Callable[[torch.Tensor], torch.Tensor]
"""Gives the tensor itself where nothing is to be changed."""

Keeps = Callable[[str], bool]
"""Whether the argument of this name stays as it is, whatever it holds."""


Replaced = tuple[Any, Any, Any, Any]
"""A caller's list or mapping, a key of it, what is there, and what is there during the call."""


def replace_tensors(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Change,
    *,
    rest: Change | None = None,
    names: Iterable[str] = (),
    keeps: Keeps = lambda name: False,
) -> tuple[tuple[Any, ...], dict[str, Any], list[Replaced]]:
    """Return a call's arguments with changed tensors, and the replacements for `put_back` to undo.

    Args:
        rest: changes the tensors behind the first; None is `change` for all.
        names: of the positional arguments, in order.
        keeps: whether the argument, or the item of a mapping, of this name stays unchanged.
    """
    if rest is not None:
        changes = itertools.chain((change,), itertools.repeat(rest))
        change = lambda tensor: next(changes)(tensor)  # noqa: E731
    replaced: list[Replaced] = []
    padded = [*names, *[""] * len(args)]
    changed = tuple(
        value if keeps(name) else _visit(value, change, keeps, replaced)
        for name, value in zip(padded, args, strict=False)
    )
    keywords = {
        name: value if keeps(name) else _visit(value, change, keeps, replaced)
        for name, value in kwargs.items()
    }
    return changed, keywords, replaced


def put_back(replaced: list[Replaced]) -> None:
    """Restore the items of a caller's lists and mappings, except those that the call wrote."""
    for container, key, before, during in reversed(replaced):
        try:
            is_ours = container[key] is during
        except (KeyError, IndexError):  # the module took it out
            continue
        if is_ours:
            container[key] = before


def _visit(value: Any, change: Change, keeps: Keeps, replaced: list[Replaced]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        items = [(key, item) for key, item in value.items() if not keeps(str(key))]
        _replace_items(value, items, change, keeps, replaced)
    elif isinstance(value, (list, deque)):
        _replace_items(value, list(enumerate(value)), change, keeps, replaced)
    elif isinstance(value, tuple):
        items = [_visit(item, change, keeps, replaced) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _replace_items(
    container: Any,
    items: list[tuple[Any, Any]],
    change: Change,
    keeps: Keeps,
    replaced: list[Replaced],
) -> None:
    for key, item in items:
        during = _visit(item, change, keeps, replaced)
        if during is not item:
            container[key] = during
            replaced.append((container, key, item, during))


def hook_arguments(
    module: torch.nn.Module, change: Change, patches: Patches, *, rest: Change | None = None
) -> None:
    """Change the tensors that a module is called with, until `patches` is undone.

    Args:
        rest: changes the tensors behind the first; None is `change` for all.
    """
    running: list[list[Replaced]] = []  # of the calls that run, the innermost last
    before = partial(_enter, change, rest, running)
    after = partial(_leave, running)
    patches.defer(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    patches.defer(module.register_forward_hook(after, always_call=True).remove)


def _enter(
    change: Change,
    rest: Change | None,
    running: list[list[Replaced]],
    module: torch.nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    args, kwargs, replaced = replace_tensors(args, kwargs, change, rest=rest)
    running.append(replaced)
    return args, kwargs


def _leave(running: list[list[Replaced]], module: torch.nn.Module, args: Any, output: Any) -> None:
    if running:
        put_back(running.pop())
