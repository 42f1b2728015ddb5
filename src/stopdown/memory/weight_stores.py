"""Keep a pipeline's offloaded weights in host memory, or in files if they don't fit there, and load
them for calls.

Weights that were left in the checkpoint's files are read from there each time, and scaled by their
exponents. Others are written to temporary files if the run is on the CPU. Offloaded parameters keep shape,
dtype and device but own no memory (their storage is resized to 0, as FSDP does), so code that inspects them
works as before; only their values are missing. One store serves all strategies of a run, and copies each
weight once. `weights_at_hand` loads a component's weights so that they can be changed, and stores the
changes.

Not covered: an earlier view of a parameter, which shares its storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from stopdown.interception.patches import Patches, SameInCopies
from stopdown.mapped_weights import (
    find_stored,
    is_mapped,
    map_copy,
    mark_as_waiting,
    put_,
    remove_left,
)
from stopdown.memory.strategies import Placement
from stopdown.scaling import ComponentCall, StoredWeight

WAITING = "stopdown_weights_wait"
"""Attribute of a module whose weights are offloaded between calls."""


class WeightGroup(SameInCopies):
    """Weights that are loaded together while a module runs."""

    def __init__(
        self, path: str, module: torch.nn.Module, tensors: list[torch.Tensor], store: WeightStore
    ) -> None:
        self.path, self.module = path, module
        self._tensors, self._store, self._users = tensors, store, 0

    def store(self) -> None:
        for tensor in self._tensors:
            self._store.store(tensor)

    def load(self) -> None:
        """Load the group's weights onto the device, unless they're already there."""
        for tensor in self._tensors:
            self._store.load(tensor)

    def drop(self) -> None:
        for tensor in self._tensors:
            self._store.drop(tensor)

    def on_enter(self, module: Any, args: Any) -> None:
        self._users += 1
        if self._users == 1:
            self.load()

    def on_leave(self, module: Any, args: Any, output: Any) -> None:
        self._users -= 1
        if self._users == 0:
            self.drop()


class WeightStore(SameInCopies):
    """A store of a pipeline's offloaded weights, which loads them for calls and drops them afterwards."""

    def __init__(self, device: str, folder: Path | None) -> None:
        """Make an empty store.

        Args:
            device: where calls run.
            folder: for temporary copies of weights that are in no file; others are read from their files.
                None keeps all weights in host memory, which makes sense for a device with its own memory.
        """
        self._device, self._place = torch.device(device), folder
        self._is_open = False
        self._kept: dict[int, StoredWeight] = {}
        self._owners: dict[int, tuple[torch.Tensor, torch.device]] = {}
        self._sizes: dict[int, int] = {}
        self._forget()

    def _forget(self) -> None:
        self._units: dict[str, list[WeightGroup]] = {}
        self._callees: dict[str, WeightGroup] = {}
        self._current = ""

    def keep(self, component: str, group: WeightGroup, placement: Placement) -> None:
        """Offload a group of weights.

        If the group belongs to a whole component or call, `run_call` loads it.
        """
        group.store()
        if placement == "component":
            self._callees[component] = group
        elif not group.path:
            self._units.setdefault(component, []).append(group)

    def store(self, tensor: torch.Tensor) -> None:
        """Offload a tensor: store its values and free its memory.

        Cost: the first time, a copy on disk or in host memory.
        """
        if id(tensor) not in self._kept:
            self._owners.setdefault(id(tensor), (tensor, tensor.device))  # it may be away already
            self._kept[id(tensor)] = self._keep(tensor)
            self._own(tensor)
        self.drop(tensor)

    def find(self, tensor: torch.Tensor) -> StoredWeight | None:
        """Return the stored weight that a tensor is loaded from; None if it isn't in this store."""
        return self._kept.get(id(tensor))

    def serve(self, module: torch.nn.Module, patches: Patches) -> None:
        """Mark a component as offloaded to this store, so that other code finds its weights, until
        `patches` is undone.
        """
        patches.set_attribute(module, WAITING, self)

    @contextlib.contextmanager
    def opened(self, module: torch.nn.Module) -> Iterator[None]:
        """Load all weights of a component for the `with` block, and store those that it changed.

        Cost: all of its weights on the device at the same time.
        """
        waiting = [x for x in module.parameters() if id(x) in self._kept]
        away = [x for x in waiting if not x.untyped_storage().nbytes()]
        was_open, self._is_open = self._is_open, True
        try:
            for tensor in away:
                self.load(tensor)
            before = {id(x): _mark_state(x) for x in waiting}
            yield
            for tensor in waiting:
                if before[id(tensor)] != _mark_state(tensor):
                    self._kept[id(tensor)] = StoredWeight(self._write(tensor), tensor.dtype)
                    self._sizes[id(tensor)] = tensor.untyped_storage().nbytes()
        finally:
            self._is_open = was_open
            for tensor in away:
                self.drop(tensor)

    def load(self, tensor: torch.Tensor) -> None:
        """Load a tensor's values onto the device, unless they're already there."""
        storage, key = tensor.untyped_storage(), id(tensor)
        if storage.nbytes() == 0 and self._sizes[key]:
            storage.resize_(self._sizes[key])
            self._kept[key].write(tensor.data)

    def cast(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        """Cast a module's stored weights when a pipeline casts the module, as some do with an
        autoencoder before a call.
        """
        for tensor in module.parameters():
            if (
                id(tensor) not in self._kept
                or tensor.dtype == dtype
                or not tensor.is_floating_point()
            ):
                continue
            is_here = tensor.untyped_storage().nbytes() > 0
            cast = self._kept[id(tensor)].read().to(dtype)
            self._kept[id(tensor)] = StoredWeight(self._write(cast), dtype)
            self._own(tensor, dtype)
            self.drop(tensor)
            if is_here:
                self.load(tensor)

    def drop(self, tensor: torch.Tensor) -> None:
        """Free a tensor's memory, unless a block of `opened` is using the weights."""
        if not self._is_open:
            tensor.untyped_storage().resize_(0)

    def bring(self, tensors: Iterable[torch.Tensor]) -> None:
        """Load weights onto the device for the rest of the run."""
        for tensor in tensors:
            if id(tensor) not in self._kept:
                self._move(tensor)
            else:
                self.load(tensor)

    def move_buffers(self, module: torch.nn.Module) -> None:
        """Move a module's buffers to the device for the rest of the run; they're small, and code reads
        them.
        """
        for buffer in module.buffers():
            self._move(buffer)

    def run_call(self, call: ComponentCall) -> Any:
        """Load a component's weights, evicting those of another one, and run the call."""
        component = call.callee.component_name
        if component in self._callees and component != self._current:
            if self._current:
                self._callees[self._current].drop()
            self._callees[component].load()
            self._current = component
        for group in self._units.get(component, ()):
            group.load()
        try:
            return call.proceed()
        finally:
            for group in self._units.get(component, ()):
                group.drop()

    def clear(self) -> None:
        """Forget all groups, and free all loaded weights, so that another strategy can be applied."""
        self._forget()
        for key, (tensor, _) in self._owners.items():
            if key in self._kept:
                self.drop(tensor)

    def close(self) -> None:
        """Restore every parameter's values on its original device; a second call does nothing.

        Weights on disk are memory-mapped, so they take no memory until they're read.
        """
        self.clear()
        for key, (tensor, home) in list(self._owners.items()):
            self._bring_home(tensor, self._kept.get(key), home)
            for table in (self._kept, self._owners, self._sizes):
                table.pop(key, None)
        remove_left()

    def _bring_home(
        self, tensor: torch.Tensor, kept: StoredWeight | None, home: torch.device
    ) -> None:
        if kept is not None and kept is find_stored(tensor):  # it stays in its file
            if tensor.device != home:
                tensor.data = torch.empty_like(tensor.data, device=home)
                self.drop(tensor)
            return
        mark_as_waiting(tensor, waits=False)
        if kept is None:
            tensor.data = tensor.data.to(home)
        elif tensor.is_contiguous():
            tensor.data = kept.read(home)
        else:  # its strides come back, too
            tensor.data = torch.empty_like(tensor.data, device=home).copy_(kept.read())

    def _move(self, tensor: torch.Tensor) -> None:
        if (stored := find_stored(tensor)) is not None:
            put_(tensor, stored, self._device)
        elif not is_on(tensor, self._device):
            self._owners.setdefault(id(tensor), (tensor, tensor.device))
            tensor.data = tensor.data.to(self._device)

    def _own(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Give a tensor a storage of its own on the device, because that of a memory-mapped file can't
        be resized.

        The old storage is freed first, because a full device has no room for both.
        """
        like = torch.empty_like(tensor.data, device="meta", dtype=dtype)
        tensor.data = tensor.data.new_empty(0)
        tensor.data = torch.empty_like(like, device=self._device)
        self._sizes[id(tensor)] = tensor.untyped_storage().nbytes()
        mark_as_waiting(tensor)

    def _keep(self, tensor: torch.Tensor) -> StoredWeight:
        stored = find_stored(tensor)
        if stored is None:
            return StoredWeight(self._write(tensor), tensor.dtype)
        return stored if self._place is not None else StoredWeight(stored.read(), stored.dtype)

    def _write(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor to load from, in host memory or in a memory-mapped file."""
        if self._place is None:
            return tensor.detach().to("cpu", copy=True)
        if is_mapped(tensor):
            return tensor.detach()  # `_own` gives the tensor another storage
        return map_copy(tensor, self._place)


def _mark_state(tensor: torch.Tensor) -> object:
    """Return a mark that changes with a tensor's values, and always for one made in inference mode, whose
    writes PyTorch doesn't count.
    """
    return object() if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


@contextlib.contextmanager
def weights_at_hand(module: torch.nn.Module) -> Iterator[None]:
    """Load a component's offloaded weights for the `with` block, so that it can read or change them.

    Cost: for an offloaded component, all of its weights on the device at the same time.
    """
    store: WeightStore | None = vars(module).get(WAITING)
    with contextlib.nullcontext() if store is None else store.opened(module):
        yield


def find_waiting(module: torch.nn.Module, tensor: torch.Tensor) -> StoredWeight | None:
    """Return the stored weight that an offloaded parameter is loaded from; None if it's in memory."""
    if tensor.is_meta or tensor.untyped_storage().nbytes() or not tensor.numel():
        return None
    store: WeightStore | None = vars(module).get(WAITING)
    return (store.find(tensor) if store is not None else None) or find_stored(tensor)


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device; `cuda` alone matches any CUDA device."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
