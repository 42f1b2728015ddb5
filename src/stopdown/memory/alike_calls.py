"""Run one of several identical blocks or tiles in a dry run, and reuse its result and memory for the
others.

On tensors without values, the code of a block depends only on the shapes, strides, dtypes and plain values
of its arguments and of the state on its modules. So one block or tile is run for all that have the same
signature. What it writes into lists, as Wan's decoder does into its cache, is written again for each.
Code that leaves state of another shape on its modules runs each time.

Not covered: state that code keeps elsewhere than in its arguments and on its modules.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stopdown.interception.module_paths import OWN_ATTRIBUTES
from stopdown.module_calls.call import sign_arguments

_PLAIN = (bool, int, float, str, type(None), torch.dtype, tuple, list)
_NUMBERS = ("layer_idx",)
"""Attributes that only number blocks; a block's memory use doesn't depend on them."""


def sign_block(block: torch.nn.Module) -> str:
    """Return a string that is equal for blocks with the same memory use: submodules, weights' sizes,
    settings, hooks.
    """
    told: list[Any] = []
    for path, part in block.named_modules():
        attributes = {
            name: repr(value) if isinstance(value, _PLAIN) else _describe_kind(value)
            for name, value in vars(part).items()
            if not name.startswith("_") and name not in _NUMBERS
        }
        hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
        tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        sizes = [(name, tuple(x.shape), x.stride(), x.dtype) for name, x in tensors]
        told.append((path, type(part), attributes, [_describe_kind(x) for x in hooks], sizes))
    return str(told)


def _describe_kind(value: Any) -> str:
    """Return a value's class name; for a function, its name and the classes of `partial` arguments."""
    if isinstance(value, functools.partial):
        return f"{_describe_kind(value.func)}({[_describe_kind(x) for x in value.args]})"
    return getattr(value, "__qualname__", "") or type(value).__qualname__


def sign_state(block: torch.nn.Module) -> str:
    """Return a string that is equal if a block's attributes, other than weights and buffers, are alike.

    A tensor contributes its shape, strides and dtype, and a plain value its value.
    """
    with torch._C.DisableTorchFunction():
        return str(
            [
                (path, name, _sign_kept(value))
                for path, part in block.named_modules()
                for name, value in vars(part).items()
                if name not in OWN_ATTRIBUTES and name not in _NUMBERS
            ]
        )


def _sign_kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return [_sign_kept(x) for x in value]
    if isinstance(value, dict):
        return [(key, _sign_kept(x)) for key, x in value.items()]
    return value if isinstance(value, _PLAIN) else type(value).__name__


class GivenArguments:
    """The arguments of a block or tile before it runs, held by weak references.

    Attributes:
        signature: of the arguments and the block's state. It includes strides, because code copies some
            tensors that are not contiguous.
    """

    def __init__(
        self, block: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        with torch._C.DisableTorchFunction():
            strides = [x.stride() for x in leaves if isinstance(x, torch.Tensor)]
        self._block, self._state = block, sign_state(block)
        self.signature = f"{sign_arguments(tuple(args), kwargs)}{strides}{self._state}"
        self._given, self._lists = (args, kwargs), find_lists(args, kwargs)
        self._leaves, self._fixed = _hold(leaves), _hold(self._list_fixed())

    def describe(self, output: Any) -> BlockResult | None:
        """Describe a block's output by shapes, to make it again without running the block; None if that
        can't work.

        Each new tensor must own its memory, only list arguments may have changed, and the block's state
        must have the same signature as before.
        """
        fixed = self._list_fixed()
        if sign_state(self._block) != self._state:
            return None
        if len(fixed) != len(self._fixed) or not all(map(_is_same, self._fixed, fixed)):
            return None
        given = [x() if isinstance(x, weakref.ref) else None for x in self._leaves]
        places = {id(x): number for number, x in enumerate(given) if x is not None}
        nest = output, [list(x) for x in self._lists]
        made = [x for x in pytree.tree_leaves(nest) if id(x) not in places]
        tensors = [x for x in made if isinstance(x, torch.Tensor)]
        if not all(isinstance(x, (torch.Tensor, *_PLAIN)) for x in made):
            return None

        def describe(tensor: torch.Tensor) -> _Shape | _Place:
            if id(tensor) in places:
                return _Place(places[id(tensor)])
            return _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

        with torch._C.DisableTorchFunction():  # other listeners hear what the model asks of tensors
            if not _own_their_memory(tensors, [x for x in given if x is not None]):
                return None
            return BlockResult(*pytree.tree_map_only(torch.Tensor, describe, nest))

    def _list_fixed(self) -> list[Any]:
        """List the argument values that the block must not change: all except those in lists."""
        args, kwargs = self._given
        lists = {id(x) for x in self._lists}
        return pytree.tree_leaves([x for x in (*args, *kwargs.values()) if id(x) not in lists])


@dataclass(frozen=True)
class BlockResult:
    """The result of a block or tile, without tensors.

    Attributes:
        output: each tensor as its shape, strides, dtype and device, or as its position in the arguments.
        lists: contents of the list arguments after the call, in the same form.
    """

    output: Any
    lists: list[list[Any]]

    def give_again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a block's result for other arguments: fill their lists as the block did, and return its
        output.

        New tensors are allocated; tensors that the block passed through are those of `args` and `kwargs`.
        """
        output, contents = self._place(pytree.tree_leaves((args, kwargs)))
        lists = find_lists(args, kwargs)
        for held in lists:
            held.clear()  # before anything is made, as the code drops one entry for another
        for held, content in zip(lists, contents, strict=True):
            held.extend(pytree.tree_map_only(_Shape, _Shape.make, content))
        return pytree.tree_map_only(_Shape, _Shape.make, output)

    def _place(self, leaves: Sequence[Any]) -> Any:
        nest = self.output, self.lists
        return pytree.tree_map_only(_Place, lambda x: leaves[x.number], nest)


def find_lists(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[Any]]:
    """Find the list arguments that contain no containers: caches and counters that code may write to."""
    return [
        x
        for x in (*args, *kwargs.values())
        if type(x) is list and not any(isinstance(y, (list, tuple, dict)) for y in x)
    ]


@dataclass(frozen=True)
class _Shape:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Place:
    """A tensor among the arguments, by its position."""

    number: int


def _hold(leaves: Sequence[Any]) -> list[Any]:
    return [weakref.ref(x) if isinstance(x, torch.Tensor) else x for x in leaves]


def _is_same(before: Any, leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return isinstance(before, weakref.ref) and before() is leaf
    return bool(before == leaf)


def _own_their_memory(made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Return whether each tensor in `made` fills a storage of its own, so that it can be allocated
    again by its size.
    """
    storages = [x.untyped_storage() for x in made]
    others = [x.untyped_storage() for x in given]
    own = {*map(id, storages)} - {*map(id, others)}
    return len(own) == len(made) and all(
        storage.nbytes() == x.nbytes for storage, x in zip(storages, made, strict=True)
    )
