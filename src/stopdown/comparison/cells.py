"""Cells of a comparison: run one prompt in one precision, store the outcome, and compress its frames.

For the report, all frames of a clip are drawn into one picture (a sheet) with a limit in bytes. It is
lossless if that fits. Otherwise the quality is reduced, then the size down to a half, then the number of
frames, and at last the size again.
"""

from __future__ import annotations

import base64
import io
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save

from stopdown.comparison.measures import Frames, clean_frames, find_headroom, read_values
from stopdown.comparison.probes import Probe, Trace
from stopdown.comparison.records import Cell, Sheet
from stopdown.comparison.subjects import OpenSubject, Run
from stopdown.devices.device_choice import Device
from stopdown.devices.device_memory import PeakMemory, peak_memory
from stopdown.errors import InputError, describe_error, ignoring_warnings, take_first_line
from stopdown.files.outputs import written_beside
from stopdown.frames.frame_faults import find_frame_findings
from stopdown.frames.media import to_uint8
from stopdown.interception.randomness import same_noise, seeded_generators
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.results import find_output_kind, read_frames
from stopdown.runtime.guard import GuardOptions, Observer
from stopdown.runtime.runs import run_guarded
from stopdown.sources.library_messages import quiet_libraries


@dataclass(frozen=True)
class Outcome:
    """Output and trace of one prompt in one precision, before they are measured against the reference.

    Attributes:
        cell: the record of the run.
        frames: `[T, H, W, 3]` fp32 in [0, 1]; for sound and embeddings, and for a program that returns no
            pictures, its values, `[N]` fp32; None if the run failed.
        trace: what probes recorded during the run.
        peak_source: how peak memory was measured.
    """

    cell: Cell
    frames: Frames | None
    trace: Trace
    peak_source: str = ""


def run_cell(
    opened: OpenSubject,
    name: str,
    request: Request,
    device: Device,
    observer: Observer | None = None,
    *,
    names_culprit: bool = True,
    run: Run | None = None,
) -> Outcome:
    """Run one prompt in one precision; an exception of the run is recorded in the cell.

    Nothing is repaired: NaN and Inf are reported, and the run continues with them.

    Args:
        opened: the pipeline in this precision.
        name: name of the precision.
        names_culprit: run a call that returns NaN or Inf once more to find where they begin.
        run: runs a program that is not a pipeline; None for a pipeline.
    """
    begun = time.perf_counter()
    settings = GuardOptions(
        on_fault="warn",
        observer=observer,
        announce=lambda text: None,
        names_culprit=names_culprit,
    )
    try:
        return _run(opened, name, request, device, settings, run)
    except Exception as error:  # whatever a model's code does: the rest of the matrix goes on
        return fail_cell(name, describe_error(error), time.perf_counter() - begun)


def _run(
    opened: OpenSubject,
    name: str,
    request: Request,
    device: Device,
    settings: GuardOptions,
    run: Run | None,
) -> Outcome:
    start, watched = _prepare(opened, request, run), list[tuple[Probe, PeakMemory]]()

    def watch() -> Any:
        with (  # around the guard's own layers, which were put on before
            Probe(opened.loaded.pipe, clamps=name == "clamp") as probe,
            quiet_libraries(),
            torch.autocast(device.type, torch.float16) if name == "autocast" else nullcontext(),
            peak_memory(device) as memory,
            ignoring_warnings(RuntimeWarning),  # NaN cast to a pixel: counted below
        ):
            watched.append((probe, memory))
            return start()

    ran = run_guarded(opened.loaded, watch, settings)
    ((probe, memory),) = watched
    has_frames = run is None and find_output_kind(type(opened.loaded.pipe)) in ("picture", "video")
    if has_frames:
        frames, broken = clean_frames(read_frames(ran.output))
    else:
        frames, broken = read_values(ran.output)
    trace = probe.trace
    headroom, tightest = find_headroom(trace)
    cell = Cell(
        precision=name,
        stages_s={  # without the seconds of the probes
            stage: max(0.0, seconds - trace.probe_s.get(stage, 0.0))
            for stage, seconds in ran.stages_s.items()
        },
        elapsed_s=ran.elapsed_s,
        peak_bytes=memory.peak_bytes,
        non_finite=trace.non_finite + broken,
        saturated=trace.saturated,
        clamped=trace.clamped,
        headroom_bits=headroom,
        tightest=tightest,
        findings=find_frame_findings(to_uint8(frames), "frames") if frames.ndim > 1 else (),
        faults=ran.seen.repairs,
    )
    return Outcome(cell, frames, trace, memory.method)


def _prepare(opened: OpenSubject, request: Request, run: Run | None) -> Run:
    """Return a function that runs the pipeline, or else `run`, with reproducible noise from the seed."""
    pipe = opened.loaded.pipe
    if run is None:
        pipe.set_progress_bar_config(disable=True)

    def start() -> Any:
        with same_noise(), seeded_generators(request.seed):
            return pipe(**build_arguments(pipe, request)) if run is None else run()

    return start


def write_outcome(outcome: Outcome, path: Path) -> None:
    """Write the result of one prompt in one precision to a file atomically."""
    with written_beside(path) as part:
        part.write_bytes(msgspec.msgpack.encode(outcome, enc_hook=_encode))


def read_outcome(path: Path) -> Outcome:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Outcome, dec_hook=_decode)
    except Exception as error:  # whatever a changed file makes its parts raise
        raise InputError(
            f"The finished cell {path} can't be read: {take_first_line(error)}.",
            expected="A cell is used as compare wrote it.",
            remedy=f"Remove it, and the same command makes it again: rm {path}",
        ) from error


def _encode(value: Any) -> bytes:
    """Encode a tensor or array as the bytes of a safetensors file."""
    return save({"": torch.as_tensor(value).contiguous()})


def _decode(kind: type, content: bytes) -> Any:
    found = load(content)[""]
    return found if kind is torch.Tensor else found.numpy()


def fail_cell(name: str, error: str, elapsed_s: float = 0.0) -> Outcome:
    return Outcome(Cell(name, error=error, elapsed_s=elapsed_s), None, Trace())


WHOLE_BYTES = 20_000_000
"""Bytes for all pictures of a report, before base64 makes them a third larger; 30 MB with everything."""

_LONGEST_SIDE = 16383
"""Largest side of a WebP picture, in pixels."""

_GOOD = ((1.0, 0), (1.0, 90), (1.0, 75), (0.75, 75), (0.5, 75), (0.5, 50))
"""Pairs of scale and quality to try, best first; quality 0 means lossless."""

_POOR = ((0.35, 50), (0.25, 40), (0.15, 40), (0.08, 40), (0.04, 40))

_LEAST = {0: 0.4, 90: 0.06, 75: 0.03, 50: 0.02, 40: 0.0}
"""Bytes per pixel, by quality, that a photograph needs at least; with fewer, the quality isn't tried."""


def share_bytes(cells: int) -> int:
    """Return the bytes for the frames of one run in a report of 30 MB with this many runs."""
    return max(4_000, WHOLE_BYTES * 3 // 4 // max(1, cells))


def make_sheet(frames: Frames, most_bytes: int) -> Sheet:
    """Draw the frames of a clip into one compressed picture.

    Args:
        frames: `[T, H, W, 3]` uint8, or `[T, H, W]` for grey.
        most_bytes: limit for the file; the smallest trial is returned if none fits.
    """
    last: Sheet | None = None
    thinned = [every for every in (1, 2, 4, 8) if every == 1 or len(frames) >= 4 * every]
    trials = [(every, *trial) for every in thinned for trial in _GOOD]
    trials += [(thinned[-1], *trial) for trial in _POOR]
    for every, scale, quality in trials:
        pixels = frames[::every].size / frames[0, 0, 0].size * scale**2
        if most_bytes < _LEAST[quality] * pixels:
            continue
        last = _draw(frames[::every], scale, quality, every) or last
        if last is not None and len(last.data) * 3 // 4 <= most_bytes:
            return last
    if last is None:
        raise ValueError(f"frames of {frames.shape[1:3]} pixels fit no sheet")
    return last


def _draw(frames: Frames, scale: float, quality: int, every: int) -> Sheet | None:
    from PIL import Image

    height, width = (max(1, round(size * scale)) for size in frames.shape[1:3])
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    if max(columns * width, rows * height) > _LONGEST_SIDE:
        return None
    mode = "RGB" if frames.ndim == 4 else "L"
    sheet = Image.new(mode, (columns * width, rows * height))
    for index, frame in enumerate(frames):
        picture = Image.fromarray(frame)
        if scale != 1.0:
            picture = picture.resize((width, height), Image.Resampling.LANCZOS)
        sheet.paste(picture, (index % columns * width, index // columns * height))
    held = io.BytesIO()
    sheet.save(held, "WEBP", lossless=quality == 0, quality=quality or 80, method=4)
    data = base64.b64encode(held.getvalue()).decode("ascii")
    return Sheet(width, height, len(frames), columns, every, "image/webp", data)
