"""How far a weight's fold may go where its format does not hold every power of two.

Quantised weights are codes times scales, and a fold goes into the scales: a number in fp32 takes any power
of two, one in fp16, as in a block of GGUF, few. One scale for several parameters, as where a file has
query, key and value in one matrix, makes their exponents one. A module that was loaded from such weights
carries what holds for it, and every problem that is stated for the module has it.

Not covered: what the dequantised weight loses in fp16: that is priced as for any weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stopdown.interception.patches import Patches
from stopdown.number_formats import FP16, find_format

BOUNDS = "stopdown_fold_bounds"
"""Attribute of a module: parameter name to its `FoldBound`."""

MOST_LOSS = 2.0**-11
"""Relative L2 change of a weight by rounding its scales that passes: half a unit in fp16's last place."""

FREE = 100
"""A bound this wide never binds."""


@dataclass(frozen=True)
class FoldBound:
    """What a parameter's exponent may be.

    Attributes:
        low, high: smallest and largest.
        groups: names of what has one exponent; all parameters with a name in common are folded alike.
        reason: what bounds it, for messages: `the Q8_0 scales`.
        wanted: below this a program that computes in fp16 loses bits of the scale: priced, not forbidden.
    """

    low: int = -FREE
    high: int = FREE
    groups: tuple[str, ...] = ()
    reason: str = ""
    wanted: int = -FREE

    def join(self, other: FoldBound) -> FoldBound:
        """Both at once."""
        return FoldBound(
            max(self.low, other.low),
            min(self.high, other.high),
            tuple(dict.fromkeys((*self.groups, *other.groups))),
            self.reason if self.low >= other.low else other.reason,
            max(self.wanted, other.wanted),
        )


def put_bounds(module: torch.nn.Module, bounds: Mapping[str, FoldBound], patches: Patches) -> None:
    """Let a module carry what holds for its parameters."""
    patches.set_attribute(module, BOUNDS, dict(bounds))


def read_bounds(module: torch.nn.Module) -> Mapping[str, FoldBound]:
    """What a module carries; nothing for most."""
    found: Mapping[str, FoldBound] = vars(module).get(BOUNDS, {})
    return found


def _count_values(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitudes, each once, and how often it is there: 16 bits have 2**15 of them."""
    bits = torch.int16 if scales.element_size() == 2 else torch.uint8
    counts = scales.abs().contiguous().view(bits).reshape(-1).long().bincount()
    values = torch.arange(len(counts), dtype=bits).view(scales.dtype)
    is_used = values.float().isfinite() & (counts > 0)
    return values[is_used], counts[is_used]


def _measure_loss(values: torch.Tensor, counts: torch.Tensor, exponent: int) -> float:
    """Relative L2 error that rounding makes in values times `2**exponent`; infinite where they overflow."""
    exact = torch.ldexp(values.double(), torch.tensor(exponent))
    rounded = exact.to(values.dtype).double()
    if not bool(rounded.isfinite().all()):
        return math.inf
    size = float((exact.square() * counts).sum())
    return math.sqrt(float(((rounded - exact).square() * counts).sum()) / size) if size else 0.0


def bound_scales(scales: torch.Tensor) -> tuple[int, int]:
    """Smallest and largest exponent that scales take, as stored; 0 lies between them."""
    found = find_format(scales.dtype)
    if found is None or found.largest > 1e30:
        return -FREE, FREE
    values, counts = _count_values(scales)
    low = high = 0
    while low > -FREE and _measure_loss(values, counts, low - 1) <= MOST_LOSS:
        low -= 1
    while high < FREE and _measure_loss(values, counts, high + 1) <= MOST_LOSS:
        high += 1
    return low, high


def find_normal(scales: torch.Tensor) -> tuple[int, int]:
    """Smallest and largest exponent with which scales are normal numbers of fp16."""
    used = scales.abs().double()
    used = used[(used > 0) & used.isfinite()]
    if not used.numel():
        return -FREE, FREE
    low = math.ceil(math.log2(FP16.smallest_normal / float(used.min())))
    return low, math.floor(math.log2(FP16.largest / float(used.max())))
