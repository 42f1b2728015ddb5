"""Headroom as records hold it: bits up to the end of fp16, whatever the precision."""

from __future__ import annotations

import math

LARGEST = 65504.0
"""Where fp16 ends."""

SPOILT = -1000.0
"""Stands for the headroom of a value that was not finite."""


def count_bits(amax: float | None) -> float | None:
    """Bits between a magnitude and 65504; None for zero, `SPOILT` for what is not finite."""
    if amax is None or not math.isfinite(amax):
        return SPOILT
    return math.log2(LARGEST) - math.log2(amax) if amax > 0 else None
