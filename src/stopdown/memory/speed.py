"""How fast a device computes and gets weights: what turns operations and bytes into an estimate of time.

A device that is here is timed with one product and one copy. A profile has what its sources say of
matrix products, and a link of `LINK_BYTES_PER_S`. Estimates are for ratios between strategies: real
products reach a part of these rates, and element-wise operations are left out.
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
"""From host memory to a card: what PCIe 3.0 with 16 lanes reaches of its 15.75 GB/s. Newer links are
faster, so the ratios of strategies that move much are rather too high."""

_SIDE = 1024
_LONG_S = 0.02
_COPIED_BYTES = 2**26


PUBLISHED_OVER_ESTIMATE = (1.6, 3.3)
"""Published times over estimates from published rates, 50 steps on an A100 and an H100: 180 and 90 s of
CogVideoX-5B over 109 and 36 s, 90 and 45 s of CogVideoX-2B over 41 and 14 s (their model cards)."""

DISK_BYTES_PER_S = 5e8
"""From files, where weights do not fit into host memory: what a SATA disk or a cloud's volume reads."""

ROUGH_FLOPS_PER_S = 1e13
"""Of a device that could not be timed: the strategies keep their order."""


LEAST_FLOPS_PER_S = 1e8
"""No device is slower, not even in a format that it emulates: a lower rate is what else runs here."""


@dataclass(frozen=True)
class Speed:
    """How fast a device is.

    Attributes:
        flops_per_s: of a large matrix product in the precision of the run.
        link_bytes_per_s: from where weights wait to the device.
        reason: where the figures come from, one sentence.
        error: the least and the most that runs took over such estimates; 1 and 1 where it was timed here.
    """

    flops_per_s: float
    link_bytes_per_s: float
    reason: str
    error: tuple[float, float] = (1.0, 1.0)

    def read_from_disk(self) -> Speed:
        """Return the speed if waiting weights are read from files each time."""
        if self.link_bytes_per_s <= DISK_BYTES_PER_S:
            return self
        reason = f"{self.reason.rstrip('.')}, and files at {DISK_BYTES_PER_S / 1e9:g} GB/s."
        return dataclasses.replace(self, link_bytes_per_s=DISK_BYTES_PER_S, reason=reason)


def find_speed(profile: Profile, formats: Iterable[str]) -> Speed | None:
    """Return a profile's stated speed in the slowest of some formats; None if it lacks one of them."""
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
    """Measure the speed of a device of this machine, for the slowest of these formats.

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
        f"{rates[slowest] / 1e12:.3g} TFLOPS in {slowest} and {link / 1e9:.3g} GB/s, timed here."
    )
    return Speed(rates[slowest], link, reason)


def _leave_untimed(why: str) -> Speed:
    """Return a typical speed, with the reason why nothing was timed."""
    said = f"a typical rate, because {why} to be timed: only their order holds."
    return Speed(ROUGH_FLOPS_PER_S, LINK_BYTES_PER_S, said)


def _time_product(device: Device, name: str) -> float:
    """Measure the FLOP/s of one product; a small one comes first, so a slow format does not take long."""
    dtype, side = FORMATS[name].torch_dtype, 64
    while True:
        given = torch.ones(side, side, dtype=dtype, device=device.torch_name)
        elapsed = _time_second(device, functools.partial(torch.matmul, given, given))
        if side >= _SIDE or elapsed > _LONG_S:
            return 2.0 * side**3 / elapsed
        side *= 2


def _time_second(device: Device, work: Callable[[], Any]) -> float:
    """Return the seconds of repeated work: the first time sets things up.

    The result is the least of three times, because other work on this machine only adds to it.
    """
    work()
    return max(time_runs(device, work, 3), 1e-9)


def time_runs(device: Device, run: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of some runs."""
    seconds: list[float] = []
    for _ in range(repeats):
        synchronise(device)
        begun = time.perf_counter()
        run()
        synchronise(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
