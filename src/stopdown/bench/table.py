"""A benchmark as one page of Markdown, which is read as it is and drawn by any Git host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stopdown.bench.records import Benchmark, Measurement
from stopdown.number_formats import format_bytes


def render(made: Benchmark) -> str:
    """The page."""
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
