"""Check a pipeline's result for NaN and Inf that no component made, and for faulty frames and sound.

A fault of the scheduler's last step, or of the pipeline's own arithmetic after it, reaches no component. It
stops the run with an error that names its origin: the pipeline's arguments, its scheduler, or its own
arithmetic (guidance, scaling of latents).

**Catches** NaN and Inf in a result's tensors and arrays, also latents; in the arguments of the pipeline's
call; in the scheduler's last step and its inputs.

**Does not catch** the faulty line of the pipeline's code. In pictures that were rounded to bytes, NaN is
black, which is found by the check of frames.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stopdown.component_calls.step_counter import StepCounter
from stopdown.errors import NonFiniteError
from stopdown.frames.frame_faults import find_frame_findings
from stopdown.frames.media import to_uint8
from stopdown.frames.sound import Sound
from stopdown.frames.sound_faults import find_sound_findings
from stopdown.numerics import bound_values, iterate_leaves, iterate_tensors
from stopdown.pipelines.results import iterate_sounds
from stopdown.records import Finding, Repair
from stopdown.runtime.fault_texts import describe_counts, word_counts
from stopdown.runtime.session import Session
from stopdown.scaling import ComponentCall

_WHOLE_VIDEO = 4
"""Dimensions of a video's array: frames, rows, columns, channels."""


def count_bad(output: Any) -> tuple[int, int, int]:
    """Return the numbers of NaN, of Inf and of all values in a result; zeros if all are finite.

    Cost: a pass over it; one host read for tensors on a device.
    """
    leaves = list(iterate_leaves(output, (torch.Tensor, np.ndarray)))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    arrays = [x for x in leaves if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    bounds = bound_values(tensors)
    is_finite = bounds is None or bool(torch.isfinite(bounds).all())
    if is_finite and all(np.isfinite(x).all() for x in arrays):
        return 0, 0, 0
    arrays += [x.detach().float().cpu().numpy() for x in tensors]
    nan = sum(int(np.isnan(x).sum()) for x in arrays)
    infinite = sum(int(np.isinf(x).sum()) for x in arrays)
    return nan, infinite, sum(x.size for x in arrays)


def collect_videos(output: Any) -> list[np.ndarray[Any, Any]]:
    """Collect the videos and pictures in a pipeline's output, each `[T, H, W, 3]` uint8, or
    `[T, H, W, 4]` for a picture in layers.

    Latents and other values are left out.
    """
    found = getattr(output, "frames", None)
    if found is None:
        found = getattr(output, "images", None)
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if found is None or not hasattr(found, "__len__") or len(found) == 0:
        return []
    return list(_iterate_videos(found))


def _iterate_videos(found: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(found, list) and isinstance(found[0], list):
        yield from (video for clip in found if (video := _stack(clip)) is not None)
        return
    whole = _stack(found)
    if whole is None:
        return
    if whole.ndim > _WHOLE_VIDEO:
        yield from whole
    else:
        yield from (whole[i : i + 1] for i in range(len(whole)))


def _stack(pictures: Any) -> np.ndarray[Any, Any] | None:
    """Stack pictures into one uint8 array with the channels last; return None for anything else."""
    try:
        array = np.stack([_to_array(picture) for picture in pictures])
    except (TypeError, ValueError, RuntimeError):
        return None
    is_tensor = any(isinstance(x, torch.Tensor) for x in pictures)  # four channels may be latents
    if array.ndim < _WHOLE_VIDEO or array.shape[-1] not in ((3,) if is_tensor else (3, 4)):
        return None
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        return None
    flat = array.reshape(-1, *array.shape[-3:])
    return to_uint8(np.nan_to_num(flat, nan=0, posinf=0, neginf=0)).reshape(array.shape)


def _to_array(picture: Any) -> np.ndarray[Any, Any]:
    """Convert a picture to an array with the channels last; Diffusers' tensors have channels before the
    height.
    """
    if not isinstance(picture, torch.Tensor):
        is_grey = getattr(picture, "mode", None) in ("L", "P", "1")  # of PIL
        return np.asarray(picture.convert("RGB") if is_grey else picture)
    array = picture.detach().float().cpu().numpy()
    has_colours = array.ndim > 2 and array.shape[-3] == 3
    return np.moveaxis(array, -3, -1) if has_colours else array


@dataclass(frozen=True)
class FaultOrigin:
    """Where NaN or Inf in a pipeline's result began, if not inside a component.

    Attributes:
        source: `scheduler`, `pipeline`, or a component whose fault was reported before.
        what: the origin in a sentence.
        remedy: what to do; "" for a reported fault.
    """

    source: str
    what: str
    remedy: str


def find_fault_origin(
    steps: StepCounter,
    repairs: Iterable[Repair],
    given: Mapping[str, Any],
    unwatched: Iterable[str],
) -> FaultOrigin:
    """Find where NaN or Inf in a pipeline's result began: its arguments, its scheduler or its own
    arithmetic.

    Args:
        steps: has the scheduler's last result and inputs.
        repairs: of this run.
        given: the pipeline's arguments by name.
        unwatched: a sentence for each component that could not be checked.

    Cost: two host reads for each checked tensor.
    """
    for repair in repairs:
        if repair.action == "none":
            source = repair.module_path if repair.kind == "input" else repair.component
            return FaultOrigin(
                source, f"It came from {_PLACES.get(source, f'`{source}`')}, as reported.", ""
            )
    for name, value in given.items():
        if spoilt := describe_counts(iterate_tensors(value)):
            what = f"The pipeline was called with {spoilt} in `{name}`."
            return FaultOrigin("pipeline", what, f"Give finite values for {name}.")
    made = describe_counts(itertools.islice(iterate_tensors(steps.last_result), 1))
    taken = describe_counts(steps.last_inputs)
    if made and taken:
        what = f"The pipeline's own arithmetic passed {taken} to its scheduler{steps.name_last_step()}."
        return FaultOrigin("pipeline", f"{what} {_say_finite(unwatched)}", _WIDER)
    if made:
        name = type(steps.pipe.scheduler).__name__
        remedy = (
            "Use another scheduler, or rebuild this one: pipe.scheduler = "
            f"{name}.from_config(pipe.scheduler.config)."
        )
        what = (
            f"The scheduler ({name}) returned {made}{steps.name_last_step()}, from finite inputs."
        )
        return FaultOrigin("scheduler", what, remedy)
    what = f"It came from the pipeline's own code. {_say_finite(unwatched)}"
    return FaultOrigin("pipeline", what, _WIDER)


_PLACES = {"scheduler": "the scheduler", "pipeline": "outside of the components"}

_WIDER = "Use a lower guidance scale, or load the pipeline in bf16 or fp32."


def _say_finite(unwatched: Iterable[str]) -> str:
    said = " ".join(unwatched)
    if not said:
        return "Every component returned finite values."
    return f"Every component that was watched returned finite values. {said}"


class RunCheck:
    """Checks each result that a guarded pipeline returns, and reports faults."""

    def __init__(self, session: Session) -> None:
        self.findings: list[Finding] = []
        self.own_s = 0.0
        self._session = session
        self._given: dict[
            int, Mapping[str, Any]
        ] = {}  # by thread, what the pipeline was called with

    def run(self, call: ComponentCall) -> Any:
        """Make one call of the pipeline, and check its result for NaN, Inf and faulty frames.

        Raises:
            NonFiniteError: if it has NaN or Inf that no component made, unless faults only warn.

        Cost: a pass over the result; one host read if it contains tensors.
        """
        thread = threading.get_ident()
        if thread in self._given:  # a class that calls its parent's `__call__`
            return call.proceed()
        names = list(inspect.signature(type(self._session.pipe).__call__).parameters)[1:]
        self._given[thread] = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        try:
            self._begin()
            output = call.proceed()
            begun = time.perf_counter()
            self._check_result(output)
            self.own_s += time.perf_counter() - begun
            return output
        finally:
            del self._given[thread]

    def _begin(self) -> None:
        self._session.follow()
        self._session.steps.follow()
        self._session.steps.forget()
        self._session.log.begin_run()

    def _check_result(self, output: Any) -> None:
        nan, infinite, total = count_bad(output)
        self._session.host_reads += any(x.is_floating_point() for x in iterate_tensors(output))
        is_reported = any(repair.action == "none" for repair in self._session.log.of_this_run)
        if nan + infinite == 0:
            self.check_frames(output)
        elif not is_reported:
            counts = word_counts(nan, infinite, total)
            self._report_result(f"The pipeline's result holds {counts}.")

    def _report_result(self, what: str) -> None:
        """Record NaN or Inf in the pipeline's result; raise `NonFiniteError` unless faults only warn.

        Args:
            what: what was found, in a sentence.
        """
        origin = self.find_origin()
        repair = Repair(
            component="pipeline",
            module_path=origin.source,
            kind="input",
            step=None,
            evidence=f"{origin.what} {what}",
            action="none",
            reason="No component caused it, so there is nothing to repair.",
        )
        self._session.log.keep(repair)
        options = self._session.options
        if not (options.on_fault == "warn" or options.hands_back):
            raise NonFiniteError(origin.what, expected=what, remedy=origin.remedy)

    def check_frames(self, output: Any) -> None:
        """Report black, grey, frozen and noisy pictures, and faulty sound.

        Args:
            output: of a pipeline; or a tuple of pictures `[B, H, W, 3]` in 0 to 1.

        Cost: a pass over the pictures.
        """
        is_latent = self._list_given().get("output_type") == "latent"
        if is_latent or not self._session.options.frames:
            return
        found = [
            finding
            for number, frames in enumerate(collect_videos(output), 1)
            for finding in find_frame_findings(frames, f"result {number}")
        ]
        for number, samples in enumerate(iterate_sounds(output), 1):
            found += find_sound_findings(Sound(np.atleast_2d(samples), 1), f"result {number}")
        for finding in found:
            self.findings.append(finding)
            text = f"{finding.module_path}: {finding.evidence} {finding.remedy}"
            self._session.log.report_once("pipeline", f"{finding.kind} {finding.module_path}", text)

    def find_origin(self) -> FaultOrigin:
        unseen = [
            f"No tensor could be looked at in what `{call.name}` gave."
            for call in self._session.calls.values()
            if call.unseen
        ]
        moved = [
            f"`{callee.name}` was compiled or replaced under the guard and not watched."
            for callee in self._session.list_moved()
        ]
        session = self._session
        unwatched = [*unseen, *moved]
        return find_fault_origin(
            session.steps, session.log.of_this_run, self._list_given(), unwatched
        )

    def _list_given(self) -> Mapping[str, Any]:
        """Return the arguments of this thread's pipeline call by name; empty outside of a call."""
        return self._given.get(threading.get_ident(), {})
