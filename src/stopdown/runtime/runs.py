"""One request, made by a pipeline that is in memory: frames under the guard, the file, the record.

`generate` makes one of them, `batch` many, with the same loaded pipeline.

**Catches**, besides what the guard catches, arguments that a pipeline refuses and memory that runs out:
each becomes one message.
**Does not catch** errors of a model's own code: they are raised as they are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stopdown.devices.device_memory import PeakMemory, describing_out_of_memory
from stopdown.devices.environment import Device, describe_machine
from stopdown.errors import InputError
from stopdown.files.outputs import find_record_path, written_beside
from stopdown.frames.frame_faults import find_frame_findings
from stopdown.frames.media import choose_format, to_uint8, write_media
from stopdown.pipelines.requests import (
    Request,
    build_arguments,
    find_frames,
    list_own_sides,
    read_frames,
)
from stopdown.plans.planned_loader import Loaded
from stopdown.records import Finding, GuardRecord, Plan, RunRecord, describe_no_run, to_json
from stopdown.runtime.guard import Announce, Guard, GuardOptions, Observer
from stopdown.runtime.journal import CallAnswers
from stopdown.runtime.repair_order import OnFault
from stopdown.sources.sources import Source, fingerprint


@dataclass(frozen=True)
class Made:
    """What one call of a pipeline gave.

    Attributes:
        frames: `[T, H, W, 3]` uint8.
        seen: what the guard saw and did.
        updated: the plan with the repairs in it; None when there is no plan, or was no repair.
        stages_s: seconds by stage: encode, denoise, decode, other.
    """

    frames: np.ndarray[Any, Any]
    seen: GuardRecord
    updated: Plan | None
    stages_s: dict[str, float]


def make_frames(
    loaded: Loaded,
    request: Request,
    *,
    output: str,
    on_fault: OnFault = "repair",
    observer: Observer | None = None,
    announce: Announce | None = None,
    journal: CallAnswers | None = None,
    maxima: bool = False,
) -> Made:
    """Call a pipeline under the guard, which is gone when this returns.

    Args:
        output: path that the frames are for; refused at once when it cannot hold them.
        on_fault, observer, announce, journal, maxima: as for `guard`.
    """
    arguments = build_arguments(loaded.pipe, request)
    sides = list_own_sides(loaded.pipe, request)
    if sides and announce is not None:
        announce(
            f"{sides['height']}x{sides['width']} is made, the size of the model's configs: the default of "
            f"{type(loaded.pipe).__name__} is far from it. Set height and width for another size."
        )
    choose_format(output, find_frames(loaded.pipe, arguments))
    loaded.pipe.set_progress_bar_config(disable=True)
    options = GuardOptions(
        on_fault=on_fault,
        decisions=loaded.decisions,
        observer=observer,
        announce=announce,
        journal=journal,
        maxima=maxima,
        loaded=loaded,
        frames=False,
    )
    guarding = Guard(loaded.pipe, options).put_on()
    begun = time.perf_counter()
    with guarding, torch.no_grad():
        result = _call(loaded.pipe, arguments)
        updated = guarding.updated_plan()
    whole_s = time.perf_counter() - begun
    seen, stages_s = guarding.record, dict[str, float]()
    for call in seen.calls:
        stages_s[call.stage] = stages_s.get(call.stage, 0.0) + call.elapsed_s
    stages_s["other"] = whole_s - sum(stages_s.values())
    return Made(to_uint8(read_frames(result)), seen, updated, stages_s)


def _call(pipe: Any, arguments: dict[str, Any]) -> Any:
    """Run the pipeline; what it refuses about its arguments becomes a message without a traceback."""
    try:
        with describing_out_of_memory():
            return pipe(**arguments)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{type(pipe).__name__} refused the request: {str(error).strip()}",
            remedy="Change the option that it names.",
        ) from error


def write_frames(
    output: str, frames: np.ndarray[Any, Any], fps: float, *, numbered: bool = False
) -> tuple[Path, tuple[Finding, ...]]:
    """Write the file of a run: where it is, and what is wrong with the frames.

    A record of what was replaced is removed.
    """
    written = write_media(output, frames, fps, numbered=numbered)
    record = find_record_path(written)
    if record.exists() and not describe_no_run(record):
        record.unlink()
    return written, find_frame_findings(frames, "output")


def describe_run(
    source: Source, loaded: Loaded, device: Device, made: Made, memory: PeakMemory, **others: Any
) -> RunRecord:
    """The record of a run.

    Args:
        others: further fields of `RunRecord`: request, stages_s, findings, output, elapsed_s…
    """
    return RunRecord(
        source=source.name,
        fingerprint=fingerprint(source),
        pipeline=type(loaded.pipe).__name__,
        device=str(device),
        device_reason=device.reason,
        machine=describe_machine(),
        decisions=loaded.decisions,
        calls=made.seen.calls,
        peak_bytes=memory.peak_bytes,
        peak_source=memory.method,
        own_s=made.seen.own_s,
        repairs=made.seen.repairs,
        unwatched=made.seen.unwatched,
        uncertified=made.seen.uncertified,
        maxima=made.seen.maxima,
        journal=made.seen.journal,
        **others,
    )


def write_record(record: RunRecord, output: str | Path) -> None:
    """Write the record of a run beside its output, whole or not at all."""
    with written_beside(find_record_path(output), replaces=describe_no_run) as part:
        part.write_text(to_json(record), encoding="utf-8")
