"""Estimates of run time from a device's compute rate and its weight-transfer bandwidth.

A device of this machine is timed with one matrix product and one copy. A profile states published rates
of matrix products, and `LINK_BYTES_PER_S` is assumed for transfers. Estimates serve to compare strategies:
real products reach only a part of these rates, and element-wise operations are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from stopdown.devices.device_choice import Device, synchronise
from stopdown.devices.device_profiles import Profile
from stopdown.number_formats import FORMATS
from stopdown.out_of_memory import is_out_of_memory

LINK_BYTES_PER_S = 12e9
"""Bandwidth from host memory to a card: what PCIe 3.0 x16 reaches of its 15.75 GB/s. Newer links are
faster, so times of strategies that transfer many weights are overestimated."""

_SIDE = 1024
_LONG_S = 0.02
_COPIED_BYTES = 2**26


PUBLISHED_OVER_ESTIMATE = (1.6, 3.3)
"""Published times over estimates from published rates, 50 steps on an A100 and an H100: 180 and 90 s of
CogVideoX-5B over 109 and 36 s, 90 and 45 s of CogVideoX-2B over 41 and 14 s (their model cards)."""

DISK_BYTES_PER_S = 5e8
"""Bandwidth from disk, for weights that don't fit in host memory: that of a SATA SSD or a cloud volume."""

ROUGH_FLOPS_PER_S = 1e13
"""Assumed rate of a device that could not be timed; only the order of the strategies is meaningful."""


LEAST_FLOPS_PER_S = 1e8
"""A lower measured rate is discarded: other programs slow the machine down, as no device is so slow."""


@dataclass(frozen=True)
class Speed:
    """The compute rate and the transfer bandwidth of a device.

    Attributes:
        flops_per_s: of a large matrix product in the precision of the run.
        link_bytes_per_s: from the offloaded weights to the device.
        reason: where the figures come from, in one sentence.
        error: smallest and largest known ratio of real to estimated run times; (1, 1) if timed here.
    """

    flops_per_s: float
    link_bytes_per_s: float
    reason: str
    error: tuple[float, float] = (1.0, 1.0)

    def read_from_disk(self) -> Speed:
        """Return the speed with offloaded weights read from disk each time."""
        if self.link_bytes_per_s <= DISK_BYTES_PER_S:
            return self
        reason = f"{self.reason.rstrip('.')}, and files at {DISK_BYTES_PER_S / 1e9:g} GB/s."
        return dataclasses.replace(self, link_bytes_per_s=DISK_BYTES_PER_S, reason=reason)


def find_speed(profile: Profile, formats: Iterable[str]) -> Speed | None:
    """Return a device profile's published speed in the slowest of the formats; None if one is unknown."""
    facts = {name: profile.formats.get(name) for name in formats}
    rates = {name: x.tflops for name, x in facts.items() if x is not None and x.tflops is not None}
    if not rates or len(rates) < len(facts):
        return None
    slowest = min(rates, key=lambda name: rates[name])
    reason = (
        f"{rates[slowest]:g} TFLOPS in {slowest} of {profile.title}, weights at "
        f"{LINK_BYTES_PER_S / 1e9:g} GB/s."
    )
    return Speed(rates[slowest] * 1e12, LINK_BYTES_PER_S, reason, PUBLISHED_OVER_ESTIMATE)


def measure_speed(device: Device, formats: Iterable[str]) -> Speed:
    """Measure the speed of a device of this machine, in the slowest of the formats.

    Cost: about a tenth of a second on a CPU; longer in a format that it emulates.
    """
    try:
        rates = {name: _time_product(device, name) for name in formats}
        slowest = min(rates, key=lambda name: rates[name])
        source = torch.ones(_COPIED_BYTES // 4)
        target = torch.empty_like(source, device=device.torch_name)
        link = _COPIED_BYTES / _time_second(device, functools.partial(target.copy_, source))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return _leave_untimed("the device has no room")
    if rates[slowest] < LEAST_FLOPS_PER_S:
        return _leave_untimed("this machine is too busy")
    reason = (
        f"{rates[slowest] / 1e12:.3g} TFLOPS in {slowest} with weights moved at {link / 1e9:.3g} GB/s, "
        "measured here."
    )
    return Speed(rates[slowest], link, reason)


def _leave_untimed(why: str) -> Speed:
    """Return a typical speed, with the reason why the device could not be timed."""
    said = f"a typical rate, because {why} to be timed, so only compare them with each other."
    return Speed(ROUGH_FLOPS_PER_S, LINK_BYTES_PER_S, said)


def _time_product(device: Device, name: str) -> float:
    """Measure the FLOP/s of a square matrix product; sizes double, so that a slow format ends early."""
    dtype, side = FORMATS[name].torch_dtype, 64
    while True:
        given = torch.ones(side, side, dtype=dtype, device=device.torch_name)
        elapsed = _time_second(device, functools.partial(torch.matmul, given, given))
        if side >= _SIDE or elapsed > _LONG_S:
            return 2.0 * side**3 / elapsed
        side *= 2


def _time_second(device: Device, work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes after a warm-up.

    The result is the minimum of three runs, because other load on the machine only adds time.
    """
    work()
    return max(time_runs(device, work, 3), 1e-9)


def time_runs(device: Device, run: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of `repeats` runs, each between synchronisations."""
    seconds: list[float] = []
    for _ in range(repeats):
        synchronise(device)
        begun = time.perf_counter()
        run()
        synchronise(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
