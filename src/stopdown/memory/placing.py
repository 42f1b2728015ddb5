"""A strategy put on a pipeline: weights come when they are needed, and calls work in pieces.

The weights of a unit (a component, a block, a layer) wait in a store: on disk when the pipeline runs
on the CPU, in host memory otherwise. While they wait, the parameters keep shape, dtype and device
and own no memory (their storage is resized to nothing, as FSDP does it), so everything that
looks at them works as before; only values are missing. Whatever is put on comes off, and the values
are back.

**Catches** parameters that are tied, or shared by two components: they are stored once.
**Does not catch** code that reads the values of a module's weights outside of its `forward`.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stopdown.memory.rehearsing import LISTS, weigh
from stopdown.memory.strategies import Placement, Strategy, group_weights
from stopdown.patches import Patches
from stopdown.pipelines.components import find_blocks, find_components, find_doors, is_autoencoder
from stopdown.pipelines.doors import Call, put_door, put_layer

_MOST_SCORE_BYTES = 2**28
"""Scores of attention in fp32 that are made at a time when it is split."""

_FEED_FORWARD = ("FeedForward",)
"""Classes that work on each position of a sequence alone."""


def put_variant(pipe: Any, strategy: Strategy, patches: Patches) -> None:
    """Put what makes the calls smaller on a pipeline, until `patches` is undone."""
    for module in find_components(pipe).values():
        if is_autoencoder(module):
            for name, wanted in (("slicing", strategy.slicing), ("tiling", strategy.tiling)):
                _switch(module, name, wanted, patches)
    for door in find_doors(pipe):
        if strategy.pieces > 1 and door.stage == "denoise":
            _put_pieces(door.owner, strategy.pieces, patches)
        if strategy.split:
            put_door(door, _split_attention, patches)


def put_placement(
    pipe: Any,
    placement: Placement,
    strays: Mapping[str, Mapping[str, frozenset[str]]],
    patches: Patches,
    *,
    device: str = "cpu",
    store: Path | None = None,
) -> Shelf:
    """Leave weights where they wait, until `patches` is undone; then they are all back.

    Every call of a component has to go through `Shelf.stand` of what comes back.

    Args:
        strays: of the pipeline's rehearsal.
        device: where calls run.
        store: folder for a temporary copy of the weights; None keeps them in host memory, which
            makes sense for a device that has a memory of its own.

    Raises:
        OSError: the store cannot be written. Nothing is changed.
    """
    shelf = Shelf(device, store if placement != "resident" else None)
    if placement == "resident":
        return shelf
    patches.defer(shelf.close)
    for name, module in find_components(pipe).items():
        for unit in _make_units(module, placement, strays.get(name, {}), shelf):
            patches.defer(unit.load)
            shelf.keep(name, unit, placement)
            if unit.path:
                before, after = unit.on_enter, unit.on_leave
                patches.defer(unit.module.register_forward_pre_hook(before).remove)
                hook = unit.module.register_forward_hook(after, always_call=True)
                patches.defer(hook.remove)
    return shelf


def _switch(module: torch.nn.Module, name: str, wanted: bool, patches: Patches) -> None:
    """Turn an autoencoder's slicing or tiling on or off."""
    before = bool(getattr(module, f"use_{name}", False))
    if wanted == before or not hasattr(module, f"use_{name}"):
        return
    patches.set_attribute(module, f"use_{name}", wanted)
    if name == "tiling":
        for side in ("height", "width"):
            _fit_overlap(module, side, patches)


def _fit_overlap(module: torch.nn.Module, side: str, patches: Patches) -> None:
    """Give tiles of a CogVideoX kind an overlap of whole latents: a part of one shifts the seams."""
    name = f"tile_overlap_factor_{side}"
    latents = getattr(module, f"tile_latent_min_{side}", 0)
    if not hasattr(module, name) or not latents:
        return
    factors = (getattr(module, name), 0.25, 0.5)
    fits = [f for f in factors if abs(latents * f - round(latents * f)) < 1e-6]
    if fits and fits[0] != factors[0]:
        patches.set_attribute(module, name, fits[0])


def _put_pieces(module: torch.nn.Module, pieces: int, patches: Patches) -> None:
    for part in module.modules():
        if type(part).__name__ in _FEED_FORWARD:
            put_layer(part, "forward", functools.partial(_work_in_pieces, pieces), patches)


def _work_in_pieces(
    pieces: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """A feed-forward layer on pieces of the sequence (dimension 1 of `[B, L, C]`), one at a time."""
    given, rest = args[0], args[1:]
    if not isinstance(given, torch.Tensor) or given.dim() != 3 or given.shape[1] < pieces:
        whole: torch.Tensor = call(*args, **kwargs)
        return whole
    first: torch.Tensor | None = None
    done = 0
    for piece in given.chunk(pieces, dim=1):
        output = call(piece, *rest, **kwargs)
        if first is None:
            first = output.new_empty(given.shape[0], given.shape[1], *output.shape[2:])
        first[:, done : done + output.shape[1]] = output
        done += output.shape[1]
    assert first is not None
    return first


def _split_attention(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _SplitQueries():
        return call(*args, **kwargs)


class _SplitQueries(TorchFunctionMode):
    """Attention on a few queries at a time: each row of the result depends on its own query only."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attend_in_pieces(func, *args, **(kwargs or {}))


def _attend_in_pieces(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attention of `query` `[..., L, E]` over `key` `[..., S, E]`, its scores a part at a time."""
    length, row_bytes = query.shape[-2], query.shape[:-2].numel() * key.shape[-2] * 4
    rows = max(1, _MOST_SCORE_BYTES // row_bytes)
    if is_causal or rows >= length:
        return attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    for start in range(0, length, rows):
        part = slice(start, start + rows)
        mask = attn_mask
        if mask is not None and mask.shape[-2] == length:
            mask = mask[..., part, :]
        output[..., part, :] = attend(query[..., part, :], key, value, mask, dropout_p, **options)
    return output


class _Unit:
    """Weights that are loaded together, while a module runs."""

    def __init__(
        self, path: str, module: torch.nn.Module, tensors: list[torch.Tensor], shelf: Shelf
    ) -> None:
        self.path, self.module = path, module
        self._tensors, self._shelf, self._users = tensors, shelf, 0

    def store(self) -> None:
        for tensor in self._tensors:
            self._shelf.store(tensor)

    def load(self) -> None:
        """Bring the values; a second user finds them there."""
        for tensor in self._tensors:
            self._shelf.load(tensor)

    def drop(self) -> None:
        for tensor in self._tensors:
            self._shelf.drop(tensor)

    def on_enter(self, module: Any, args: Any) -> None:
        self._users += 1
        if self._users == 1:
            self.load()

    def on_leave(self, module: Any, args: Any, output: Any) -> None:
        self._users -= 1
        if self._users == 0:
            self.drop()


class Shelf:
    """Where weights wait, and which component has its own here just now."""

    def __init__(self, device: str, folder: Path | None) -> None:
        self._device = torch.device(device)
        self._folder = Path(tempfile.mkdtemp(dir=folder)) if folder is not None else None
        self._kept: dict[int, torch.Tensor] = {}
        self._sizes: dict[int, int] = {}
        self._units: dict[str, list[_Unit]] = {}
        self._doors: dict[str, _Unit] = {}
        self._current = ""

    def keep(self, component: str, unit: _Unit, placement: Placement) -> None:
        unit.store()
        if placement == "component":
            self._doors[component] = unit
        elif not unit.path:
            self._units.setdefault(component, []).append(unit)

    def store(self, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor, and give its memory back."""
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = self._write(tensor)
        self._own(tensor)
        self.drop(tensor)

    def load(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 and self._sizes[id(tensor)]:
            storage.resize_(self._sizes[id(tensor)])
            tensor.data.copy_(self._kept[id(tensor)])

    def drop(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(0)

    def stand(
        self, component: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Have a component's own weights here for a call; those of another one make room."""
        if component in self._doors and component != self._current:
            if self._current:
                self._doors[self._current].drop()
            self._doors[component].load()
            self._current = component
        for unit in self._units.get(component, ()):
            unit.load()
        try:
            return call(*args, **kwargs)
        finally:
            for unit in self._units.get(component, ()):
                unit.drop()

    def close(self) -> None:
        self._kept.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _own(self, tensor: torch.Tensor) -> None:
        """Give a tensor a storage on the device that is its alone: a mapped file's cannot be resized."""
        tensor.data = torch.empty_like(tensor.data, device=self._device)
        self._sizes[id(tensor)] = tensor.untyped_storage().nbytes()

    def _write(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy to load from: in host memory, or mapped from a file, which takes none."""
        if self._folder is None:
            return tensor.detach().to("cpu", copy=True)
        path = self._folder / f"{len(self._kept)}.bin"
        kept = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return kept.view(tensor.shape).copy_(tensor.detach())


def _make_units(
    module: torch.nn.Module,
    placement: Placement,
    strays: Mapping[str, frozenset[str]],
    shelf: Shelf,
) -> Iterable[_Unit]:
    """The units of one component, those of its blocks and layers before its own."""
    parts = dict(module.named_modules())
    groups = group_weights(weigh(module), find_blocks(module, LISTS), strays, placement)
    for unit, paths in groups.items():
        tensors = [x for path in paths for x in parts[path].parameters(recurse=False)]
        yield _Unit(unit, parts[unit], tensors, shelf)
