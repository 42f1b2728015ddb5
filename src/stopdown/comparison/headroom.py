"""Headroom as records hold it: bits up to the end of fp16, whatever the precision."""

from __future__ import annotations

import math

from stopdown.number_formats import FP16

SPOILT = -1000.0
"""Stands for the headroom of a value that was not finite."""


def count_bits(amax: float | None) -> float | None:
    """Bits between a magnitude and 65504; None for zero, `SPOILT` for what is not finite."""
    if amax is None or not math.isfinite(amax):
        return SPOILT
    return math.log2(FP16.largest) - math.log2(amax) if amax > 0 else None
