"""`Runner`: load a checkpoint by a plan, place its weights, run it under the guard, write file and record.

`generate` makes one run or several with the same loaded pipeline, `batch` many, and `compare` uses parts of
it. An error in a model's own code becomes one message with the line that raised it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stopdown.devices.device_choice import Device
from stopdown.devices.device_memory import PeakMemory, describing_out_of_memory, peak_memory
from stopdown.devices.environment import describe_machine
from stopdown.errors import InputError, StopdownError, warn_user
from stopdown.files.outputs import find_record_path, written_beside
from stopdown.frames.frame_faults import find_frame_findings
from stopdown.frames.media import choose_format, to_uint8, write_media
from stopdown.frames.sound import TRACKS, Sound, to_sound
from stopdown.frames.sound_faults import find_sound_findings
from stopdown.interception.randomness import seeded_generators
from stopdown.pipelines.requests import (
    MEDIA,
    Request,
    build_arguments,
    describe_unused_negative,
    explain_stop,
    list_own_sides,
    say_what_to_change,
    was_raised_by_model,
)
from stopdown.pipelines.results import count_frames, read_result
from stopdown.plans.applier import AppliedPlan
from stopdown.plans.planned_loader import load_plan
from stopdown.records import (
    Finding,
    GuardRecord,
    Plan,
    RunRecord,
    describe_no_run,
    to_json,
)
from stopdown.runtime.guard import Announce, Guard, GuardOptions
from stopdown.runtime.memory_limits import fit_run
from stopdown.sources.hub import Progress
from stopdown.sources.source import Source
from stopdown.sources.sources import fingerprint


@dataclass(frozen=True)
class RunResult:
    """The result of a program's run under a guard.

    Attributes:
        output: of the program; for a pipeline its frames, `[T, H, W, 3]` uint8, or None if it generates
            only sound.
        seen: the guard's record.
        updated: the plan updated with the repairs; None without a plan or repairs.
        elapsed_s: seconds of the run.
        sound: that a pipeline generated; None without any.
        fps: frame rate for which a pipeline made its frames; None if it states none.
    """

    output: Any
    seen: GuardRecord
    updated: Plan | None
    elapsed_s: float
    sound: Sound | None = None
    fps: float | None = None

    @property
    def stages_s(self) -> dict[str, float]:
        """Seconds in the components by stage: encode, denoise, decode."""
        stages_s = dict[str, float]()
        for call in self.seen.calls:
            stages_s[call.stage] = stages_s.get(call.stage, 0.0) + call.elapsed_s
        return stages_s


DEFAULT_FPS = 8.0
"""Frame rate of a video whose pipeline states none."""


@dataclass(frozen=True)
class RunOutput:
    """Where and how a run's frames and sound are to be written.

    Attributes:
        output: path of the file; the caller writes the record.
        fps: frame rate of a video; None for that of the pipeline, or `DEFAULT_FPS` if it states none.
        started: start of the run, by `time.perf_counter`.
        fields: further fields of the record, among them `request`.
        numbered: replace nothing; append the first free number to the name instead.
    """

    output: str
    fps: float | None
    started: float
    fields: Mapping[str, Any]
    numbered: bool = False


class Runner:
    """Runs requests on a checkpoint, one after the other.

    The pipeline stays loaded until a run has another plan, and its memory strategy stays until a run has
    other sizes.

    Args:
        source: with the pipeline class for the requests.

    Attributes:
        loaded: the pipeline with its plan; None until the first run.
    """

    def __init__(self, source: Source, device: Device) -> None:
        self.source, self.device = source, device
        self.loaded: AppliedPlan | None = None
        self._seal: str | None = None
        self._sizes = ""
        self._misfits: dict[str, StopdownError] = {}
        self._placed = contextlib.ExitStack()

    def make(
        self,
        plan: Plan,
        request: Request,
        wanted: RunOutput,
        settings: GuardOptions,
        *,
        progress: Progress | None = None,
    ) -> tuple[RunRecord, RunResult]:
        """Load the model if needed, run a request under the guard, and write its file.

        Args:
            settings: of the guard; those that depend on the loaded pipeline are set here.

        Returns:
            The run's record, which isn't written, and its result.
        """
        stages = {"prepare": time.perf_counter() - wanted.started}
        announce = settings.announce or warn_user
        try:
            with peak_memory(self.device) as peak:
                self.load(plan, stages, progress)
                loaded = self._place(request, stages, announce)
                made = make_frames(loaded, request, output=wanted.output, settings=settings)
        except BaseException:
            self.release()
            raise
        stages |= made.stages_s
        if made.seen.repairs:
            stages["repair"] = sum(x.elapsed_s for x in made.seen.repairs)
        named = sum(made.stages_s.values()) + stages.get("repair", 0.0)
        stages["other"] = max(0.0, made.elapsed_s - named)
        begun, numbered = time.perf_counter(), wanted.numbered
        written, findings = write_result(wanted, made, announce)
        stages["write"] = time.perf_counter() - begun
        offloader = loaded.offloader
        record = _describe_run(
            self.source,
            loaded,
            self.device,
            made,
            peak,
            stages_s=stages,
            findings=findings,
            output=str(written) if numbered else wanted.output,
            sound=made.sound.describe() if made.sound is not None else "",
            strategy=offloader.taken.strategy.name if offloader else "",
            steps_down=tuple(offloader.steps_down) if offloader else (),
            **wanted.fields,
            elapsed_s=time.perf_counter() - wanted.started,
        )
        if record.steps_down:  # the next run does not depend on what happened to this one
            self.release()
        return record, made

    def load(
        self, plan: Plan, stages: dict[str, float] | None = None, progress: Progress | None = None
    ) -> None:
        """Load the pipeline by a plan, unless that is loaded already.

        Args:
            stages: receives the seconds that it took, under `load`.
        """
        seal = plan.seal or to_json(plan)
        if self.loaded is not None and self._seal == seal:
            return
        self.release()
        self.loaded, begun = None, time.perf_counter()  # old weights go before new ones come
        self.loaded = load_plan(self.source, plan, self.device, progress=progress)
        self._seal = seal
        if stages is not None:
            stages["load"] = time.perf_counter() - begun

    def _place(self, request: Request, stages: dict[str, float], announce: Announce) -> AppliedPlan:
        """Choose and enter the memory strategy for a request, unless the last run had the same sizes.

        Args:
            stages: receives the seconds that it took, under `place`.
        """
        loaded = self.loaded
        assert loaded is not None
        asked = {x.name: getattr(request, x.name) for x in dataclasses.fields(request)}
        media = [getattr(asked.pop(name), "shape", None) for name in MEDIA]
        for name in ("prompt", "negative", "seed", "arguments"):
            del asked[name]
        sizes = f"{asked} {media}"
        if self._sizes == sizes:
            return loaded
        self.release()
        if sizes in self._misfits:
            raise self._misfits[sizes]
        begun = time.perf_counter()
        try:
            loaded = fit_run(loaded, request, self.device, announce)
        except StopdownError as error:
            self._misfits[sizes] = error
            raise
        if loaded.offloader is not None:
            with describing_out_of_memory():
                self._placed.enter_context(loaded.offloader)
        stages["place"] = time.perf_counter() - begun
        self.loaded, self._sizes = loaded, sizes
        return loaded

    def release(self) -> None:
        """Take the memory strategy off the pipeline, so that its memory is free; the next run chooses
        one again.
        """
        self._placed.close()
        self._sizes = ""
        if self.loaded is not None:
            self.loaded = dataclasses.replace(self.loaded, offloader=None)


def make_frames(
    loaded: AppliedPlan, request: Request, *, output: str, settings: GuardOptions
) -> RunResult:
    """Call a pipeline once under a guard, and return its frames and sound.

    Args:
        output: path for the frames; one whose format can't store them is refused before the call.
    """
    arguments = build_arguments(loaded.pipe, request)
    sides = list_own_sides(loaded.pipe, request)
    if sides and settings.announce is not None:
        settings.announce(
            f"The result is {sides['width']}x{sides['height']} pixels, the size in the model's config. For "
            "another size, set width and height."
        )
    unused = describe_unused_negative(type(loaded.pipe), arguments)
    if unused and settings.announce is not None:
        settings.announce(unused)
    choose_format(output, count_frames(loaded.pipe, arguments))
    loaded.pipe.set_progress_bar_config(disable=True)
    made = run_guarded(loaded, partial(_call, loaded, arguments, request.seed), settings)
    result = read_result(loaded.pipe, arguments, made.output)
    return dataclasses.replace(
        made,
        output=to_uint8(result.frames) if result.frames is not None else None,
        sound=to_sound(result.samples, result.rate) if result.samples is not None else None,
        fps=result.fps,
    )


def run_guarded(loaded: AppliedPlan, start: Callable[[], Any], settings: GuardOptions) -> RunResult:
    """Run a program once under a guard, and remove the guard.

    Args:
        start: runs the program and returns its output.
    """
    settings = dataclasses.replace(settings, decisions=loaded.decisions, frames=False)
    guarding = Guard(loaded.pipe, settings).put_on()
    begun = time.perf_counter()
    with guarding, torch.no_grad():
        result = start()
        updated = guarding.updated_plan()
    return RunResult(result, guarding.record, updated, time.perf_counter() - begun)


def _call(loaded: AppliedPlan, arguments: dict[str, Any], seed: int) -> Any:
    """Call a pipeline; turn its errors into `StopdownError`s with one message.

    PyTorch's own generators are seeded as well and restored afterwards, because some pipelines draw noise
    without the generator in their arguments.
    """
    pipe = loaded.pipe
    try:
        with describing_out_of_memory(), seeded_generators(seed):
            return pipe(**arguments)
    except StopdownError:
        raise
    except Exception as error:  # whatever a pipeline's or a model's own code raises
        if isinstance(error, (ValueError, TypeError)) and not was_raised_by_model(error):
            raise InputError(
                f"{type(pipe).__name__} refused the request: {str(error).strip()}",
                remedy=say_what_to_change(type(pipe), str(error)),
            ) from error
        precisions = (x.precision for x in loaded.decisions)
        raise explain_stop(type(pipe), arguments, error, precisions=precisions) from error


def write_result(
    wanted: RunOutput, made: RunResult, announce: Announce
) -> tuple[Path, tuple[Finding, ...]]:
    """Write a run's frames and sound to a file; return its path, and the faults found in them.

    The record of a replaced file is removed. If the file's format can't store the sound, or another frame
    rate is used, that is announced.
    """
    frames, sound = made.output, made.sound
    fps = (wanted.fps if sound is None else None) or made.fps or DEFAULT_FPS
    kind = Path(wanted.output).suffix.lower()
    if frames is not None and sound is not None:
        if kind and kind not in TRACKS:
            announce(f"A {kind} file holds no sound: use {TRACKS[0]} to keep it.")
        elif wanted.fps not in (None, fps):
            announce(f"The video has {fps:g} frames per second, which its sound was made for.")
    written = write_media(wanted.output, frames, fps, sound=sound, numbered=wanted.numbered)
    record = find_record_path(written)
    if record.exists() and not describe_no_run(record):
        record.unlink()
    findings = find_frame_findings(frames, "output") if frames is not None else ()
    return written, findings + (find_sound_findings(sound, "output") if sound is not None else ())


def _describe_run(
    source: Source,
    loaded: AppliedPlan,
    device: Device,
    made: RunResult,
    peak: PeakMemory,
    **others: Any,
) -> RunRecord:
    seen = {name: x for name, x in vars(made.seen).items() if name not in ("kind", "schema")}
    return RunRecord(
        source=source.name,
        fingerprint=fingerprint(source),
        device=str(device),
        device_reason=device.reason,
        machine=describe_machine(),
        decisions=loaded.decisions,
        peak_bytes=peak.peak_bytes,
        peak_source=peak.method,
        memory=loaded.plan.memory,
        **{**seen, **others},
    )


def write_run_record(record: RunRecord, output: str | Path) -> None:
    """Write the record of a run atomically to a file beside its output."""
    with written_beside(find_record_path(output), replaces=describe_no_run) as part:
        part.write_text(to_json(record), encoding="utf-8")
