"""Guard every pipeline that a script calls, while it runs unedited in this process.

Each call of a pipeline gets a guard of its own, which is gone when the call returns: what the script
does with the pipeline between calls (move it, save it, load adapters) it does with its own weights. What
one call repaired is put on from the start of the next one.

**Catches** NaN and Inf in what components return, which are repaired there; black, grey, frozen and
noisy frames in what a pipeline returns, which are found.
**Does not catch** components that a script calls by itself, without a pipeline; frames that it asked
for as latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stopdown.errors import NonFiniteError, PlanError, StopdownError
from stopdown.media import find_frame_faults, to_uint8
from stopdown.patches import Patches
from stopdown.pipelines.interception import intercept_runs
from stopdown.records import Finding, GuardRecord, Plan
from stopdown.runtime.carrying import Carried
from stopdown.runtime.guarding import Guard, guard
from stopdown.runtime.policy import OnFault

_WHOLE_VIDEO = 4
"""Dimensions of a video's array: frames, rows, columns, channels."""


@dataclass
class ScriptGuard:
    """Stands at the calls of every pipeline that is made while it is on.

    Attributes:
        on_fault: as for `guard`.
        announce: told what a person must hear.
        plan: put on each pipeline that it belongs to; with the repairs of earlier calls in it.
        runs: what each guard saw and did, one for each call of a pipeline.
        findings: what is wrong with what pipelines returned.
        failed: a fault was not repaired.
    """

    on_fault: OnFault
    announce: Callable[[str], None]
    plan: Plan | None = None
    runs: list[GuardRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    failed: bool = False
    _inside: set[int] = field(default_factory=set)
    _carried: Carried = field(default_factory=Carried)
    _without_plan: set[str] = field(default_factory=set)

    def put_on(self, patches: Patches) -> None:
        """Stand there until `patches` is undone."""
        intercept_runs(self._run, patches)

    def _run(
        self, pipe: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if id(pipe) in self._inside:  # a class that calls its parent's `__call__`
            return call(*args, **kwargs)
        guarding = self._guard(pipe)
        if guarding is None:
            return call(*args, **kwargs)
        self._inside.add(id(pipe))
        try:
            with guarding:
                output = call(*args, **kwargs)
                self.plan = guarding.amend_plan() or self.plan
        except NonFiniteError as error:
            self.failed = True
            remedy = self._advise()
            raise NonFiniteError(error.what, expected=error.expected, remedy=remedy) from error
        finally:
            self._inside.discard(id(pipe))
            self.runs.append(guarding.record)
            self.failed |= any(repair.action == "none" for repair in guarding.repairs)
        self._look(type(pipe).__name__, output)
        return output

    def _guard(self, pipe: Any) -> Guard | None:
        try:
            return self._guard_by_plan(pipe) or self._guard_by_what_was_found(pipe)
        except StopdownError:
            raise
        except Exception as error:  # a pipeline unlike all others: it runs as it is
            self.announce(f"{type(pipe).__name__} could not be guarded: {error}")
            return None

    def _guard_by_plan(self, pipe: Any) -> Guard | None:
        """A guard with the plan; None when there is none, or it is another model's."""
        if self.plan is None:
            return None
        try:
            return guard(pipe, self.plan, on_fault=self.on_fault, announce=self.announce)
        except PlanError as error:
            name = type(pipe).__name__
            if name not in self._without_plan:
                self._without_plan.add(name)
                self.announce(f"{name} runs without the plan. {error}")
            return None

    def _guard_by_what_was_found(self, pipe: Any) -> Guard:
        """A guard with the repairs of earlier calls."""
        made = guard(pipe, on_fault=self.on_fault, announce=self.announce, carried=self._carried)
        while self._carried.outdated:
            self.announce(
                f"The weights of {self._carried.outdated.pop()} were changed since an earlier call "
                "repaired it; that repair is left away."
            )
        return made

    def _advise(self) -> str:
        """What to type after a fault that ended a pipeline's call: the script has no `--precision`."""
        wide = "the script can load it in bf16 or fp32: from_pretrained(..., dtype=torch.bfloat16)"
        if self.on_fault == "raise":
            return f"Use stopdown run --on-fault repair, which mends it and goes on; or {wide}."
        return f"Nothing that was tried helped; {wide}."

    def _look(self, name: str, output: Any) -> None:
        for number, frames in enumerate(collect_videos(output)):
            site = f"{name}, call {len(self.runs)}, result {number + 1}"
            self.findings += [
                Finding(f"{fault.kind}-frames", site, fault.evidence, fault.remedy)
                for fault in find_frame_faults(frames)
            ]


def collect_videos(output: Any) -> list[np.ndarray[Any, Any]]:
    """Videos and pictures in what a pipeline returned, each `[T, H, W, 3]` uint8.

    Latents, and whatever else is no picture, are left out.
    """
    found = getattr(output, "frames", None)
    if found is None:
        found = getattr(output, "images", None)
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if found is None or len(found) == 0:
        return []
    if isinstance(found, list) and isinstance(found[0], list):
        return [video for clip in found if (video := _stack(clip)) is not None]
    whole = _stack(found)
    if whole is None:
        return []
    return [*whole] if whole.ndim > _WHOLE_VIDEO else [whole[i : i + 1] for i in range(len(whole))]


def _stack(pictures: Any) -> np.ndarray[Any, Any] | None:
    """Pictures as one array of uint8 with colours last; None for anything else."""
    try:
        array = np.stack([np.asarray(picture) for picture in pictures])
    except (TypeError, ValueError, RuntimeError):
        return None
    if array.ndim < _WHOLE_VIDEO or array.shape[-1] != 3:
        return None
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        return None
    flat = array.reshape(-1, *array.shape[-3:])
    return to_uint8(np.nan_to_num(flat, nan=0, posinf=0, neginf=0)).reshape(array.shape)
