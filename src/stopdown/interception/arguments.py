"""Cast or scale the tensors in a call's arguments, also inside the caller's own lists and mappings.

Modules write into lists that they receive: the autoencoders of Wan and Qwen-Image cache the frames of the
previous chunk in `feat_cache` and count in `feat_idx`. In a copy of such a list, these would be lost. So
the caller's list or mapping itself is passed: its tensors are replaced for the call, and restored
afterwards unless the module overwrote them. Tuples and the keyword arguments are copied.

Modules also write into tensors that they receive, such as a key/value cache of fixed size (a `StaticCache`,
that of AnyFlow). What they wrote into a cast copy is written into the caller's tensor afterwards.

Not covered: tensors in attributes of other objects (a `DynamicCache`), which aren't replaced; writes of
compiled code.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from stopdown.interception.patches import Patches, RunningCalls
from stopdown.interception.tracing import is_traced

Change = Callable[[torch.Tensor], torch.Tensor]
"""A function from a tensor to its replacement, which may be the tensor itself."""

Keeps = Callable[[str], bool]
"""A predicate on an argument's name: whether its tensors aren't replaced."""


class Replaced(NamedTuple):
    """An argument, or an item of a caller's list or mapping, that was replaced for a call.

    Attributes:
        before, during: the original, and what the call gets.
        container: the caller's list or mapping; None for a tensor, which has an entry of its own.
        key: of the item in the container.
        writes: number of in-place writes to `during` before the call; None if they aren't counted.
    """

    before: Any
    during: Any
    container: Any = None
    key: Any = None
    writes: int | None = None


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


def replace_tensor(tensor: torch.Tensor, change: Change, replaced: list[Replaced]) -> torch.Tensor:
    """Return a tensor's replacement for a call, and add it to those for `put_back`."""
    if is_traced():
        return change(tensor)
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # else its writes aren't counted
            during = change(tensor)
    else:
        during = change(tensor)
    if during is not tensor:
        replaced.append(Replaced(tensor, during, writes=count_writes(during)))
    return during


def put_back(replaced: list[Replaced]) -> None:
    """Undo `replace_tensors` after a call: restore the items of the caller's lists and mappings, except for
    those that the call overwrote, and write into tensors what it wrote into their copies.
    """
    for one in reversed(replaced):
        if one.container is None:
            if one.writes != count_writes(one.during):
                with torch.no_grad():
                    one.before.copy_(one.during)
            continue
        try:
            is_ours = one.container[one.key] is one.during
        except (KeyError, IndexError):  # the module took it out
            continue
        if is_ours:
            one.container[one.key] = one.before


def count_writes(tensor: torch.Tensor) -> int | None:
    """Return PyTorch's version counter of a tensor; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def _visit(value: Any, change: Change, keeps: Keeps, replaced: list[Replaced]) -> Any:
    if isinstance(value, torch.Tensor):
        return replace_tensor(value, change, replaced)
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
            replaced.append(Replaced(item, during, container, key))


def hook_arguments(
    module: torch.nn.Module, change: Change, patches: Patches, *, rest: Change | None = None
) -> None:
    """Register hooks that cast or otherwise replace the tensors in a module's arguments at each call.

    Args:
        change: returns the replacement of a tensor.
        patches: undoing it removes the hooks.
        rest: replaces all tensors but the first; None applies `change` to all.
    """
    running = RunningCalls()
    before = partial(_enter, change, rest, running)
    after = partial(_leave, running)
    patches.defer(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    patches.defer(module.register_forward_hook(after, always_call=True).remove)


def _enter(
    change: Change,
    rest: Change | None,
    running: RunningCalls,
    module: torch.nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    args, kwargs, replaced = replace_tensors(args, kwargs, change, rest=rest)
    running.begin(partial(put_back, replaced))
    return args, kwargs


def _leave(running: RunningCalls, module: torch.nn.Module, args: Any, output: Any) -> None:
    running.end()
