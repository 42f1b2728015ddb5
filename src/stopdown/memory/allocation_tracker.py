"""Bytes of the tensors that are alive, counted operation by operation.

Every storage that an operation returns is counted until its last tensor dies, as an allocator would,
because Python drops it at the same moment. So it works on fake tensors as well, which own no memory:
a call of a full-size model is counted in seconds, without its weights. On the CPU the peak is that of
PyTorch's own allocator to the byte for most calls (measured in `benchmarks/memory.py`).

**Catches** whatever PyTorch operations allocate for their outputs, and where Python keeps it alive;
what convolutions on the CPU take for themselves (`workspaces`).
**Does not catch** what other kernels allocate for themselves and free before they return (cuDNN's
workspaces), an allocator's rounding and fragmentation, memory outside of PyTorch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stopdown.memory.convolution_workspaces import count_workspace
from stopdown.numerics import count_attention_on_cpu


class StorageTracker(TorchDispatchMode):
    """Counts, while it is entered, the storages that operations make.

    Attributes:
        live_bytes: of storages that are alive.
        peak_bytes: the most since the start or the last `restart`.
        flops: of matrix products, convolutions and attention, since the start.
        on_operation: told of each operation's positional arguments before it runs.
        kind: of tensors that are counted; others stand for nothing that a device would hold.
    """

    def __init__(self, *, on_cpu: bool = True) -> None:
        """
        Args:
            on_cpu: whether the kernels are those of the CPU, whose convolutions take memory too.
        """
        super().__init__()
        self.live_bytes = self.peak_bytes = self.flops = 0
        self._on_cpu = on_cpu
        self.on_operation: Callable[[Any], None] | None = None
        self.kind: type[torch.Tensor] = torch.Tensor
        self._known: dict[int, weakref.ref[Any]] = {}

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the storages of these tensors out: weights, and what came from outside."""
        for tensor in tensors:
            self._watch(tensor.untyped_storage(), 0)

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that no operation made while this was entered."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) not in self._known:
                self.add(storage.nbytes())
                self._watch(storage, storage.nbytes())

    def restart(self) -> int:
        """Begin a new peak at what is alive now; the peak until now comes back."""
        before, self.peak_bytes = self.peak_bytes, self.live_bytes
        return before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.on_operation is not None:
            self.on_operation(args)
        output = func(*args, **(kwargs or {}))
        made = [x for x in pytree.tree_leaves(output) if isinstance(x, self.kind)]
        if not made:
            return output
        self.count(made)
        taken = count_workspace(func, args, output) if self._on_cpu else 0
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + taken)
        self.flops += _count_flops(func.overloadpacket, args, kwargs or {}, output)
        return output

    def add(self, nbytes: int) -> None:
        """A storage is made."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _watch(self, storage: Any, nbytes: int) -> None:
        """Forget a storage when its last tensor dies."""
        key = id(storage)
        if key not in self._known:
            self._known[key] = weakref.ref(storage, functools.partial(self._drop, key, nbytes))

    def _drop(self, key: int, nbytes: int, _: Any) -> None:
        self._known.pop(key, None)
        self.live_bytes -= nbytes


def _count_flops(packet: Any, args: Any, kwargs: dict[str, Any], output: Any) -> int:
    """Floating-point operations of a product, a convolution or attention; 0 of anything else."""
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return count_attention_on_cpu(*(x.shape for x in args[:3]))
    rule = flop_registry.get(packet)
    return 0 if rule is None else rule(*args, **kwargs, out_val=output)
