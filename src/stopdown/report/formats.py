"""Numbers as a report shows them: ratios, durations, decibels, bits."""

from __future__ import annotations

import math

from stopdown.comparison.records import SPOILT


def format_ratio(ratio: float | None) -> str:
    """`0.64×`, `310×`, or a dash."""
    if ratio is None or not math.isfinite(ratio):
        return "–"
    return f"{ratio:.0f}×" if ratio >= 20 else f"{ratio:.2f}×"


def format_seconds(seconds: float) -> str:
    """`0.42 s`, `3 min 20 s`, `2 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, over = divmod(minutes, 60)
    return f"{hours} h {over} min" if hours else f"{minutes} min {rest} s"


def format_number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def format_bits(bits: float | None) -> str:
    """`4.1 bits`, `−1.9 bits`, `not finite`, or a dash."""
    if bits is None:
        return "–"
    return "not finite" if bits <= SPOILT else f"{bits:.1f}".replace("-", "−")
