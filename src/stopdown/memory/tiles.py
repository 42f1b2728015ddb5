"""Tiles of an autoencoder that is run dry: its code is run once for all that have the same shapes.

**Catches** encoders and decoders that make new tensors of what they are given.
**Does not catch** those that write into it, as Wan's do into its cache, or return a part of it: they run
for each tile.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Tile:
    """What an encoder or decoder made of a tile, and what that took.

    Attributes:
        peaks: module path → most bytes alive, counted from its start.
        entries: module path → how often it was entered.
        flops: of its matrix products, convolutions and attention.
        output: what came back, each tensor as its shape, strides, dtype and device.
    """

    peaks: dict[str, int]
    entries: dict[str, int]
    flops: int
    output: Any

    def make_output(self) -> Any:
        """The same again, in memory of its own."""
        return pytree.tree_map_only(_Shape, lambda x: x.make(), self.output)


@dataclass(frozen=True)
class _Shape:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def describe_output(output: Any) -> Any:
    """An output without its tensors, which would stay alive."""
    return pytree.tree_map_only(
        torch.Tensor, lambda x: _Shape(tuple(x.shape), x.stride(), x.dtype, x.device), output
    )


class Given:
    """What a tile's code was given, as it was before it ran."""

    def __init__(self, *given: Any) -> None:
        self._given = given
        self._leaves = [_refer(x) for x in pytree.tree_leaves(given)]

    def is_left_alone(self, output: Any) -> bool:
        """Whether it is as it was, and each tensor of the output has memory of its own."""
        leaves = pytree.tree_leaves(self._given)
        if len(leaves) != len(self._leaves) or not all(map(_is_same, self._leaves, leaves)):
            return False
        made = [x for x in pytree.tree_leaves(output) if x is not None]
        if not all(isinstance(x, torch.Tensor) for x in made):
            return False
        storages = [x.untyped_storage() for x in made]
        own = {id(x) for x in storages} - {
            id(x.untyped_storage()) for x in leaves if isinstance(x, torch.Tensor)
        }
        return len(own) == len(made) and all(
            storage.nbytes() == x.nbytes for storage, x in zip(storages, made, strict=True)
        )


def _refer(leaf: Any) -> Any:
    return weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _is_same(before: Any, leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return isinstance(before, weakref.ref) and before() is leaf
    return bool(before == leaf)
