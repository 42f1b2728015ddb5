"""Cast or scale the tensors in a call's arguments, also inside the caller's own lists and mappings.

Modules write into lists that they receive: the autoencoders of Wan and Qwen-Image cache the frames of the
previous chunk in `feat_cache` and count in `feat_idx`. In a copy of such a list, these would be lost. So
the caller's list or mapping itself is passed: its tensors are replaced for the call, and restored
afterwards unless the module overwrote them. Tuples and the keyword arguments are copied.

Not covered: tensors in attributes of other objects (a `DynamicCache`), which aren't replaced.
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
"""A function from a tensor to its replacement, which may be the tensor itself."""

Keeps = Callable[[str], bool]
"""A predicate on an argument's name: whether its tensors aren't replaced."""


Replaced = tuple[Any, Any, Any, Any]
"""A caller's list or mapping, a key in it, the original item, and the item during the call."""


def replace_tensors(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Change,
    *,
    rest: Change | None = None,
    names: Iterable[str] = (),
    keeps: Keeps = lambda name: False,
) -> tuple[tuple[Any, ...], dict[str, Any], list[Replaced]]:
    """Replace the tensors in a call's arguments by the results of a function, such as a cast.

    Args:
        change: returns the replacement of a tensor.
        rest: replaces all tensors but the first; None applies `change` to all.
        names: of the positional arguments, in order.
        keeps: whether the argument or the mapping's item of this name stays unchanged.

    Returns:
        The new positional and keyword arguments, and the replacements for `put_back` to undo.
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
    """Undo `replace_tensors` in the caller's lists and mappings after a call, except for items that the
    call overwrote.
    """
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
    """Register hooks that cast or otherwise replace the tensors in a module's arguments at each call.

    Args:
        change: returns the replacement of a tensor.
        patches: undoing it removes the hooks.
        rest: replaces all tensors but the first; None applies `change` to all.
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
