"""What `stopdown bench` measured, as plain data without names or paths of the machine it ran on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stopdown.record_display import Displayed
from stopdown.records import SCHEMA


@dataclass(frozen=True, repr=False)
class Measurement(Displayed):
    """One model run in one way.

    Attributes:
        subject: the model.
        way: how it ran: `fp32`, `rescaled`…
        time_s: of a run, the least of several; None where it was not timed.
        time_ratio: over that of fp32.
        peak_bytes: most memory of a run, weights included.
        predicted_bytes: what was predicted of that; None where nothing was.
        rel_err: of the final latents against those of fp32 (relative L2); None where they were not finite.
        non_finite: values that were NaN or Inf, in all calls.
        host_reads: values that the host waited for in a run.
        operations: that a run gave to the device.
        note: why something is missing; "" when nothing is.
    """

    subject: str
    way: str
    time_s: float | None = None
    time_ratio: float | None = None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    rel_err: float | None = None
    non_finite: int = 0
    host_reads: int | None = None
    operations: int | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class KernelTime(Displayed):
    """One kernel of attention in one format: seconds of a call; None where it refuses the format."""

    kernel: str
    format: str
    time_s: float | None


@dataclass(frozen=True, repr=False)
class Benchmark(Displayed):
    """All that was measured on one device.

    Attributes:
        device: the maker's name.
        backend: `cuda`, `mps`, `cpu`…
        capability: CUDA compute capability; None elsewhere.
        memory_bytes: of the device.
        memory_source: how peaks were read.
        versions: of packages; also `python`, and `platform`, the system and its kind of processor.
        subjects: what ran, in words, by name.
        steps: denoising steps of a run.
        options: what a second start must have the same to go on.
        rows: what was measured, as far as it came.
        attention: kernels of attention, `[1, 8, 1024, 64]`.
        elapsed_s: in all starts together.
        is_complete: nothing is left to be done.
    """

    device: str
    backend: str
    capability: tuple[int, int] | None
    memory_bytes: int
    memory_source: str
    versions: dict[str, str | None]
    subjects: dict[str, str]
    steps: int
    options: dict[str, Any]
    rows: tuple[Measurement, ...] = ()
    attention: tuple[KernelTime, ...] = ()
    elapsed_s: float = 0.0
    is_complete: bool = False
    kind: str = "benchmark"
    schema: int = SCHEMA
