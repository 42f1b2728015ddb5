"""`guard`: stand at the doors of a pipeline, and repair what goes wrong there.

Each call of a component is watched (`watch`). After a fault the call is run once more, looked at
operation by operation (`culprit`); a rule says what to try (`policy`); it is put on the component
(`repairs`), and the very same call, with the same arguments and random numbers, is run again. The
pipeline goes on with what that gave: its scheduler never saw the fault. The repair stays until the
guard is removed, which leaves the pipeline as it was, to the last bit.

**Catches** NaN and Inf in what a component returns, from any cause; fp16 clamps that were hit.
**Does not catch** arguments that a component changed in place before it failed; faults outside of the
components (in the scheduler, in the pipeline's own arithmetic): these are named, not repaired.
"""

from __future__ import annotations

import dataclasses
import functools
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
from stopdown.numerics import bound_values, iterate_tensors
from stopdown.patches import Patches
from stopdown.pipelines.components import Door, find_components, find_doors
from stopdown.pipelines.doors import Call, find_argument_names, find_module, find_slot, put_door
from stopdown.pipelines.step_caches import clear_caches, save_caches
from stopdown.planning.applying import check_plan, put_boundaries, watch_adapters
from stopdown.planning.loading import Standing
from stopdown.planning.plan_files import seal_plan
from stopdown.randomness import Restore, save_random
from stopdown.records import ComponentPlan, Decision, GuardRecord, Plan, Repair
from stopdown.runtime.amending import amend_entry, prescribe
from stopdown.runtime.carrying import Carried
from stopdown.runtime.culprit import Culprit, find_culprit, name_site
from stopdown.runtime.journal import Journal
from stopdown.runtime.policy import ON_FAULT, OnFault, Remedy, Situation, list_remedies
from stopdown.runtime.repairs import Applied, Patient
from stopdown.runtime.sensors import find_compiled, is_compiled
from stopdown.runtime.watch import Fault, Observer, Watch
from stopdown.runtime.wording import describe_repair, name_action

Announce = Callable[[str], None]
"""Told once of each kind of repair, in whole sentences."""

_ONE_FAULT = threading.RLock()
"""Held while a fault is worked on: captures of two threads at once disturb each other."""


@dataclass
class _Latest:
    """The call of a door that was made last, as the component itself got it."""

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
        carried: Carried | None = None,
    ) -> None:
        self.pipe, self._on_fault, self._carried = pipe, on_fault, carried
        self._journal: Journal | None = None
        self._plan: Plan | None = None
        self._announce = announce or _warn
        self._repairs: list[Repair] = []
        self._said: set[tuple[str, str]] = set()
        self._patches = Patches()
        self._latest: dict[str, _Latest] = {}
        self._patients: dict[int, Patient] = {}
        self._devices: dict[str, torch.device] = {}
        self._doors: dict[str, Patches] = {}
        self._missed: list[str] = []
        self._taken_over: list[str] = []
        self._places: dict[str, tuple[Any, str]] = {}
        self.watch = Watch(
            pipe, decisions, observer, self._answer, maxima, self._announce, self._renew
        )

    def put_on(
        self,
        plan: Plan | None = None,
        journal: Journal | str | Path | None = None,
        standing: Standing | None = None,
    ) -> None:
        """Stand at the doors.

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
            for door in find_doors(self.pipe):
                self._stand_at(door)
            if plan is not None:
                self._put_plan(plan)
            if standing is not None:
                self._stand_under(standing)
            self._take_over()
            self.watch.__enter__()
            self._patches.defer(self.watch.__exit__)
            for entry in self._plan.components if self._plan is not None else ():
                self.watch.limit_inputs(entry.component, entry.limits)
            if journal is not None:
                journal.put_on(self.pipe, self._patches, lambda: len(self._repairs))
                self._journal = journal
        except BaseException:
            self._patches.undo()
            raise

    def _stand_at(self, door: Door) -> None:
        """Stand next to a component; at another object in its place no more."""
        self._doors.setdefault(door.component, Patches()).undo()
        module = find_module(door)
        if id(module) not in self._patients:
            self._patients[id(module)] = Patient(module)
            self._patches.defer(self._patients[id(module)].leave)
        patient = self._patients[id(module)]
        patient.is_compiled |= is_compiled(door.owner) or bool(find_compiled(module))
        self._latest[door.component] = _Latest()
        stand = functools.partial(self._stand, door, patient)
        put_door(door, stand, self._doors[door.component], innermost=True)
        self._patches.defer(self._doors[door.component].undo)
        self._places[door.component] = (door.owner, find_slot(door))

    def _renew(self) -> None:
        """Stand at the doors of components that were compiled or replaced since."""
        for door in find_doors(self.pipe):
            owner, slot = self._places.get(door.component, (None, ""))
            if owner is not door.owner or slot != find_slot(door):
                if door.stage == "encode":  # which is called before a run's steps are set
                    self._missed.append(
                        f"{door.component}: it was compiled or replaced under the guard; calls "
                        "before the next run's first step were not watched."
                    )
                self._stand_at(door)
                self.watch.stand(door)

    def _put_plan(self, plan: Plan) -> None:
        try:
            for entry in plan.components:
                self._find_patient(entry).plan(prescribe(entry))
        except ScalingError as error:
            raise PlanError(
                f"The plan for {plan.source} does not fit the pipeline: {error.what}",
                remedy="Make a plan for it: stopdown plan SOURCE.",
            ) from error
        put_boundaries(self.pipe, plan, self._patches)
        watch_adapters(self.pipe, plan, self._patches)
        self._plan = plan

    def _stand_under(self, standing: Standing) -> None:
        for entry in standing.plan.components:
            off = standing.off[entry.component]
            self._find_patient(entry).stand_under(prescribe(entry), off)
        self._plan = standing.plan

    def _take_over(self) -> None:
        """Put on what an earlier guard of the same components found."""
        if self._carried is None:
            return
        for name, module in find_components(self.pipe).items():
            patient = self._patients.get(id(module))
            for applied in self._carried.put_on(patient) if patient is not None else ():
                path = f":{applied.path}" if applied.path else ""
                self._taken_over.append(f"{name}{path}: {applied.action} ({applied.precision})")

    def _find_patient(self, entry: ComponentPlan) -> Patient:
        return self._patients[id(getattr(self.pipe, entry.component))]

    def amend_plan(self) -> Plan | None:
        """The plan with the repairs in it, sealed; None when there is no plan, or was no repair."""
        if self._plan is None or not any(x.is_repaired for x in self._patients.values()):
            return None
        entries = tuple(self._amend(entry) for entry in self._plan.components)
        return seal_plan(dataclasses.replace(self._plan, components=entries))

    def _amend(self, entry: ComponentPlan) -> ComponentPlan:
        patient = self._find_patient(entry)
        if not patient.is_repaired:
            return entry
        why = [
            f"A run repaired it: {x.evidence} {x.reason}"
            for x in self._repairs
            if x.component.partition(".")[0] == entry.component
            and x.action not in ("none", "replayed")
        ]
        return amend_entry(entry, patient.applied, patient.calls_measured, dict.fromkeys(why))

    def remove(self) -> None:
        """Leave the pipeline as it was, to the last bit. A second call does nothing."""
        carried, self._carried = self._carried, None
        repaired = [x for x in self._patients.values() if x.is_repaired]
        found = [(patient.module, patient.hand_over()) for patient in repaired]
        self._patches.undo()
        self._latest.clear()
        for module, kept in found:
            if carried is not None:
                carried.keep(module, kept)

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
            taken_over=tuple(self._taken_over),
            uncertified=self.watch.uncertified,
        )

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """One for each fault, in order."""
        return tuple(self._repairs)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _stand(
        self,
        door: Door,
        patient: Patient,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Next to the component: what it is really called with."""
        begun = time.perf_counter()
        restores = (
            save_random(self._find_device(door, patient), kwargs),
            save_caches(patient.module),
        )
        self._latest[door.component] = _Latest(args, kwargs, restores)
        self.watch.own_s += time.perf_counter() - begun
        is_mixed = any(other.dtype is not None for other in self._patients.values())
        return patient.call(door, call, args, kwargs, is_mixed=is_mixed)

    def _find_device(self, door: Door, patient: Patient) -> torch.device:
        """Where its calls are computed; weights that are offloaded wait elsewhere until then."""
        found = self._devices.get(door.component)
        if found is None:
            weights = (x.device for x in patient.module.parameters() if not x.is_meta)
            found = next(weights, torch.device("cpu"))
            if found.type == "cpu":
                found = torch.device(getattr(self.pipe, "_execution_device", found))
            self._devices[door.component] = found
        return found

    def _answer(self, fault: Fault) -> Any:
        """The output to go on with after a fault."""
        with _ONE_FAULT:
            return self._work_on(fault)

    def _work_on(self, fault: Fault) -> Any:
        begun = time.perf_counter()
        if self._on_fault == "warn" and (fault.door.component, "none") in self._said:
            self._note(_Case(fault, Culprit("unknown"), begun), "none", "Not looked at again.")
            return fault.output
        case = _Case(fault, self._find_culprit(fault), begun)
        if self._on_fault == "warn":
            self._note(case, "none", "on_fault is warn: the run goes on as it is.")
            return fault.output
        if self._on_fault == "raise":
            raise self.watch.describe(fault, self._describe_start(case))
        return self._repair(case)

    def _repair(self, case: _Case) -> Any:
        fault, culprit = case.fault, case.culprit
        patient = self._patients[id(find_module(fault.door))]
        before = patient.applied
        has_bf16 = fault.precision == "fp16" and self._has_bf16(fault.door, patient)
        situation = Situation(culprit.kind, fault.precision, culprit.around, has_bf16)
        for remedy in list_remedies(situation):
            is_good, output = self._try(case, patient, remedy, before)
            if is_good:
                self._tell_precisions(fault.door, patient)
                self._note(case, name_action(remedy), remedy.reason)
                return output
        patient.put_on(before)
        self._note(case, "none", "Nothing that was tried gave a finite result.")
        raise self._give_up(case)

    def _try(
        self,
        case: _Case,
        patient: Patient,
        remedy: Remedy,
        before: tuple[Applied, ...],
    ) -> tuple[bool, Any]:
        """Put a remedy on and run the call again: whether that did it, and what it gave."""
        fault = case.fault
        latest = self._latest[fault.door.component]
        name = name_action(remedy)
        try:
            patient.put_on(before)
            latest.restore()  # the call that exponents are found for is the one that failed
            repairs = patient.find_repair(fault.door, remedy, latest.args, dict(latest.kwargs))
            patient.put_on(repairs)
            latest.restore()
            if repairs != before:
                clear_caches(patient.module)  # what they kept may have another scale or dtype
            case.replays += 1
            output = fault.call(*fault.args, **fault.kwargs)
        except Exception as error:  # whatever a model's code does: the next remedy is tried
            case.tried.append(f"{name}: {take_first_line(error)}")
            return False, None
        is_good, _ = self.watch.look(fault.door, output)
        if not is_good:
            case.tried.append(f"{name}: the same call was not finite again.")
        elif (given := _list_shapes(output)) != (wanted := _list_shapes(fault.output)):
            case.tried.append(f"{name}: it gave {given} where the call at fault gave {wanted}.")
            is_good = False
        return is_good, output

    def _find_culprit(self, fault: Fault) -> Culprit:
        latest = self._latest[fault.door.component]
        names = find_argument_names(fault.door)
        given = {**dict(zip(names, fault.args, strict=False)), **fault.kwargs}
        latest.restore()
        try:
            module = find_module(fault.door)
            culprit, output = find_culprit(
                fault.door.component,
                module,
                lambda: fault.call(*fault.args, **fault.kwargs),
                given,
            )
        except StopdownError:
            raise
        except Exception:  # code that cannot be looked at: nothing is known
            return Culprit("unknown")
        self.watch.look(fault.door, output)  # forget what the replay clamped
        return culprit

    def _describe_start(self, case: _Case) -> str:
        component = case.fault.door.component
        said = case.culprit.describe(component)
        return f"{said} {self._blame_outside()}" if case.culprit.kind == "input" else said

    def _blame_outside(self) -> str:
        """Which component gave what came in, or that none did."""
        for repair in self._repairs:
            if repair.action == "none":
                return (
                    f"It came from `{repair.component}`, where the fault began: {repair.evidence}"
                )
        last = [x for x in iterate_tensors(self.watch.last_step) if x.is_floating_point()]
        bounds = bound_values(last)
        if bounds is not None and not bool(torch.isfinite(bounds).all()):
            return "It came from the scheduler's last step; what the components gave was finite."
        return "Every component gave finite values; it came from the pipeline's own code."

    def _give_up(self, case: _Case) -> NonFiniteError:
        found = self._describe_start(case)
        if case.tried:
            found += f" Tried without success: {' '.join(case.tried)}"
        return self.watch.describe(case.fault, found)

    def _tell_precisions(self, door: Door, patient: Patient) -> None:
        self.watch.note_precisions(find_module(door), patient.name_precisions())

    def _note(self, case: _Case, action: str, reason: str) -> None:
        fault, culprit = case.fault, case.culprit
        component = fault.door.component
        is_named = culprit.kind not in ("input", "intermittent")
        repair = Repair(
            component=component,
            site=name_site(component, culprit.path if is_named else ""),
            kind=culprit.kind,
            step=fault.step,
            evidence=f"{self.watch.name_fault(fault)} {self._describe_start(case)}".strip(),
            action=action,
            reason=reason,
            tried=tuple(case.tried),
            replays=case.replays,
            elapsed_s=time.perf_counter() - case.begun,
        )
        self._repairs.append(repair)
        if (component, action) not in self._said:
            self._said.add((component, action))
            self._announce(describe_repair(repair))

    def _has_bf16(self, door: Door, patient: Patient) -> bool:
        device = choose_device(str(self._find_device(door, patient)))
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
    standing: Standing | None = None,
    carried: Carried | None = None,
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

    Returns:
        A context manager and handle: `.record`, `.repairs`, `.remove()`, and `.amend_plan()` for the
        plan with the repairs in it.

    Raises:
        OptionError: `on_fault` is none of the three.
        PlanError: the plan does not belong to this pipeline.
        InputError: the journal belongs to another run, or is in use.
        NonFiniteError: out of the pipeline's call, when a fault is not repaired.

    Cost: per call two operations and one host read; one operation more for each module that clamps
        at the end of fp16, and with `maxima` for each output of a block. After a fault an
        instrumented replay, and one run of the call for each repair that is tried.
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
        carried=carried,
    )
    made.put_on(plan, journal, standing)
    return made


def _warn(text: str) -> None:
    warnings.warn(text, StopdownWarning, stacklevel=2)
