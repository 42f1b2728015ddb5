"""Benchmark of each precision on a device, with a report that its owner can paste into an issue.

Two models run in each precision: the given one, and a denoiser with generated weights that overflows in
plain fp16. The first run measures the error and warms up, the second the peak of memory. The fastest run
gives the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stopdown.component_calls.components import cast_component_, find_components
from stopdown.devices.device_choice import Device
from stopdown.devices.device_memory import free_memory, peak_memory
from stopdown.devices.environment import describe_machine
from stopdown.doctor import try_attention
from stopdown.errors import take_one_line
from stopdown.memory.offloader import predict_run
from stopdown.memory.speed import time_runs
from stopdown.memory.strategies import Strategy
from stopdown.number_formats import FORMATS, format_bytes, format_figure
from stopdown.numerics import count_non_finite, relative_l2
from stopdown.pipelines.drawn_inputs import complete_request
from stopdown.pipelines.loader import load_pipeline, move_program
from stopdown.pipelines.requests import Request, build_arguments, find_steps
from stopdown.pipelines.results import read_result
from stopdown.pipelines.tiny_pipelines import build_wide, overflow_
from stopdown.plans.applier import load_entry, put_plan
from stopdown.plans.certified import certify_program
from stopdown.records import Plan
from stopdown.runtime.guard import guard
from stopdown.sources.hub import Progress
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.source import Source

WAYS = ("fp32", "bf16", "fp16-plain", "fp16", "fp16, guarded")
"""Precisions as in `--precision`; all are compared with the first."""


@dataclass(frozen=True)
class BenchModel:
    """A model to measure; each call of `build` returns the same pipeline in fp32 on the device."""

    name: str
    build: Callable[[], Any]
    request: Request


@dataclass(frozen=True)
class BenchRow:
    """Measurements of one model in one precision.

    Attributes:
        subject: name of the model.
        way: the precision.
        time_s: seconds of the fastest run.
        time_ratio: that time relative to fp32's; None if fp32 wasn't measured.
        peak_bytes: peak memory of a run, including weights.
        predicted_bytes: peak memory according to the forecast.
        rel_err: relative L2 error of the frames against fp32's; None if it is not finite, or fp32 wasn't
            measured.
        non_finite: number of NaN and Inf values in the frames.
        note: why nothing was measured; "" if it was.
    """

    subject: str
    way: str
    time_s: float | None = None
    time_ratio: float | None = None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    rel_err: float | None = None
    non_finite: int = 0
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All measurements, with those facts about the machine that make them comparable."""

    device: str
    backend: str
    memory_bytes: int
    versions: dict[str, str | None]
    rows: tuple[BenchRow, ...]


def list_subjects(source: Source, device: Device, request: Request) -> list[BenchModel]:
    """List the models to measure: the given one, and one with generated weights.

    Unless the given model is bundled, it is named by its pipeline class, so that the report has no paths.
    """
    name = source.name if source.kind == "bundled" else source.pipeline_class
    small = device.type == "cpu" or device.memory_bytes < 6 * 2**30
    heads, layers, side = (2, 2, 32) if small else (48, 4, 256)

    def load() -> Any:
        return move_program(load_pipeline(source, torch_dtypes=torch.float32), device)

    def generate() -> Any:
        pipe = build_wide(heads, layers, 512, device.torch_name)
        overflow_(pipe.transformer)
        return move_program(pipe, device)

    drawn = Request("a", frames=9, height=side, width=side, steps=request.steps, guidance=1.0)
    generated = BenchModel(f"CogVideoX, {layers} layers {64 * heads} wide", generate, drawn)
    return [BenchModel(name, load, request), generated]


def measure_models(
    device: Device, subjects: list[BenchModel], minutes: float, progress: Progress
) -> Report:
    """Measure each model in each precision; rows that would begin after `minutes` are left out."""
    begun, rows = time.monotonic(), list[BenchRow]()
    for subject in subjects:
        bench = _Bench(device, subject, progress)
        for way in WAYS:
            progress("bench", f"{subject.name}, {way}", len(rows), len(subjects) * len(WAYS))
            left_out = BenchRow(subject.name, way, note=f"left out after {minutes:g} minutes")
            rows += [left_out if time.monotonic() - begun > 60 * minutes else bench.measure(way)]
    versions = {
        **describe_machine()["versions"],
        "platform": f"{platform.system()} {platform.machine()}",
    }
    return Report(device.name, device.type, device.memory_bytes, versions, tuple(rows))


class _Bench:
    """Benchmark of one model, with the plan and the fp32 result that its rows share."""

    def __init__(self, device: Device, subject: BenchModel, progress: Progress) -> None:
        self.device, self.subject, self.progress = device, subject, progress
        self.plan: Plan | None = None
        self.fp32: tuple[torch.Tensor, float] | None = None

    def measure(self, way: str) -> BenchRow:
        """Measure one precision; an error becomes the note of the row."""
        row = BenchRow(self.subject.name, way)
        try:
            with quiet_libraries(), torch.no_grad():
                return self._measure(row, self._build(way))
        except Exception as error:  # the other rows go on
            return dataclasses.replace(row, note=hide_paths(take_one_line(error, 300)))
        finally:
            free_memory()

    def _measure(self, row: BenchRow, pipe: Any) -> BenchRow:
        arguments = build_arguments(pipe, complete_request(pipe, self.subject.request))
        run = functools.partial(pipe, **arguments)
        fit = predict_run(
            pipe,
            arguments,
            steps=find_steps(pipe, arguments),
            fused=any(
                row.way[:4] in x for name, x in try_attention(self.device).items() if name != "math"
            ),
            device=self.device.torch_name,
        )
        predicted = next(x for x in fit.predictions if x.strategy == Strategy())
        is_guarded = "guarded" in row.way
        with guard(pipe, announce=lambda x: None) if is_guarded else contextlib.nullcontext():
            frames = _read_frames(pipe, run())
            with peak_memory(self.device) as peak:
                seconds = time_runs(self.device, run, 1)
            if seconds < 10:
                seconds = min(seconds, time_runs(self.device, run, 3))
        if row.way == WAYS[0]:
            self.fp32 = frames, seconds
        error = math.nan if self.fp32 is None else relative_l2(frames, self.fp32[0])
        return dataclasses.replace(
            row,
            time_s=seconds,
            time_ratio=None if self.fp32 is None else seconds / self.fp32[1],
            peak_bytes=peak.peak_bytes + _count_weights(self.device, pipe),
            predicted_bytes=predicted.peak_bytes,
            rel_err=error if math.isfinite(error) else None,
            non_finite=sum(count_non_finite(frames)),
        )

    def _build(self, way: str) -> Any:
        """Build the pipeline and cast it to a precision, or apply a plan to it."""
        pipe = self.subject.build()
        pipe.set_progress_bar_config(disable=True)
        if way.removesuffix(", guarded") == "fp16":
            arguments = build_arguments(pipe, complete_request(pipe, self.subject.request))
            self.plan = self.plan or certify_program(
                pipe, arguments=arguments, progress=self.progress
            )
            put_plan(pipe, self.plan, load_entry)
        else:
            for module in find_components(pipe).values():
                cast_component_(module, FORMATS[way.removesuffix("-plain")].torch_dtype)
        free_memory()
        return pipe


def _count_weights(device: Device, pipe: Any) -> int:
    """Count the bytes of weights to add to a measured peak: all on a CPU, where only growth is measured."""
    if device.type != "cpu":
        return 0
    tensors = [x for m in find_components(pipe).values() for x in (*m.parameters(), *m.buffers())]
    return sum({id(s): s.nbytes() for x in tensors if (s := x.untyped_storage())}.values())


def _read_frames(pipe: Any, output: Any) -> torch.Tensor:
    result = read_result(pipe, {}, output)
    return torch.as_tensor(result.samples if result.frames is None else result.frames).cpu()


def hide_paths(text: str) -> str:
    """Replace paths in a text by PATH, as they may contain people's names."""
    text = text.replace(str(Path.home()), "~")  # a space in it would end the path
    return re.sub(r"(?<![\w.])(~|[A-Za-z]:)?[/\\][^\s'\"(),:;]*", "PATH", text)


def render(report: Report) -> str:
    """Return the report as Markdown, with a summary of the errors first."""
    rows = {row.way: row for row in report.rows[: len(WAYS)]}
    versions = ", ".join(f"{name} {x}" for name, x in report.versions.items() if x)
    lines = [f"**{_word_verdict(rows)}**", ""]
    lines += [
        f"{report.device} ({report.backend}, {format_bytes(report.memory_bytes)}). {versions}."
    ]
    for name in dict.fromkeys(row.subject for row in report.rows):
        lines += [
            "",
            f"{name}:",
            "",
            "| precision | time | × fp32 | peak | predicted peak | error |",
        ]
        lines += ["|---|--:|--:|--:|--:|--:|"]
        lines += [_draw(row) for row in report.rows if row.subject == name]
    return "\n".join(lines) + "\n"


def _word_verdict(rows: Mapping[str, BenchRow]) -> str:
    """Return a sentence with the errors of fp16 and bf16, and one that lists missing measurements."""
    ways = {"fp16": "fp16 with a plan", "fp16-plain": "plain fp16", "bf16": "bf16"}
    known = [f"{_name_error(rows[x])} in {said}" for x, said in ways.items() if _is_known(rows[x])]
    missing = [said for x, said in ways.items() if not _is_known(rows[x])]
    said = [f"Error against fp32: {', '.join(known)}."] if known else []
    return " ".join([*said, *([f"Not measured: {', '.join(missing)}."] if missing else [])])


def _is_known(row: BenchRow) -> bool:
    """Return whether a row has an error against fp32, or values that are not finite."""
    return row.rel_err is not None or row.non_finite > 0


def _name_error(row: BenchRow) -> str:
    """Format an error in percent, the count of non-finite values, or the note on a failed row; a dash if
    fp32 has no values to compare with.
    """
    if row.note:
        return row.note
    if row.non_finite:
        return f"{row.non_finite:,} NaN or Inf"
    return "–" if row.rel_err is None else f"{format_figure(100 * row.rel_err)} %"


def _draw(row: BenchRow) -> str:
    ratio = "–" if row.time_ratio is None else f"{row.time_ratio:.2f}"
    times = "– | –" if row.time_s is None else f"{row.time_s:.3g} s | {ratio}"
    sizes = " | ".join(format_bytes(x) if x else "–" for x in (row.peak_bytes, row.predicted_bytes))
    return f"| {row.way} | {times} | {sizes} | {_name_error(row)} |"
