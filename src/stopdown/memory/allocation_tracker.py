"""Count the bytes of live tensors, operation by operation, while code runs on real or fake tensors.

Every storage that an operation returns counts until its last tensor dies, as in an allocator, because
Python drops it at the same moment. This works on fake tensors too, which own no memory, so a call of a
full-size model is counted in seconds, without its weights. On the CPU the peak is that of PyTorch's own
allocator to the byte for most calls (measured in `benchmarks/memory.py`).

For a convolution on the CPU, PyTorch picks one of several implementations by dtype, channels and size, and
reports which (`_select_conv_backend`; PyTorch's fake tensors use it too). Two of them need a considerable
workspace: the plain one unfolds its input into columns, one for each output position; oneDNN's copies
input, weights and output into blocks of channels, 16 with AVX-512, else 8. The sizes are those that the
allocator reported with torch 2.13.0 on 2026-11-21, with AVX-512 and with AVX2.

Not covered: memory that other kernels allocate and free before they return (cuDNN's workspaces,
transposed convolutions), an allocator's rounding and fragmentation, memory outside of PyTorch.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stopdown.devices.maker_formats import read_cpu_flags
from stopdown.numerics import count_attention_on_cpu

Event = tuple[int | str, int]
"""An event: a storage's number with its bytes when it is allocated, or a module's path with 1 when it is
entered. The second entry is 0 when the storage dies or the module is left."""


class StorageTracker(TorchDispatchMode):
    """A dispatch mode that counts the storages that operations allocate.

    Attributes:
        live_bytes: bytes of the counted storages that are alive.
        peak_bytes: maximum of `live_bytes` and workspaces since the start or the last `restart`.
        flops: of matrix products, convolutions and attention, since the start.
        on_operation: callback that receives the positional arguments of each operation that made a tensor.
        kind: class of the tensors that are counted; tensors of other classes are ignored.
        events: allocations and frees of storages, in order.
    """

    def __init__(self, *, on_cpu: bool = True) -> None:
        """Make a tracker, which counts while it is entered.

        Args:
            on_cpu: whether to count the workspaces of the CPU's convolutions.
        """
        super().__init__()
        self.live_bytes = self.peak_bytes = self.flops = 0
        self._on_cpu = on_cpu
        self.on_operation: Callable[[Any], None] | None = None
        self.kind: type[torch.Tensor] = torch.Tensor
        self.events: list[Event] = []
        self.numbers = itertools.count()
        self._known: dict[int, weakref.ref[Any]] = {}

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude the storages of these tensors, such as weights, from the count."""
        for tensor in tensors:
            self._watch(tensor.untyped_storage(), 0)

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of these tensors, unless they are known already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) not in self._known:
                self.add(storage.nbytes())
                self._watch(storage, storage.nbytes())

    def restart(self) -> int:
        """Return the peak so far, and begin to measure another from the live bytes on."""
        before, self.peak_bytes = self.peak_bytes, self.live_bytes
        return before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        made = [x for x in pytree.tree_leaves(output) if isinstance(x, self.kind)]
        if not made:  # as of what asks for a tensor's device
            return output
        if self.on_operation is not None:
            self.on_operation(args)
        self.count(made)
        taken = count_workspace(func, args, output) if self._on_cpu else 0
        if sums := count_sums(func, args):
            number = next(self.numbers)
            self.events += [(number, sums), (number, 0)]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + taken)
        self.flops += _count_flops(func.overloadpacket, args, kwargs or {}, output)
        return output

    def add(self, nbytes: int) -> None:
        """Add a new storage's bytes to the live bytes, and update the peak."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _watch(self, storage: Any, nbytes: int) -> None:
        """Record a storage as known and subtract its bytes when its last tensor dies."""
        key = id(storage)
        if key not in self._known:
            number = next(self.numbers)
            drop = functools.partial(self._drop, key, number, nbytes)
            self._known[key] = weakref.ref(storage, drop)
            if nbytes:
                self.events.append((number, nbytes))

    def _drop(self, key: int, number: int, nbytes: int, _: Any) -> None:
        self._known.pop(key, None)
        self.live_bytes -= nbytes
        if nbytes:
            self.events.append((number, 0))


def _count_flops(packet: Any, args: Any, kwargs: dict[str, Any], output: Any) -> int:
    """Count the FLOPs of a matrix product, a convolution or attention; return 0 for other operations."""
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return count_attention_on_cpu(*(x.shape for x in args[:3]))
    rule = flop_registry.get(packet)
    return 0 if rule is None else rule(*args, **kwargs, out_val=output)


def _find_block() -> int:
    """Return the channels in one block of oneDNN's layouts: as many as fp32 values fit in a register."""
    return 16 if "avx512_bw" in read_cpu_flags() else 8


def count_workspace(func: Any, args: Any, output: Any) -> int:
    """Return the bytes of an operation's workspace, which it needs beside its output; 0 if unknown.

    Args:
        func: an ATen overload; only `aten.convolution` on the CPU has a known workspace.
    """
    if func is not torch.ops.aten.convolution.default or args[0].device.type != "cpu":
        return 0
    backend = str(_select_backend(args))
    if args[6]:
        return 0
    if "Slow" in backend:
        weight, stride, padding = args[1], args[3], args[4]
        is_product = set(weight.shape[2:]) == {1} and set(stride) == {1} and set(padding) == {0}
        if is_product:
            return 0
        places = output.shape[0] * math.prod(output.shape[2:])
        return places * math.prod(weight.shape[1:]) * output.element_size()
    return _count_blocks(args[0], args[1], output) if "Mkldnn" in backend else 0


def count_sums(func: Any, args: Any) -> int:
    """Return the bytes of the fp32 accumulator that attention allocates on CUDA for wide heads.

    The memory-efficient kernel accumulates in registers up to 128 values a head, and in memory beyond
    (`kNeedsOutputAccumulatorBuffer` of PyTorch's `kernel_forward.h`); FlashAttention ends at 256.
    """
    if func not in _ATTENTION or args[2].shape[-1] <= MOST_IN_REGISTERS:
        return 0
    return math.prod(args[0].shape[:-1]) * int(args[2].shape[-1]) * 4


MOST_IN_REGISTERS = 128

_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)


def _select_backend(args: Any) -> Any:
    """Return the implementation that PyTorch selects for these arguments of `aten.convolution`."""
    given, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    return torch._C._select_conv_backend(
        given,
        weight,
        bias=bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
        groups=groups,
        bias_sizes=None if bias is None else list(bias.shape),
    )


def _count_blocks(given: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> int:
    """Return the workspace bytes of oneDNN's convolution, which copies its operands into blocks.

    At first the copied input, the weights and the blocked output are alive, then both outputs. The larger
    sum counts, less the plain output.
    """
    plain, blocked = output.nbytes, _pad_channels(output)
    copied = _pad_channels(given) if given.shape[1] >= _find_block() else 0
    return max(copied + weight.nbytes + blocked, blocked + plain) - plain


def _pad_channels(tensor: torch.Tensor) -> int:
    channels, block = tensor.shape[1], _find_block()
    return tensor.nbytes // channels * (-(-channels // block) * block)
