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

from stopdown.errors import NonFiniteError, PlanError, StopdownError
from stopdown.frame_faults import find_frame_findings
from stopdown.patches import Patches
from stopdown.pipelines.pipeline_interception import intercept_runs
from stopdown.records import Finding, GuardRecord, Plan
from stopdown.runtime.guard import Guard, GuardOptions
from stopdown.runtime.repair_cache import RepairCache
from stopdown.runtime.repair_order import OnFault
from stopdown.runtime.results import collect_videos


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
    _repair_cache: RepairCache = field(default_factory=RepairCache)
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
                output = guarding.run(call, args, kwargs)
                self.plan = guarding.updated_plan() or self.plan
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
            return Guard(pipe, self._choose(plan=self.plan)).put_on()
        except PlanError as error:
            name = type(pipe).__name__
            if name not in self._without_plan:
                self._without_plan.add(name)
                self.announce(f"{name} runs without the plan. {error}")
            return None

    def _guard_by_what_was_found(self, pipe: Any) -> Guard:
        """A guard with the repairs of earlier calls."""
        made = Guard(pipe, self._choose(repair_cache=self._repair_cache)).put_on()
        while self._repair_cache.outdated:
            self.announce(
                f"The weights of {self._repair_cache.outdated.pop()} were changed since an earlier call "
                "repaired it; that repair is left away."
            )
        return made

    def _choose(self, **more: Any) -> GuardOptions:
        return GuardOptions(on_fault=self.on_fault, announce=self.announce, frames=False, **more)

    def _advise(self) -> str:
        """What to type after a fault that ended a pipeline's call: the script has no `--precision`."""
        wide = "the script can load it in bf16 or fp32: from_pretrained(..., dtype=torch.bfloat16)"
        if self.on_fault == "raise":
            return f"Use stopdown run --on-fault repair, which mends it and goes on; or {wide}."
        return f"Nothing that was tried helped; {wide}."

    def _look(self, name: str, output: Any) -> None:
        for number, frames in enumerate(collect_videos(output)):
            module_path = f"{name}, call {len(self.runs)}, result {number + 1}"
            self.findings += find_frame_findings(frames, module_path)
