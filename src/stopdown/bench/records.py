"""What `stopdown bench` measured, as plain data without names or paths of the machine it ran on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stopdown.number_formats import format_bytes
from stopdown.record_display import Displayed
from stopdown.records import SCHEMA


@dataclass(frozen=True, repr=False)
class Measurement(Displayed):
    """One model run in one way.

    Attributes:
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


def render(made: Benchmark) -> str:
    lines = [f"# {describe_device(made)}", "", *_describe(made)]
    for name, meaning in made.subjects.items():
        rows = [row for row in made.rows if row.subject == name]
        if rows:
            lines += ["", f"## {name}", "", meaning, "", *_draw_rows(rows)]
    if made.attention:
        lines += [
            "",
            "## Kernels of attention",
            "",
            "`[1, 8, 1024, 64]`, of several calls the fastest.",
        ]
        lines += ["", *_draw_attention(made)]
    return "\n".join(lines) + "\n"


def describe_device(made: Benchmark) -> str:
    """Name, compute capability and memory."""
    capability = ""
    if made.capability is not None:
        capability = f", compute capability {made.capability[0]}.{made.capability[1]}"
    return f"{made.device} ({made.backend}{capability}, {format_bytes(made.memory_bytes)})"


def _describe(made: Benchmark) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items() if version)
    yield f"{made.steps} steps a run. {versions}."
    yield f"Memory: {made.memory_source or 'not read'}. In all {made.elapsed_s / 60:.1f} minutes."
    if not made.is_complete:
        yield ""
        yield (
            "**Not complete**: the time limit was reached, or the command was stopped. The same "
            "command continues."
        )


def _draw_rows(rows: Sequence[Measurement]) -> Iterator[str]:
    yield "| way | time | beside fp32 | peak | predicted | error | not finite | host reads | operations |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        cells = (
            row.way,
            _draw(row.time_s, "{:.3g} s"),
            _draw(row.time_ratio, "{:.2f}"),
            "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            "" if row.predicted_bytes is None else format_bytes(row.predicted_bytes),
            _draw(row.rel_err, "{:.2g}") or ("NaN" if row.non_finite else ""),
            str(row.non_finite or ""),
            _draw(row.host_reads, "{}"),
            _draw(row.operations, "{}"),
        )
        yield f"| {' | '.join(cells)} |"
    for row in rows:
        if row.note:
            yield ""
            yield f"{row.way}: {row.note}"


def _draw_attention(made: Benchmark) -> Iterable[str]:
    formats = list(dict.fromkeys(one.format for one in made.attention))
    yield f"| kernel | {' | '.join(formats)} |"
    yield f"|---|{'--:|' * len(formats)}"
    for kernel in dict.fromkeys(one.kernel for one in made.attention):
        times = {one.format: one.time_s for one in made.attention if one.kernel == kernel}
        shown = [f"{1e3 * s:.3g} ms" if (s := times[name]) else "refused" for name in formats]
        yield f"| {kernel} | {' | '.join(shown)} |"


def _draw(value: float | None, pattern: str) -> str:
    return "" if value is None else pattern.format(value)
