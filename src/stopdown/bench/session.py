"""A benchmark from its first row to its last, each kept as it is done: a second start goes on.

A run in which blocks and latents are read comes first; it warms up and gives the error. Then one is
counted, and some are timed with nothing on them. Memory is that of PyTorch's allocators; on the CPU the
growth of resident memory, weights added.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stopdown.bench.records import Benchmark, KernelTime, Measurement
from stopdown.bench.ways import WAYS, Subject, Way, running
from stopdown.component_calls.components import find_components
from stopdown.component_calls.step_counter import StepCounter
from stopdown.devices.device_memory import free_memory, peak_memory
from stopdown.devices.environment import Device, describe_machine
from stopdown.doctor import attend_with, list_kernels, try_attention
from stopdown.errors import take_one_line
from stopdown.memory.forecast import Fit
from stopdown.memory.offloader import predict_run
from stopdown.memory.speed import time_runs
from stopdown.memory.strategies import Prediction, Strategy
from stopdown.number_formats import FORMATS, PRECISIONS
from stopdown.numerics import count_non_finite, iterate_tensors, relative_l2
from stopdown.out_of_memory import is_out_of_memory
from stopdown.pipelines.drawn_inputs import complete_request
from stopdown.pipelines.requests import Request, build_arguments, find_steps
from stopdown.pipelines.results import read_result
from stopdown.plans.calibrated import measure_plan
from stopdown.records import Plan
from stopdown.scaling import Rank
from stopdown.sources.hub import Progress
from stopdown.sources.library_messages import quiet_libraries

REPEATS = 2
"""Timed runs of which the fastest counts."""

_CALLS = 5
"""Calls of an attention kernel of which the fastest counts."""


class Counter(TorchDispatchMode):
    """Counts operations, and values that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default or _leaves_device(args, output):
            self.reads += 1
        else:
            self.operations += 1
        return output

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter]:
        """Also `tolist`, which asks no operation for the values of a tensor on the CPU."""
        plain = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            self.reads += bool(tensor.dim() and tensor.device.type == "cpu")
            return plain(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield self
        finally:
            del torch.Tensor.tolist


def _leaves_device(given: Any, made: Any) -> bool:
    """Whether an operation copied from an accelerator to the host."""
    if not isinstance(made, torch.Tensor) or made.device.type != "cpu":
        return False
    return any(x.device.type not in ("cpu", "meta") for x in iterate_tensors(given))


def measure_peak(device: Device, pipe: Any, run: Callable[[], object]) -> tuple[int, str]:
    """Most bytes that a run takes, weights included, and how that was read."""
    free_memory()
    with peak_memory(device) as peak:
        run()
    if device.type != "cpu":
        return peak.peak_bytes, peak.method
    tensors = [x for m in find_components(pipe).values() for x in (*m.parameters(), *m.buffers())]
    owned = {id(s): s.nbytes() for x in tensors if (s := x.untyped_storage())}
    return peak.peak_bytes + sum(owned.values()), f"weights, and {peak.method}"


def time_attention(device: Device) -> tuple[KernelTime, ...]:
    """Each kernel of attention in each format, `[1, 8, 1024, 64]`."""
    return tuple(
        KernelTime(kernel, name, _time_kernel(device, kernel, name))
        for kernel in list_kernels()
        for name in PRECISIONS
    )


def _time_kernel(device: Device, kernel: str, name: str) -> float | None:
    try:
        given = torch.ones(
            1, 8, 1024, 64, dtype=FORMATS[name].torch_dtype, device=device.torch_name
        )
        with torch.inference_mode():
            attend_with(kernel, given)
            return time_runs(device, lambda: attend_with(kernel, given), _CALLS)
    except (RuntimeError, TypeError, NotImplementedError):
        return None


Keep = Callable[[Benchmark], None]


def begin(
    device: Device, subjects: Sequence[Subject], ways: Sequence[str], options: dict[str, Any]
) -> Benchmark:
    """A benchmark with nothing measured yet; of the machine only what makes figures comparable."""
    machine = describe_machine()
    system = f"{platform.system()} {platform.machine()}"
    return Benchmark(
        device=device.name,
        backend=device.type,
        capability=device.capability,
        memory_bytes=device.memory_bytes,
        memory_source="",
        versions={**machine["versions"], "python": machine["python"], "platform": system},
        subjects={subject.name: subject.meaning for subject in subjects},
        steps=subjects[0].request.steps or 0,
        options={**options, "ways": list(ways)},
    )


def go_on(
    made: Benchmark,
    device: Device,
    subjects: Sequence[Subject],
    *,
    minutes: float,
    keep: Keep,
    progress: Progress,
) -> Benchmark:
    """Measure what is missing, until the time is over.

    Args:
        made: from `begin`, or as an earlier start left it.
        minutes: of this start; a row that has begun is finished.
    """
    started, before = time.monotonic(), made.elapsed_s
    done = {(row.subject, row.way) for row in made.rows}
    benches = {subject.name: _Bench(device, subject, progress) for subject in subjects}
    asked = [(subject, way) for subject in made.subjects for way in made.options["ways"]]
    missing = [pair for pair in asked if pair not in done]
    missing.sort(key=lambda pair: WAYS[pair[1]].compiled)  # slow ones last
    longest = 0.0
    for subject, way in missing:
        passed = time.monotonic() - started
        if passed + longest > 60 * minutes:
            return dataclasses.replace(made, elapsed_s=before + passed)
        total = len(missing) + len(done)
        progress("bench", f"{subject}, {way}", len(made.rows), total)
        row, source = benches[subject].measure(way)
        longest = max(longest, time.monotonic() - started - passed)
        made = dataclasses.replace(
            made,
            rows=(*made.rows, _compare(row, made.rows)),
            memory_source=source or made.memory_source,
            elapsed_s=before + time.monotonic() - started,
        )
        keep(made)
    attention = made.attention or time_attention(device)
    return dataclasses.replace(made, attention=attention, is_complete=True)


def _compare(row: Measurement, others: Sequence[Measurement]) -> Measurement:
    known = [x for x in (*others, row) if x.subject == row.subject and x.way == "fp32"]
    if row.time_s is None or not known or known[0].time_s is None:
        return row
    return dataclasses.replace(row, time_ratio=row.time_s / known[0].time_s)


@dataclass
class _Bench:
    """What one subject's rows share: its plans, predictions, and what fp32 gave."""

    device: Device
    subject: Subject
    progress: Progress
    plans: dict[str, Plan] = field(default_factory=dict)
    fits: dict[tuple[str, str], Fit] = field(default_factory=dict)
    reference: torch.Tensor | None = None
    kernels: dict[str, tuple[str, ...]] | None = None

    def measure(self, name: str) -> tuple[Measurement, str]:
        """One way, and how its memory was read."""
        row = Measurement(self.subject.name, name)
        try:
            with quiet_libraries():
                if self.reference is None and name != "fp32":
                    self.reference = self._find_reference()
                return self._measure(row, WAYS[name])
        except Exception as error:  # whatever a device refuses; the other ways go on
            what = "It did not fit: " if is_out_of_memory(error) else ""
            note = what + hide_paths(f"{type(error).__name__}: {take_one_line(error, 300)}")
        free_memory()
        return dataclasses.replace(row, note=note), ""

    def _measure(self, row: Measurement, way: Way) -> tuple[Measurement, str]:
        with self._running(way) as (pipe, predicted):
            run = partial(_run, pipe, complete_request(pipe, self.subject.request))
            latents, non_finite = _read(pipe, run)
            if self.reference is None:
                self.reference = latents
            counter = Counter()
            with counter.counting():
                run()
            peak, source = measure_peak(self.device, pipe, run)
            seconds = time_runs(self.device, run, REPEATS)
        error = relative_l2(latents, self.reference)
        return dataclasses.replace(
            row,
            time_s=seconds,
            peak_bytes=peak,
            predicted_bytes=predicted,
            rel_err=error if math.isfinite(error) else None,
            non_finite=non_finite,
            host_reads=counter.reads,
            operations=counter.operations,
        ), source

    def _running(self, way: Way) -> Any:
        predict = partial(self._predict, way)
        return running(self.subject.build, way, self.device, self._find_plan, predict)

    def _find_reference(self) -> torch.Tensor:  # by itself: its pipeline is let go when it returns
        with self._running(WAYS["fp32"]) as (pipe, _):
            return _read(pipe, partial(_run, pipe, complete_request(pipe, self.subject.request)))[0]

    def _find_plan(self, residual: str) -> Plan:
        if residual not in self.plans:
            pipe = self.subject.build()
            request = complete_request(pipe, self.subject.request)
            self.plans[residual] = measure_plan(
                pipe,
                prompts=[request.prompt] if request.prompt else [],
                residual=residual,
                request=request,
                progress=self.progress,
            )
            free_memory()
        return self.plans[residual]

    def _predict(self, way: Way, pipe: Any, strategy: Strategy) -> tuple[Prediction, Any]:
        key = (way.precision, way.residual)
        if key not in self.fits:
            arguments = build_arguments(pipe, complete_request(pipe, self.subject.request))
            self.fits[key] = predict_run(
                pipe,
                arguments,
                steps=find_steps(pipe, arguments),
                fused=self._has_fused_attention(way.precision),
                device=self.device.torch_name,
            )
        fit = self.fits[key]
        return next(x for x in fit.predictions if x.strategy == strategy), fit.strays

    def _has_fused_attention(self, name: str) -> bool:
        """Whether a kernel that keeps no scores takes a format, which is tried where no table has it."""
        if self.kernels is None:
            self.kernels = try_attention(self.device)
        return any(name in taken for kernel, taken in self.kernels.items() if kernel != "math")


def _run(pipe: Any, request: Request) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe(**build_arguments(pipe, request))


def _read(pipe: Any, run: Callable[[], Any]) -> tuple[torch.Tensor, int]:
    """The latents after the last step, and how many values of them and of the frames are not finite."""
    kept: list[torch.Tensor] = []

    def keep(result: Any) -> None:
        kept[:] = [next(iterate_tensors(result)).detach()]

    steps = StepCounter(pipe, Rank.RECORD, on_step=keep)
    steps.follow()
    try:
        result = read_result(pipe, {}, run())
        made = [torch.as_tensor(x) for x in (result.frames, result.samples) if x is not None]
    finally:
        steps.stop()
    latents = kept[0].cpu()
    return latents, sum(sum(count_non_finite(x)) for x in (latents, *made))


_PATHS = re.compile(r"(?<![\w.])(~|[A-Za-z]:)?[/\\][^\s'\"(),:;]*")


def hide_paths(text: str) -> str:
    """A text without paths, which hold people's names."""
    return _PATHS.sub("PATH", text)
