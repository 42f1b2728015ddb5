"""What a convolution on the CPU allocates for itself, beside its output.

PyTorch picks one of several implementations by dtype, channels and size, and says which
(`_select_conv_backend`, which its own fake tensors ask as well). Two of them take memory that counts:
the plain one unfolds its input into columns, one for each place of the output; oneDNN's copies
input, weights and output into blocks of channels, 16 with AVX-512, else 8. Sizes as the allocator
reported them, torch 2.13.0, 2026-11-21, with AVX-512 and with AVX2.

**Catches** convolutions of two and three dimensions, in fp32, bf16 and fp16.
**Does not catch** transposed ones, workspaces of other operations and of other devices.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from stopdown.devices.environment import read_cpu_flags


def _find_block() -> int:
    """Channels in one block of oneDNN's layouts: what a register holds in fp32."""
    return 16 if "avx512_bw" in read_cpu_flags() else 8


def count_workspace(func: Any, args: Any, output: Any) -> int:
    """Bytes that an operation takes beside its output while it runs; 0 where nothing is known."""
    if func is not torch.ops.aten.convolution.default or args[0].device.type != "cpu":
        return 0
    backend = str(_select_backend(args))
    if args[6]:
        return 0
    if "Slow" in backend:
        return _count_columns(args, output)
    return _count_blocks(args[0], args[1], output) if "Mkldnn" in backend else 0


def _select_backend(args: Any) -> Any:
    """The implementation that PyTorch takes for the arguments of `aten.convolution`."""
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


def _count_columns(args: Any, output: torch.Tensor) -> int:
    weight, stride, padding = args[1], args[3], args[4]
    is_product = set(weight.shape[2:]) == {1} and set(stride) == {1} and set(padding) == {0}
    if is_product:
        return 0
    places = output.shape[0] * math.prod(output.shape[2:])
    return places * math.prod(weight.shape[1:]) * output.element_size()


def _count_blocks(given: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> int:
    """Copies of input and weights beside the blocked output, or both outputs, whichever is more."""
    plain, blocked = output.nbytes, _pad_channels(output)
    copied = _pad_channels(given) if given.shape[1] >= _find_block() else 0
    return max(copied + weight.nbytes + blocked, blocked + plain) - plain


def _pad_channels(tensor: torch.Tensor) -> int:
    channels, block = tensor.shape[1], _find_block()
    return tensor.nbytes // channels * (-(-channels // block) * block)
