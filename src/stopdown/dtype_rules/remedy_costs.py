"""The four remedies that users know, priced side by side for a device: all fp16, casts, bf16, fp32.

An estimate from what one run without weights showed: operations and bytes of every call, weights, and
the values that live at once. Time is the larger of arithmetic and memory traffic, call by call
(roofline: Williams, Waterman, Patterson 2009); arithmetic goes at the device's rate for the format, and
traffic with the format's size. Both stand relative to fp32 on the same device. A format that is emulated
is computed in fp32: its whole time goes by the rate that was measured, as `doctor` tells it.

**Does not catch** launch times, caches, kernels that reach a part of the peak, and what an offload or
tiling saves.
"""

from __future__ import annotations

import functools

import torch

from stopdown.device_profiles import Profile
from stopdown.dtype_rules.inspection import Examination, Seen
from stopdown.number_formats import FORMATS, name_dtype
from stopdown.records import Price

BALANCE = 20.0
"""fp32 operations that a device does while it moves one byte: 17 on a V100 (15.7 TFLOP/s over 0.9
TB/s), 20 on an H100 (67 over 3.35), 12.5 on an A100 without TF32 (19.5 over 1.555), by their makers."""


def price_remedies(seen: Examination, profile: Profile) -> tuple[Price, ...]:
    """Time and memory of each remedy on a device.

    Args:
        seen: what one run without weights showed.
        profile: the device.
    """
    fp16, bf16 = profile.formats.get("fp16"), profile.formats.get("bf16")
    is_slow = bf16 is not None and bf16.state == "emulated" and bf16.rate is None
    never = ", and never faster than fp32" if is_slow else ""
    notes = {
        "all fp16": f"fp16 is {fp16.state if fp16 else 'unknown'} there; safe with a plan (stopdown plan "
        "SOURCE), which costs no time.",
        "explicit casts": "As the components stand, with a cast wherever two meet.",
        "bf16": f"bf16 is {bf16.state if bf16 else 'unknown'} there{never}.",
        "fp32": "Always right; the others are compared with it.",
    }
    return tuple(_price(remedy, seen, profile, note) for remedy, note in notes.items())


def _choose(remedy: str, callee: Seen) -> str:
    """The format that a component has under a remedy."""
    own = name_dtype(callee.main) if callee.main is not None else "fp32"
    return {"all fp16": "fp16", "explicit casts": own}.get(remedy, remedy)


def _price(remedy: str, seen: Examination, profile: Profile, note: str) -> Price:
    choose = functools.partial(_choose, remedy)
    callees = list(seen.callees.values())
    time = [_time(callee, choose(callee), profile) for callee in callees]
    reference = sum(t for t in (_time(callee, "fp32", profile) for callee in callees) if t)
    ratio = None
    if reference and all(t is not None for t in time):
        ratio = round(sum(t for t in time if t is not None) / reference, 3)
    weights = {
        callee.component_name: _resize(callee, callee.weight_bytes, choose(callee))
        for callee in callees
    }
    peak = max((_resize(d, d.work.peak_bytes, choose(d)) for d in callees), default=0)
    total = sum(weights.values())
    return Price(remedy, ratio, total, total + peak, note)


def _time(callee: Seen, precision: str, profile: Profile) -> float | None:
    """Time of a component call in units of one fp32 operation; None when a rate is not known."""
    fact = profile.formats.get(precision)
    rate = fact.rate if fact else None
    if fact is not None and fact.state == "emulated" and precision != "fp32":
        wide = _time(callee, "fp32", profile)
        return None if wide is None else wide / (rate or 1.0)
    if rate is None:
        return None
    arithmetic = sum(callee.work.flops.values()) / rate
    traffic = _resize(callee, callee.work.bytes, precision) * BALANCE
    return callee.calls * max(arithmetic, traffic)


def _resize(callee: Seen, size: float, precision: str) -> int:
    """Bytes of what was seen in the component's dtype, in another."""
    stood = torch.finfo(callee.main).bits // 8 if callee.main is not None else 4
    return int(size * FORMATS[precision].size_bytes / stood)
