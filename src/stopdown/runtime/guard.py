"""`guard`: intercept the component calls of a pipeline, and repair what goes wrong there.

Each call of a component is watched (`watch`). After a fault the call is run once more, looked at
operation by operation (`culprit`); a rule says what to try (`policy`); it is put on the component
(`repairs`), and the very same call, with the same arguments and random numbers, is run again. The
pipeline goes on with what that gave: its scheduler never saw the fault. The repair stays until the
guard is removed, which leaves the pipeline as it was, to the last bit.

What leaves the pipeline is looked at as well: a fault of the scheduler's last step, or of the pipeline's
own arithmetic behind it, reaches no component. It is named where it began, and stops the run.

**Catches** NaN and Inf in what a component returns or is given and in what the pipeline returns, from
any cause; fp16 clamps that were hit; frames that are black, grey, frozen or noise.
**Does not catch** arguments that a component changed in place before it failed. Faults outside of the
components (in the scheduler, in the pipeline's own arithmetic) are named, not repaired.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stopdown.environment import choose_device, probe_formats
from stopdown.errors import (
    NonFiniteError,
    OptionError,
    PlanError,
    ScalingError,
    StopdownError,
    StopdownWarning,
    take_first_line,
)
from stopdown.frame_faults import find_frame_findings
from stopdown.numerics import iterate_tensors
from stopdown.patches import Patches
from stopdown.pipelines.call_interception import (
    Call,
    find_argument_names,
    find_module,
    find_slot,
    intercept,
)
from stopdown.pipelines.components import Callee, find_callees, find_components
from stopdown.pipelines.pipeline_interception import put_run_layer
from stopdown.pipelines.step_caches import clear_caches, save_caches
from stopdown.plans.applier import check_plan, put_boundaries, watch_adapters
from stopdown.plans.loader import LoadedPlan
from stopdown.plans.plan_files import seal_plan
from stopdown.randomness import Restore, save_random
from stopdown.records import ComponentPlan, Decision, Finding, GuardRecord, Plan, Repair
from stopdown.runtime.activation_maxima import find_compiled, is_compiled
from stopdown.runtime.culprit import Culprit, find_culprit, join_module_path
from stopdown.runtime.journal import Journal
from stopdown.runtime.origin import Origin, find_origin
from stopdown.runtime.plan_updates import adjustments_of, update_entry
from stopdown.runtime.repair_cache import RepairCache
from stopdown.runtime.repair_order import ON_FAULT, OnFault, Remedy, Situation, list_remedies
from stopdown.runtime.repair_texts import describe_repair, name_action
from stopdown.runtime.repairs import Adjustment, ComponentState
from stopdown.runtime.results import collect_videos, count_bad, has_tensors
from stopdown.runtime.watch import Fault, Observer, Watch, name_counts

Announce = Callable[[str], None]
"""Told once of each kind of repair, in whole sentences."""

_ONE_FAULT = threading.RLock()
"""Held while a fault is worked on: captures of two threads at once disturb each other."""


@dataclass
class _Latest:
    """The call of a component call that was made last, as the component itself got it."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    restores: tuple[Restore, ...] = ()

    def restore(self) -> None:
        """Random numbers and step caches as they were before it."""
        for restore in self.restores:
            restore()


@dataclass
class _Case:
    """One fault while it is worked on."""

    fault: Fault
    culprit: Culprit
    begun: float
    tried: list[str] = field(default_factory=list)
    replays: int = 0


class Guard:
    """What `guard` puts on a pipeline; a context manager, and a handle with `record` and `remove`.

    Attributes:
        pipe: the pipeline.
        watch: what looks at each call.
    """

    def __init__(
        self,
        pipe: Any,
        *,
        on_fault: OnFault = "repair",
        decisions: tuple[Decision, ...] = (),
        observer: Observer | None = None,
        announce: Announce | None = None,
        maxima: bool = False,
        repair_cache: RepairCache | None = None,
        frames: bool = True,
    ) -> None:
        self.pipe, self._on_fault, self._repair_cache, self._frames = (
            pipe,
            on_fault,
            repair_cache,
            frames,
        )
        self._journal: Journal | None = None
        self._plan: Plan | None = None
        self._announce = announce or _warn
        self._repairs: list[Repair] = []
        self._said: set[tuple[str, str]] = set()
        self._patches = Patches()
        self._latest: dict[str, _Latest] = {}
        self._states: dict[int, ComponentState] = {}
        self._devices: dict[str, torch.device] = {}
        self._callees: dict[str, Patches] = {}
        self._missed: list[str] = []
        self._reused: list[str] = []
        self._places: dict[str, tuple[Any, str]] = {}
        self._findings: list[Finding] = []
        self._running: set[int] = set()  # threads inside of the pipeline's call
        self._given: dict[str, Any] = {}  # what that was called with
        self._repairs_before = 0
        self.watch = Watch(
            pipe, decisions, observer, self._answer, maxima, self._announce, self._renew
        )

    def put_on(
        self,
        plan: Plan | None = None,
        journal: Journal | str | Path | None = None,
        loaded_plan: LoadedPlan | None = None,
    ) -> None:
        """Intercept the component calls.

        Args:
            plan: put on the pipeline for as long as the guard is.
            journal: folder, or open journal.
            standing: a plan that was put on while the pipeline was loaded.

        Raises:
            PlanError: the plan does not belong to this pipeline. Nothing was changed.
            InputError: the journal belongs to another run, or is in use. Nothing was changed.
        """
        try:
            if isinstance(journal, str | Path):
                journal = Journal(journal, announce=self._announce)
                self._patches.defer(journal.close)
            if plan is not None:
                check_plan(self.pipe, plan)
            for callee in find_callees(self.pipe):
                self._stand_at(callee)
            if plan is not None:
                self._put_plan(plan)
            if loaded_plan is not None:
                self._take_loaded_plan(loaded_plan)
            self._reuse()
            self.watch.__enter__()
            self._patches.defer(self.watch.__exit__)
            put_run_layer(self.pipe, self.run, self._patches)
            for entry in self._plan.components if self._plan is not None else ():
                self.watch.limit_inputs(entry.component, entry.scaling.limits)
            if journal is not None:
                journal.put_on(self.pipe, self._patches, lambda: len(self._repairs))
                self._journal = journal
        except BaseException:
            self._patches.undo()
            raise

    def _stand_at(self, callee: Callee) -> None:
        """Stand next to a component; at another object in its place no more."""
        self._callees.setdefault(callee.component, Patches()).undo()
        module = find_module(callee)
        if id(module) not in self._states:
            self._states[id(module)] = ComponentState(module)
            self._patches.defer(self._states[id(module)].leave)
        state = self._states[id(module)]
        state.is_compiled |= is_compiled(callee.owner) or bool(find_compiled(module))
        self._latest[callee.component] = _Latest()
        stand = functools.partial(self._stand, callee, state)
        intercept(callee, stand, self._callees[callee.component], innermost=True)
        self._patches.defer(self._callees[callee.component].undo)
        self._places[callee.component] = (callee.owner, find_slot(callee))

    def _renew(self) -> None:
        """Intercept the component calls of components that were compiled or replaced since."""
        for callee in find_callees(self.pipe):
            owner, slot = self._places.get(callee.component, (None, ""))
            if owner is not callee.owner or slot != find_slot(callee):
                if callee.stage == "encode" and not self._running:  # called without the pipeline
                    self._missed.append(
                        f"{callee.component}: it was compiled or replaced under the guard; calls "
                        "before the next run's first step were not watched."
                    )
                self._stand_at(callee)
                self.watch.stand(callee)

    def _put_plan(self, plan: Plan) -> None:
        try:
            for entry in plan.components:
                self._find_state(entry).plan(adjustments_of(entry))
        except ScalingError as error:
            raise PlanError(
                f"The plan for {plan.source} does not fit the pipeline: {error.what}",
                remedy="Make a plan for it: stopdown plan SOURCE.",
            ) from error
        put_boundaries(self.pipe, plan, self._patches)
        watch_adapters(self.pipe, plan, self._patches)
        self._plan = plan

    def _take_loaded_plan(self, loaded_plan: LoadedPlan) -> None:
        for entry in loaded_plan.plan.components:
            off = loaded_plan.off[entry.component]
            self._find_state(entry).stand_under(adjustments_of(entry), off)
        self._plan = loaded_plan.plan

    def _reuse(self) -> None:
        """Put on what an earlier guard of the same components found."""
        if self._repair_cache is None:
            return
        for name, module in find_components(self.pipe).items():
            state = self._states.get(id(module))
            for applied in self._repair_cache.put_on(state) if state is not None else ():
                path = f":{applied.path}" if applied.path else ""
                self._reused.append(f"{name}{path}: {applied.action} ({applied.precision})")

    def _find_state(self, entry: ComponentPlan) -> ComponentState:
        return self._states[id(getattr(self.pipe, entry.component))]

    def updated_plan(self) -> Plan | None:
        """The plan with the repairs in it, sealed; None when there is no plan, or was no repair."""
        if self._plan is None or not any(x.is_repaired for x in self._states.values()):
            return None
        entries = tuple(self._update(entry) for entry in self._plan.components)
        return seal_plan(dataclasses.replace(self._plan, components=entries))

    def _update(self, entry: ComponentPlan) -> ComponentPlan:
        state = self._states.get(id(getattr(self.pipe, entry.component, None)))
        if state is None or not state.is_repaired:  # None: it was replaced under the guard
            return entry
        why = [
            f"A run repaired it: {x.evidence} {x.reason}"
            for x in self._repairs
            if x.component.partition(".")[0] == entry.component
            and x.action not in ("none", "replayed")
        ]
        return update_entry(entry, state.applied, state.calls_measured, dict.fromkeys(why))

    def remove(self) -> None:
        """Leave the pipeline as it was, to the last bit. A second call does nothing."""
        repair_cache, self._repair_cache = self._repair_cache, None
        repaired = [x for x in self._states.values() if x.is_repaired]
        found = [(state.module, state.hand_over()) for state in repaired]
        self._patches.undo()
        self._latest.clear()
        for module, kept in found:
            if repair_cache is not None:
                repair_cache.keep(module, kept)

    @property
    def record(self) -> GuardRecord:
        """What was seen and done so far."""
        return GuardRecord(
            pipeline=type(self.pipe).__name__,
            calls=self.watch.summarize(),
            repairs=tuple(self._repairs),
            host_reads=self.watch.host_reads,
            unwatched=(*self.watch.unwatched, *self._missed),
            own_s=self.watch.own_s + (self._journal.own_s if self._journal else 0.0),
            maxima=self.watch.maxima,
            journal=self._journal.use if self._journal else None,
            reused=tuple(self._reused),
            uncertified=self.watch.uncertified,
            findings=tuple(self._findings),
        )

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """One for each fault, in order."""
        return tuple(self._repairs)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the pipeline, with what leaves it looked at.

        Args:
            call: makes it, with `args` and `kwargs`.

        Raises:
            NonFiniteError: it returned NaN or Inf, and `on_fault` is not `warn`.

        Cost: a pass over the result; one host read when that holds tensors.
        """
        thread = threading.get_ident()
        if thread in self._running:  # a class that calls its parent's `__call__`
            return call(*args, **kwargs)
        self._running.add(thread)
        try:
            self._begin_run(args, kwargs)
            output = call(*args, **kwargs)
            begun = time.perf_counter()
            self._look_at_result(output)
            self.watch.own_s += time.perf_counter() - begun
            return output
        finally:
            self._running.discard(thread)
            self._given = {}

    def _begin_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._renew()
        self.watch.follow_scheduler()
        self.watch.forget_step()
        names = list(inspect.signature(type(self.pipe).__call__).parameters)[1:]
        self._given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._repairs_before = len(self._repairs)

    @property
    def _repairs_now(self) -> list[Repair]:
        """Those of this run of the pipeline."""
        return self._repairs[self._repairs_before :]

    def _look_at_result(self, output: Any) -> None:
        nan, infinite, total = count_bad(output)
        self.watch.host_reads += has_tensors(output)
        is_reported = any(repair.action == "none" for repair in self._repairs_now)
        if nan + infinite == 0:
            self._look_at_frames(output)
        elif not is_reported:
            what = f"The pipeline's result holds {name_counts(nan, infinite)} in {total} values."
            origin = self._find_origin()
            repair = Repair(
                component="pipeline",
                module_path=origin.source,
                kind="input",
                step=None,
                evidence=f"{origin.what} {what}",
                action="none",
                reason="No component made it, so there is nothing to repair.",
            )
            self._keep(repair)
            if self._on_fault != "warn":
                raise NonFiniteError(origin.what, expected=what, remedy=origin.remedy)

    def _look_at_frames(self, output: Any) -> None:
        if not self._frames or self._given.get("output_type") == "latent":
            return
        for number, frames in enumerate(collect_videos(output), 1):
            for finding in find_frame_findings(frames, f"result {number}"):
                self._findings.append(finding)
                if ("pipeline", finding.kind) not in self._said:
                    self._said.add(("pipeline", finding.kind))
                    self._announce(f"{finding.module_path}: {finding.evidence} {finding.remedy}")

    def _find_origin(self) -> Origin:
        """Where values came from that are not finite, when no component made them."""
        unwatched = [*self.watch.unseen, *self._list_replaced()]
        return find_origin(self.watch, self._repairs_now, self._given, unwatched)

    def _list_replaced(self) -> list[str]:
        """Components that came after the run began, each as a sentence."""
        return [
            f"`{callee.component}` was compiled or replaced under the guard and not watched."
            for callee in find_callees(self.pipe)
            if self._places.get(callee.component) != (callee.owner, find_slot(callee))
        ]

    def _stand(
        self,
        callee: Callee,
        state: ComponentState,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Next to the component: what it is really called with."""
        begun = time.perf_counter()
        restores = (
            save_random(self._find_device(callee, state), kwargs),
            save_caches(state.module),
        )
        self._latest[callee.component] = _Latest(args, kwargs, restores)
        self.watch.own_s += time.perf_counter() - begun
        is_mixed = any(other.dtype is not None for other in self._states.values())
        return state.call(callee, call, args, kwargs, is_mixed=is_mixed)

    def _find_device(self, callee: Callee, state: ComponentState) -> torch.device:
        """Where its calls are computed; weights that are offloaded wait elsewhere until then."""
        found = self._devices.get(callee.component)
        if found is None:
            weights = (x.device for x in state.module.parameters() if not x.is_meta)
            found = next(weights, torch.device("cpu"))
            if found.type == "cpu":
                found = torch.device(getattr(self.pipe, "_execution_device", found))
            self._devices[callee.component] = found
        return found

    def _answer(self, fault: Fault) -> Any:
        """The output to go on with after a fault."""
        with _ONE_FAULT:
            return self._work_on(fault)

    def _work_on(self, fault: Fault) -> Any:
        begun = time.perf_counter()
        if fault.is_good:
            return self._pass_on(fault, begun)
        if self._on_fault == "warn" and (fault.callee.component, "none") in self._said:
            self._note(_Case(fault, Culprit("unknown"), begun), "none", "Not looked at again.")
            return fault.output
        case = _Case(fault, self._find_culprit(fault), begun)
        if self._on_fault == "warn":
            self._note(case, "none", "on_fault is warn: the run goes on as it is.")
            return fault.output
        if self._on_fault == "raise":
            raise self._describe_error(case)
        return self._repair(case)

    def _pass_on(self, fault: Fault, begun: float) -> Any:
        """Go on with a finite output of arguments that were not; said once for each component."""
        component = fault.callee.component
        if (component, "inputs") in self._said:
            return fault.output
        self._said.add((component, "inputs"))
        case = _Case(fault, Culprit("input", ", ".join(fault.inputs)), begun)
        if self._on_fault == "raise":
            raise self._describe_error(case)
        self._note(case, "none", "What it gave was finite all the same: the run goes on.")
        return fault.output

    def _repair(self, case: _Case) -> Any:
        fault, culprit = case.fault, case.culprit
        state = self._states[id(find_module(fault.callee))]
        before = state.applied
        has_bf16 = fault.precision == "fp16" and self._has_bf16(fault.callee, state)
        situation = Situation(culprit.kind, fault.precision, culprit.around, has_bf16)
        for remedy in list_remedies(situation):
            is_good, output = self._try(case, state, remedy, before)
            if is_good:
                self._tell_precisions(fault.callee, state)
                self._note(case, name_action(remedy), remedy.reason)
                return output
        state.put_on(before)
        error = self._describe_error(case)
        self._note(case, "none", "Nothing that was tried gave a finite result.")
        raise error

    def _try(
        self,
        case: _Case,
        state: ComponentState,
        remedy: Remedy,
        before: tuple[Adjustment, ...],
    ) -> tuple[bool, Any]:
        """Put a remedy on and run the call again: whether that did it, and what it gave."""
        fault = case.fault
        latest = self._latest[fault.callee.component]
        name = name_action(remedy)
        try:
            state.put_on(before)
            latest.restore()  # the call that exponents are found for is the one that failed
            repairs = state.find_repair(fault.callee, remedy, latest.args, dict(latest.kwargs))
            state.put_on(repairs)
            latest.restore()
            if repairs != before:
                clear_caches(state.module)  # what they kept may have another scale or dtype
            case.replays += 1
            output = fault.call(*fault.args, **fault.kwargs)
        except Exception as error:  # whatever a model's code does: the next remedy is tried
            case.tried.append(f"{name}: {take_first_line(error)}")
            return False, None
        is_good = self.watch.look(fault.callee, output).is_good
        if not is_good:
            case.tried.append(f"{name}: the same call was not finite again.")
        elif (given := _list_shapes(output)) != (wanted := _list_shapes(fault.output)):
            case.tried.append(f"{name}: it gave {given} where the call at fault gave {wanted}.")
            is_good = False
        return is_good, output

    def _find_culprit(self, fault: Fault) -> Culprit:
        latest = self._latest[fault.callee.component]
        names = find_argument_names(fault.callee)
        given = {**dict(zip(names, fault.args, strict=False)), **fault.kwargs}
        latest.restore()
        try:
            module = find_module(fault.callee)
            culprit, output = find_culprit(
                fault.callee.component,
                module,
                lambda: fault.call(*fault.args, **fault.kwargs),
                given,
            )
        except StopdownError:
            raise
        except Exception:  # code that cannot be looked at: nothing is known
            return Culprit("unknown")
        self.watch.look(fault.callee, output)  # forget what the replay clamped
        return culprit

    def _describe_caller(self, case: _Case) -> str:
        """Which component was called with values that were not finite, and what came of it."""
        fault = case.fault
        called = f"`{fault.callee.component}` was called with it as {case.culprit.path}"
        if fault.is_good:
            return f"{called}, and gave finite values."
        return f"{called}: {self.watch.name_fault(fault)}"

    def _describe_error(self, case: _Case) -> NonFiniteError:
        if case.culprit.kind == "input":
            origin = self._find_origin()
            said = self._describe_caller(case)
            return NonFiniteError(origin.what, expected=said, remedy=origin.remedy)
        found = case.culprit.describe(case.fault.callee.component)
        if case.tried:
            found += f" Tried without success: {' '.join(case.tried)}"
        return self.watch.describe(case.fault, found)

    def _tell_precisions(self, callee: Callee, state: ComponentState) -> None:
        self.watch.note_precisions(find_module(callee), state.name_precisions())

    def _note(self, case: _Case, action: str, reason: str) -> None:
        fault, culprit = case.fault, case.culprit
        component = fault.callee.component
        said = f"{self.watch.name_fault(fault)} {culprit.describe(component)}"
        module_path = join_module_path(
            component, "" if culprit.kind == "intermittent" else culprit.path
        )
        if culprit.kind == "input":
            origin = self._find_origin()
            module_path, said = origin.source, f"{origin.what} {self._describe_caller(case)}"
        repair = Repair(
            component=component,
            module_path=module_path,
            kind=culprit.kind,
            step=fault.step,
            evidence=said.strip(),
            action=action,
            reason=reason,
            tried=tuple(case.tried),
            replays=case.replays,
            elapsed_s=time.perf_counter() - case.begun,
        )
        self._keep(repair)

    def _keep(self, repair: Repair) -> None:
        """In the record, and said once of its kind."""
        self._repairs.append(repair)
        if (repair.component, repair.action) not in self._said:
            self._said.add((repair.component, repair.action))
            self._announce(describe_repair(repair))

    def _has_bf16(self, callee: Callee, state: ComponentState) -> bool:
        device = choose_device(str(self._find_device(callee, state)))
        support = probe_formats(device)["bf16"]
        return support.native and support.works


def _list_shapes(output: Any) -> str:
    """Sizes of every tensor of an output: 1x3x9x32x32."""
    return ", ".join("x".join(map(str, x.shape)) or "scalar" for x in iterate_tensors(output))


def guard(
    pipe: Any,
    plan: Plan | None = None,
    *,
    on_fault: OnFault = "repair",
    decisions: tuple[Decision, ...] = (),
    observer: Observer | None = None,
    announce: Announce | None = None,
    journal: Journal | str | Path | None = None,
    maxima: bool = False,
    loaded_plan: LoadedPlan | None = None,
    repair_cache: RepairCache | None = None,
    frames: bool = True,
) -> Guard:
    """Guard every component call of a pipeline until the guard is removed.

    A run without a fault gives the same bits as without a guard.

    Args:
        pipe: a Diffusers pipeline.
        plan: put on the pipeline for as long as the guard is.
        on_fault: `repair`: repair the component, run the call again, go on. `raise`: stop with what
            is known. `warn`: say it once and go on with the bad value.
        decisions: precision of each call with its reason, for messages.
        observer: told of each finished call.
        announce: told of each repair once; None warns with `StopdownWarning`.
        journal: folder, or open journal, for the outputs of calls: after a kill the same program
            goes on where it stopped. Its bound is `journal.LIMIT_BYTES`; remove the folder when the
            run is done.
        maxima: note the largest magnitude of each block at each step, for `.record.maxima`.
        standing: the plan that the pipeline was loaded by, in place of `plan`.
        carried: what earlier guards found, put on from the start; what this one finds is added.
        frames: report black, grey, frozen and noisy frames in what the pipeline returns.

    Returns:
        A context manager and handle: `.record`, `.repairs`, `.remove()`, and `.updated_plan()` for the
        plan with the repairs in it.

    Raises:
        OptionError: `on_fault` is none of the three.
        PlanError: the plan does not belong to this pipeline.
        InputError: the journal belongs to another run, or is in use.
        NonFiniteError: out of the pipeline's call, when a fault is not repaired.

    Cost: per call of a component an operation for each floating argument, two for its outputs and
        one host read; one operation more for each module that clamps at the end of fp16, and with
        `maxima` for each output of a block. Per call of the pipeline a pass over its result, and one
        host read for tensors. After a fault an instrumented replay, and one run of the call for each
        repair that is tried.
    """
    if on_fault not in ON_FAULT:
        raise OptionError(
            f"on_fault={on_fault!r} is unknown.",
            expected=f"Known are {', '.join(ON_FAULT)}.",
            remedy='Use on_fault="repair".',
        )
    made = Guard(
        pipe,
        on_fault=on_fault,
        decisions=decisions,
        observer=observer,
        announce=announce,
        maxima=maxima,
        repair_cache=repair_cache,
        frames=frames,
    )
    made.put_on(plan, journal, loaded_plan)
    return made


def _warn(text: str) -> None:
    warnings.warn(text, StopdownWarning, stacklevel=2)
