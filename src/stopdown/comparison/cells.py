"""One cell of a comparison: one prompt run in one precision, and kept until its row is measured."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from stopdown.comparison.measures import Frames, clean_frames, find_headroom, read_values
from stopdown.comparison.probes import Probe, Trace
from stopdown.comparison.records import Cell
from stopdown.comparison.subjects import Opened, Run
from stopdown.device_memory import peak_memory
from stopdown.environment import Device
from stopdown.errors import InputError, describe_error, take_first_line
from stopdown.frame_faults import find_frame_findings
from stopdown.media import to_uint8
from stopdown.outputs import written_beside
from stopdown.pipelines.folders import told_as_oserror
from stopdown.pipelines.library_messages import quiet_libraries
from stopdown.pipelines.requests import Request, build_arguments, read_frames
from stopdown.records import CallSummary, convert_record
from stopdown.runtime.guard import Guard, GuardOptions, Observer


@dataclass(frozen=True)
class Outcome:
    """A cell before it is measured.

    Attributes:
        cell: what is known without a reference.
        frames: `[T, H, W, 3]` fp32 in [0, 1]; of a program that gives no pictures its values, `[N]` fp32;
            None when it failed.
        trace: what the probes read.
        peak_source: how memory was read.
    """

    cell: Cell
    frames: Frames | None
    trace: Trace
    peak_source: str = ""


def run_cell(
    opened: Opened,
    name: str,
    request: Request,
    device: Device,
    observer: Observer | None = None,
    *,
    names_culprit: bool = True,
    run: Run | None = None,
) -> Outcome:
    """Run one prompt in one precision; an error of the run becomes part of the cell.

    Nothing is repaired: what is not finite is said, and the run goes on with the bad value.

    Args:
        run: what runs a program that is no pipeline.
        names_culprit: run a call that gives NaN or Inf once more to find where they begin.
    """
    begun = time.perf_counter()
    options = GuardOptions(
        on_fault="warn",
        decisions=opened.decisions,
        observer=observer,
        announce=lambda text: None,
        frames=False,
        names_culprit=names_culprit,
    )
    guarding = Guard(opened.pipe, options).put_on()
    try:
        outcome = _run(opened, name, request, device, guarding, run)
        cell = dataclasses.replace(outcome.cell, faults=guarding.repairs)
        return dataclasses.replace(outcome, cell=cell)
    except Exception as error:  # whatever a model's code does: the rest of the matrix goes on
        elapsed_s = time.perf_counter() - begun
        return Outcome(Cell(name, error=describe_error(error), elapsed_s=elapsed_s), None, Trace())


def _run(
    opened: Opened,
    name: str,
    request: Request,
    device: Device,
    guarding: Guard,
    run: Run | None,
) -> Outcome:
    start = _prepare(opened, request, run)
    begun = time.perf_counter()
    with (
        guarding,
        Probe(opened.pipe, clamps=opened.clamps) as probe,
        quiet_libraries(),
        torch.no_grad(),
        opened.arithmetic(),
        peak_memory(device) as memory,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN cast to a pixel: counted below
        result = start()
    elapsed_s = time.perf_counter() - begun
    frames, broken = read_values(result) if run else clean_frames(read_frames(result))
    trace = probe.trace
    headroom, tightest = find_headroom(trace)
    cell = Cell(
        precision=name,
        stages_s=_sum_stages(guarding.record.calls, trace),
        elapsed_s=elapsed_s,
        peak_bytes=memory.peak_bytes,
        non_finite=trace.non_finite + broken,
        saturated=trace.saturated,
        clamped=trace.clamped,
        headroom_bits=headroom,
        tightest=tightest,
        findings=find_frame_findings(to_uint8(frames), "frames") if frames.ndim > 1 else (),
    )
    return Outcome(cell, frames, trace, memory.method)


def _prepare(opened: Opened, request: Request, run: Run | None) -> Run:
    """What runs it: its call with the request's arguments, or a function with the request's seed."""
    if run is None:
        opened.pipe.set_progress_bar_config(disable=True)
        return functools.partial(opened.pipe, **build_arguments(opened.pipe, request))

    def start() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(request.seed)
            return run()

    return start


def _sum_stages(calls: Sequence[CallSummary], trace: Trace) -> dict[str, float]:
    """Seconds in the components by stage, without those of the probes."""
    stages: dict[str, float] = {}
    for call in calls:
        stages[call.stage] = stages.get(call.stage, 0.0) + call.elapsed_s
    return {
        stage: max(0.0, seconds - trace.probe_s.get(stage, 0.0))
        for stage, seconds in stages.items()
    }


def write_outcome(outcome: Outcome, path: Path) -> None:
    """Keep a cell as a file, whole or not at all."""
    tensors: dict[str, torch.Tensor] = {}
    if outcome.frames is not None:
        tensors["frames"] = torch.from_numpy(outcome.frames).contiguous()
    trace = outcome.trace
    tensors |= {f"latents.{i}": x.contiguous() for i, x in enumerate(trace.latents)}
    tensors |= {f"outputs.{i}": x.contiguous() for i, (_, _, x) in enumerate(trace.outputs)}
    tensors |= {f"samples.{i}": x.contiguous() for i, x in enumerate(trace.samples.values())}
    plain = {
        "cell": msgspec.to_builtins(outcome.cell),
        "peak_source": outcome.peak_source,
        "outputs": [[component, step] for component, step, _ in trace.outputs],
        "samples": list(trace.samples),
        "amax": [[*key, repr(value)] for key, value in trace.amax.items()],
        "order": trace.order,
    }
    with written_beside(path) as part, told_as_oserror():
        save_file(tensors, part, metadata={"plain": json.dumps(plain)})


def read_outcome(path: Path) -> Outcome:
    """A cell as it was kept.

    Raises:
        InputError: the file was changed since.
    """
    try:
        return _read_outcome(path)
    except Exception as error:  # whatever a changed file makes its parts raise
        raise InputError(
            f"The finished cell {path} cannot be read: {take_first_line(error)}.",
            expected="A cell is used as compare wrote it.",
            remedy=f"Remove it, and the same command makes it again: rm {path}",
        ) from error


def _read_outcome(path: Path) -> Outcome:
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        plain: dict[str, Any] = json.loads(opened.metadata()["plain"])
    tensors = load_file(path)
    count = sum(name.startswith("latents.") for name in tensors)
    trace = Trace(
        amax={
            (c, step, module_path): float(value) for c, step, module_path, value in plain["amax"]
        },
        samples={tuple(key): tensors[f"samples.{i}"] for i, key in enumerate(plain["samples"])},
        outputs=[
            (c, step, tensors[f"outputs.{i}"]) for i, (c, step) in enumerate(plain["outputs"])
        ],
        latents=[tensors[f"latents.{i}"] for i in range(count)],
        order={name: tuple(paths) for name, paths in plain["order"].items()},
    )
    frames = tensors["frames"].numpy() if "frames" in tensors else None
    return Outcome(convert_record(plain["cell"], Cell), frames, trace, plain["peak_source"])


def fail_cell(name: str, error: str) -> Outcome:
    """A cell whose precision could not be loaded."""
    return Outcome(dataclasses.replace(Cell(name), error=error), None, Trace())
