"""Formats in which a device computes, according to its vendor and to a timed probe.

The vendor's information (by compute capability, CPU flags, chip and system) is data in `knowledge/rules/`.
A small matmul and convolution are timed as well, and each of the two checks the other.
`torch.cuda.is_bf16_supported()` is not used: it returns True on a V100, because it includes emulation.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stopdown.devices.device_choice import Device, list_devices, read_macos, synchronise
from stopdown.devices.environment import cache_folder
from stopdown.devices.maker_formats import (
    FP32,
    Verdict,
    judge_accelerator,
    judge_cpu,
    read_cpu_flags,
)
from stopdown.errors import OutputError, take_first_line
from stopdown.files.json_files import UnreadableError, read_json_table
from stopdown.files.outputs import written_beside
from stopdown.number_formats import FORMATS, PRECISIONS, format_figure

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Support:
    """How a device supports a format.

    Attributes:
        native: whether the device computes in it in hardware, without known faults.
        works: whether a matmul and a convolution ran in it and returned finite values.
        time_ratio: their time relative to fp32 (geometric mean; 2.0 is twice as slow); None if they did
            not run, or if the machine was too busy to tell.
        reason: explanation for choosing a precision, in whole sentences. It contains no measured figures,
            so that it is the same in every run on a machine.
        measured: sentence with the figures measured here; "" for none.
        is_slow: whether it takes more than `SLOW` times as long as fp32. Measured times decide this only
            if nothing is documented, because other work on the machine affects them.
    """

    native: bool
    works: bool
    time_ratio: float | None
    reason: str
    measured: str = ""
    is_slow: bool = False


SLOW = 1.5
"""Time relative to fp32 above which a format is not chosen for its speed."""


def probe_formats(device: Device) -> dict[str, Support]:
    """Return the support of fp32, bf16 and fp16 on a device, from its vendor's data and a short test.

    The result is cached in the process. The times are stored on this machine for later processes, so that
    their choices stay the same. The probe draws no random numbers. Formats are timed round-robin, and the
    shortest time counts. If the times are noisy on a busy machine, the speed is left unknown and nothing is
    stored.

    Cost: the first call takes less than 0.5 s on a CPU; on an accelerator it synchronises, and loads the
    libraries that a run would load anyway.
    """
    return dict(_probe_once(device.type, device.index))


@functools.cache
def _probe_once(kind: str, index: int) -> tuple[tuple[str, Support], ...]:
    device = next(d for d in list_devices() if (d.type, d.index) == (kind, index))
    verdicts, times = judge_device(device), _time_formats(device)
    return tuple(
        (name, weigh_support(name, verdicts[name], times[name], times["fp32"]))
        for name in PRECISIONS
    )


def judge_device(device: Device) -> dict[str, Verdict]:
    """Return for fp32, bf16 and fp16 whether a device computes natively, according to its vendor."""
    if device.type == "mps":
        return judge_accelerator("mps", read_macos(), device.name)
    if device.type == "cpu":
        return judge_cpu(read_cpu_flags())
    if device.capability is None:
        unknown = (
            f"Nothing is known of the arithmetic of {device.type} devices but what a probe tells."
        )
        untold = Verdict(True, unknown, is_known=False)
        return {"fp32": FP32, "bf16": untold, "fp16": untold}
    import torch

    if torch.version.hip:
        name = str(torch.cuda.get_device_properties(device.index).gcnArchName)
        return judge_accelerator("rocm", name=name.partition(":")[0])
    return judge_accelerator("cuda", device.capability, device.name)


@dataclass(frozen=True)
class Timing:
    """Times of the probe's two operations in one format, or the reason why they did not run.

    Attributes:
        matmul_s, convolution_s: the shortest time of all samples, since other load only adds to it.
        failure: why they did not run; "" if they did.
        noise: ratio of the samples' lower quartile to their minimum.
    """

    matmul_s: float = math.nan
    convolution_s: float = math.nan
    failure: str = ""
    noise: float = 1.0

    @property
    def is_positive(self) -> bool:
        """Whether both times are positive, so that ratios of them exist."""
        return self.matmul_s > 0 and self.convolution_s > 0


MOST_NOISE = 1.5
"""Product of two timings' noise above which they are not compared, unless their ratio divided by the noise
is at least `CLEARLY_SLOW`."""

CLEARLY_SLOW = 2.0

LEAST_RATIO = 1 / 64
"""Smallest plausible time relative to fp32; with matrix units, 16-bit formats reach a thirtieth."""


def weigh_support(name: str, verdict: Verdict, timing: Timing, reference: Timing) -> Support:
    """Combine the vendor's verdict and the measured times of a format into its `Support`.

    Args:
        reference: times of fp32.
    """
    if timing.failure:
        return Support(
            False, False, None, f"{verdict.reason} It was tried and failed: {timing.failure}"
        )
    if name == "fp32" or reference.failure:
        return Support(verdict.native, True, 1.0, verdict.reason)
    matmul = timing.matmul_s / reference.matmul_s
    convolution = timing.convolution_s / reference.convolution_s
    ratio, noise = math.sqrt(matmul * convolution), timing.noise * reference.noise
    is_noisy = noise > MOST_NOISE and ratio / noise < CLEARLY_SLOW
    if is_noisy or min(matmul, convolution) < LEAST_RATIO:
        busy = "The timings on this machine are too noisy to show how fast it is."
        return Support(verdict.native, True, None, verdict.reason, busy)
    is_slow = not verdict.is_known and ratio > SLOW
    slow = f" Here it takes more than {SLOW} times as long as fp32." if is_slow else ""
    meaning = f", so {name} {_describe_speed(ratio)}" if verdict.native else ""
    measured = (
        f"Measured here, a matmul takes {format_figure(matmul)} and a convolution "
        f"{format_figure(convolution)} times as long as in fp32{meaning}."
    )
    return Support(verdict.native, True, round(ratio, 3), verdict.reason + slow, measured, is_slow)


def _describe_speed(ratio: float) -> str:
    if ratio < 0.9:
        return "is faster"
    if ratio <= 1.1:
        return "saves memory but no time"
    return "saves memory but is slower"


_SHARE_S = 0.05  # seconds for one operation in one format: three formats and two operations of it
_ROUNDS = 20
_Operation = Callable[[], Any]


def _time_formats(device: Device) -> dict[str, Timing]:
    """Return the time of each format on a device: stored times if there are any, else new measurements.

    Stored times keep the choice of a precision from changing between runs when a ratio is near a limit.
    """
    try:
        found = msgspec.convert(read_json_table(_kept_timings(device)), dict[str, Timing])
    except (UnreadableError, msgspec.ValidationError):
        return _measure_formats(device)
    is_whole = set(found) == set(PRECISIONS) and all(x.is_positive for x in found.values())
    return found if is_whole else _measure_formats(device)


def forget_timings(device: Device) -> None:
    """Delete a device's stored times, so that the next process times it again."""
    with suppress(OSError):
        _kept_timings(device).unlink(missing_ok=True)


def _measure_formats(device: Device) -> dict[str, Timing]:
    """Time all formats round-robin, so that other load affects all of them equally.

    If the samples agree, the times are stored for later processes, in `timings` of the cache folder.
    """
    import torch

    failures: dict[str, str] = {}
    operations: dict[tuple[str, int], _Operation] = {}
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        for name in PRECISIONS:
            try:
                made = _make_operations(device, FORMATS[name].torch_dtype)
                if not all(bool(torch.isfinite(operation()).all()) for operation in made):
                    raise ArithmeticError("a sum of products of 0.125 wasn't finite")
                operations |= {(name, at): operation for at, operation in enumerate(made)}
            except (RuntimeError, TypeError, NotImplementedError, ArithmeticError) as error:
                failures[name] = f"{take_first_line(error).rstrip('.')}."
        samples = _sample(device, operations)
    found = {
        name: Timing(failure=failures[name])
        if name in failures
        else _sum_up(samples[name, 0], samples[name, 1])
        for name in PRECISIONS
    }
    reference = found["fp32"].noise
    if not failures and all(x.noise * reference <= MOST_NOISE for x in found.values()):
        path = _kept_timings(device)
        with suppress(OSError, OutputError):  # it is measured again
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_beside(path) as part:
                part.write_bytes(msgspec.json.encode(found))
    return found


def _kept_timings(device: Device) -> Path:
    """Return the path of a device's stored times; the name is a hash of all facts that affect them."""
    import torch

    facts = (
        device.type,
        device.name,
        device.capability,
        torch.__version__,
        torch.version.cuda or torch.version.hip,
        read_macos() if device.type == "mps" else None,
        (sorted(read_cpu_flags()), torch.get_num_threads()) if device.type == "cpu" else None,
        _choose_sizes(device),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return cache_folder() / "timings" / f"{digest[:32]}.json"


def _sample(
    device: Device, operations: Mapping[tuple[str, int], _Operation]
) -> dict[tuple[str, int], list[float]]:
    """Time each operation in seconds, round-robin over several rounds; slow operations run only twice."""
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in operations}
    for number in range(_ROUNDS):
        for key, operation in list(operations.items())[:: 1 if number % 2 else -1]:
            if number < 2 or number * min(samples[key]) < _SHARE_S:
                synchronise(device)
                start = time.perf_counter()
                operation()
                synchronise(device)
                samples[key].append(time.perf_counter() - start)
    return samples


def _sum_up(matmul: list[float], convolution: list[float]) -> Timing:
    noise = max(_measure_noise(matmul), _measure_noise(convolution))
    return Timing(min(matmul), min(convolution), noise=noise)


def _measure_noise(seconds: list[float]) -> float:
    """Return the ratio of the lower quartile of the samples to their minimum."""
    ordered = sorted(seconds)
    return ordered[max(1, len(ordered) // 4)] / max(ordered[0], 1e-9)


def _choose_sizes(device: Device) -> tuple[int, int, int]:
    """Return the sides of the matmul, and the channels and sides of the convolution.

    With 128, 32 and 16 a processor with AMX took 1.2 to 1.4 times as long in bf16 as in fp32, and a third
    of the time with these (PyTorch 2.13.0, 2026-11-29).
    """
    return (256, 64, 32) if device.type == "cpu" else (2048, 128, 64)


def _make_operations(device: Device, dtype: torch.dtype) -> tuple[_Operation, _Operation]:
    """Return a matmul and a convolution whose exact results fit every format.

    They are large enough to outweigh the launch. On a CPU they are as small as that allows, because it may
    compute a format one value at a time.
    """
    import torch

    size, channels, side = _choose_sizes(device)

    def fill(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0.125, dtype=dtype, device=device.torch_name)

    left, right = fill(size, size), fill(size, size)
    image, kernel = fill(1, channels, side, side), fill(channels, channels, 3, 3)
    return (
        lambda: left @ right,
        lambda: torch.nn.functional.conv2d(image, kernel, padding=1),
    )
