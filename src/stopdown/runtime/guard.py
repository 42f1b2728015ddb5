"""`guard`: watch the component calls of a program, repair faulty ones and run them again.

A guard is one `Session` with two listeners around each component call: one records the component's actual
arguments for a replay; the other checks the output (`call_check`) and has faults repaired
(`fault_handler`). Repairs stay until the guard is removed, which restores the program to the last bit. A
pipeline's scheduler never receives the fault. The pipeline's output is checked as well (`run_check`).

**Catches** NaN and Inf in what a component returns or is given and in what the pipeline returns, from
any cause; fp16 clamps that were hit; frames that are black, grey, frozen or noise.

**Does not catch** arguments that a component changed in place before it failed; calls that another
thread began before the guard was put on. Faults outside of the components (in the scheduler, in the
pipeline's own arithmetic) are named, not repaired. Components that are being trained are left alone,
which is reported once: in training mode their calls, in eval mode their faults.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stopdown.argument_types import check_function, check_type
from stopdown.component_call_names import name_component, name_module_path, split_module_path
from stopdown.component_calls.components import find_component, find_components
from stopdown.component_calls.pipeline_interception import put_run_layer
from stopdown.devices.environment import count_processes
from stopdown.errors import (
    InputError,
    take_first_line,
)
from stopdown.interception.patches import SameInCopies
from stopdown.module_calls.call_inputs import Size
from stopdown.plans.applier import AppliedPlan, apply_plan, find_applied, join_plans
from stopdown.plans.calibrated import describe_scaling
from stopdown.plans.plan_files import seal_plan, take_plan
from stopdown.records import ComponentPlan, GuardRecord, Plan, Repair, Scaling
from stopdown.runtime.dtype_repairs import add_note
from stopdown.runtime.fault_handler import FaultHandler
from stopdown.runtime.journal import Journal
from stopdown.runtime.repair_order import OnFault
from stopdown.runtime.repairs import name_action
from stopdown.runtime.run_check import RunCheck
from stopdown.runtime.session import Announce, GuardOptions, Observer, Session
from stopdown.runtime.watch import Watch
from stopdown.scaling import ComponentCall

LEFT_ON: weakref.WeakSet[Guard] = weakref.WeakSet()
"""Guards that were put on and not removed."""


class Guard(SameInCopies):
    """The handle that `guard` returns, with `record` and `remove`; also a context manager.

    Attributes:
        session: the component calls, and what is known of each.
        plan: the plan that is applied to the program; None without one.
    """

    def __init__(self, pipe: Any, options: GuardOptions | None = None) -> None:
        self.session = session = Session(pipe, options or GuardOptions())
        self.plan: Plan | None = None
        self._runs = RunCheck(session)
        self._watch = Watch(session, FaultHandler(session, self._runs.find_origin))
        self._journal: Journal | None = None
        self._applied: AppliedPlan | None = None
        self._reused: list[str] = []

    @property
    def pipe(self) -> Any:
        """The guarded program: a pipeline, a module, a dict of these, or an object with modules."""
        return self.session.pipe

    @property
    def options(self) -> GuardOptions:
        return self.session.options

    def run(self, call: ComponentCall) -> Any:
        """Make one call of the guarded pipeline, and check its result for NaN, Inf and faulty frames."""
        return self._runs.run(call)

    def check_frames(self, output: Any) -> None:
        """Report black, grey, frozen and noisy pictures, and faulty sound.

        Args:
            output: of a pipeline; or a tuple of pictures `[B, H, W, 3]` in 0 to 1.
        """
        self._runs.check_frames(output)

    def limit_inputs(
        self,
        component: str,
        limits: Mapping[str, float],
        sizes: Mapping[str, Sequence[Size]] | None = None,
    ) -> None:
        """Report later calls of a component whose arguments exceed the limits of a certificate.

        A certificate's bounds don't hold for such calls. Its plan isn't applied.

        Args:
            limits: argument, as `forward.hidden_states` → largest magnitude for which the bounds hold.
            sizes: argument → sizes for which they hold, without the batch.
        """
        before = self.session.planned.get(component, Scaling())
        known = {name: tuple(x) for name, x in (sizes or {}).items()}
        limited = dataclasses.replace(before, limits=dict(limits), sizes=known)
        self.session.planned[component] = limited

    def put_on(self) -> Guard:
        """Intercept the component calls, and return the guard itself.


        Raises:
            PlanError: the plan does not belong to this pipeline. Nothing was changed.
            InputError: the journal belongs to another run, or is in use. Nothing was changed.
        """
        try:
            self._put_on()
        except BaseException:
            self.session.patches.undo()
            raise
        LEFT_ON.add(self)
        self.session.patches.defer(
            functools.partial(LEFT_ON.discard, self)
        )  # the layers hold the guard
        return self

    def _put_on(self) -> None:
        journal, session, steps = self._open_journal(), self.session, self.session.steps
        if self.options.plan is not None:
            self._applied = apply_plan(self.pipe, self.options.plan)
            self.session.patches.defer(self._applied.undo)
        session.put_on(self._watch.record_arguments, self._watch.check)
        for module in find_components(self.pipe).values():
            steps.listen(module, session.patches)
        self.plan = self._stand_under_plan()
        self._reuse()
        steps.follow()
        session.patches.defer(steps.stop)
        if steps.pipe is not None:
            put_run_layer(steps.pipe, self.run, session.patches)
        session.listen()
        for entry in self.plan.components if self.plan is not None else ():
            session.planned[entry.component] = entry.in_force
        if journal is not None:
            journal.put_on(self.pipe, self.session.patches, lambda: len(self.session.log))
        self._journal = journal

    def _open_journal(self) -> Journal | None:
        journal = self.options.journal
        if journal is not None and self.session.steps.pipe is None:
            raise InputError(
                f"A journal was requested, but a {type(self.pipe).__name__} isn't a pipeline.",
                expected="A journal identifies calls by their order in a pipeline's run.",
                remedy="Leave the journal out.",
            )
        if journal is not None and (count := count_processes()) > 1:
            raise InputError(
                f"A journal was requested for {count} processes.",
                expected="A journal contains the calls of one process.",
                remedy="Leave the journal out, or start one process.",
            )
        if isinstance(journal, str | Path):
            journal = Journal(journal, announce=self.session.log.announce)
            self.session.patches.defer(journal.close)
        return journal

    def _stand_under_plan(self) -> Plan | None:
        """Find the plan that was applied to the components, by this guard or before it, and return it."""
        own = () if self._applied is None else self._applied.entries.values()
        there = map(find_applied, find_components(self.pipe).values())
        found = list(dict.fromkeys([*own, *filter(None, there)]))
        for applied in found:
            self.session.find_component(applied.module).stand_under(applied)
        return self.options.plan or join_plans([x.plan for x in found])

    def _reuse(self) -> None:
        """Apply the cached repairs that an earlier guard of the same components found."""
        cache = self.options.repair_cache
        if cache is None:
            return
        for state in self.session.components.values():
            for applied in cache.put_on(state):
                place = name_module_path(state.name, split_module_path(applied.component)[1])
                self._reused.append(f"{place}: {name_action(applied)} ({applied.precision})")

    def __repr__(self) -> str:
        found = f"{len(self.session.log)} fault{'s' * (len(self.session.log) != 1)} so far"
        return (
            f"Guard(of a {type(self.pipe).__name__}, on_fault={self.options.on_fault!r}, {found})"
        )

    def remove(self) -> None:
        """Remove the guard and restore the program to the last bit. A second call does nothing."""
        LEFT_ON.discard(self)
        if self._applied is not None:
            self._applied.end()
        cache, is_first = self.options.repair_cache, not self.session.is_over
        for state, applied in self.session.leave():
            if cache is not None and is_first:
                cache.keep(state, applied)

    def give_way(self, options: GuardOptions) -> Guard:
        """Replace this guard by another one with these options, until that is removed; then put this
        one on again.
        """
        self.remove()
        other = Guard(self.pipe, dataclasses.replace(options, decisions=self.options.decisions))

        def guard_again() -> None:
            self.pipe.stopdown_guard = Guard(self.pipe, self.options).put_on()

        other.session.patches.defer(guard_again)  # comes off last
        return other.put_on()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.remove()
        except Exception as failure:  # memory may have run out: why the run ended is what counts
            if error is None:
                raise
            add_note(error, f"The pipeline couldn't be restored: {take_first_line(failure)}")

    @property
    def record(self) -> GuardRecord:
        """The findings and repairs so far."""
        calls, journal = self.session.calls.values(), self._journal
        own_s = (self._watch.own_s, self._runs.own_s, journal.own_s if journal else 0.0)
        return GuardRecord(
            pipeline=type(self.pipe).__name__,
            calls=tuple(call.summary for call in calls if call.summary.calls),
            repairs=self.session.log.repairs,
            host_reads=self.session.host_reads,
            unwatched=(
                *(f"{x.name}: {_COMPILED}" for x in calls if x.is_compiled),
                *self.session.log.left,
            ),
            own_s=sum(own_s),
            maxima=self.session.maxima,
            journal=journal.use if journal else None,
            reused=tuple(self._reused),
            uncertified=tuple(text for call in calls for text in call.list_excesses()),
            findings=tuple(self._runs.findings),
        )

    @property
    def is_on(self) -> bool:
        """Whether the guard is active: put on and not removed."""
        return self in LEFT_ON

    @property
    def is_repairing(self) -> bool:
        """Whether repairs are applied to a component now, besides a plan."""
        return any(state.is_repaired for state in self.session.components.values())

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """One repair for each fault, in order."""
        return self.session.log.repairs

    def updated_plan(self) -> Plan | None:
        """Return the plan updated with the repairs, with a new seal; None without a plan or repairs."""
        states = self.session.components.values()
        if self.plan is None or not any(x.is_planned_anew for x in states):
            return None
        entries = tuple(self._update(entry) for entry in self.plan.components)
        return seal_plan(dataclasses.replace(self.plan, components=entries))

    def _update(self, entry: ComponentPlan) -> ComponentPlan:
        state = self.session.components.get(id(find_component(self.pipe, entry.component)))
        if state is None or not state.is_planned_anew:  # None: it was replaced
            return entry
        why = [
            f"A run repaired it: {x.evidence} {x.reason}"
            for x in self.session.log.repairs
            if name_component(x.component) == entry.component
            and x.action not in ("none", "replayed")
        ]
        return update_entry(entry, state.applied, state.calibration.calls, dict.fromkeys(why))


_COMPILED = "inside of compiled code neither clamps nor blocks are looked at; what it returns is."


def guard(
    pipe: Any,
    plan: Plan | str | Path | None = None,
    *,
    on_fault: OnFault = "repair",
    observer: Observer | None = None,
    announce: Announce | None = None,
    journal: Journal | str | Path | None = None,
    maxima: bool = False,
    frames: bool = True,
) -> Guard:
    """Guard every component call of a program until the guard is removed.

    A run without a fault returns the same bits as without a guard.

    Args:
        pipe: a Diffusers pipeline; or a module, a dict of modules and methods (`{"unet": module,
            "vae.decode": (vae, "decode")}`), or an object that contains modules, whose attributes are
            walked. In programs other than pipelines, each outermost module call is guarded, and the
            attribute path is its name.
        plan: a `Plan`, or the path of its file: applied to the pipeline as long as the guard is active.
        on_fault: `repair`: repair the component, run the call again, continue. `raise`: stop with an
            error. `warn`: warn once and continue with the faulty output.
        observer: called after each call with component, stage, finished steps and all steps.
        announce: called with a text, once for each kind of repair; None warns with `StopdownWarning`.
        journal: folder, or open journal, for the outputs of calls: if the program is killed and started
            again, it continues there. Its limit is `journal.LIMIT_BYTES`; remove the folder after the run.
        maxima: record the largest magnitude of each block at each step, for `.record.maxima`.
        frames: report black, grey, frozen and noisy frames in the pipeline's output.

    Returns:
        A context manager and handle: `.record`, `.repairs`, `.remove()`, and `.updated_plan()` for the
        plan updated with the repairs.

    Raises:
        OptionError: `on_fault` is none of the three.
        PlanError: the plan doesn't belong to this pipeline.
        InputError: the journal belongs to another run, or is in use; the program contains no module; it
            contains a part of another guard's component, or the reverse.
        NonFiniteError: from the pipeline's call, if a fault isn't repaired.

    Cost: per call of a component, one operation for each floating argument, two for its outputs and one
        host read; one more operation for each module that clamps at fp16's maximum, and with `maxima` for
        each block's output. Per call of the pipeline, a pass over its result, and one host read for
        tensors. After a fault, an instrumented replay, and one run of the call for each repair that is
        tried.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 6e4 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> with stopdown.guard(module.half(), announce=lambda text: None) as guard:
        ...     bool(module(x.half()).isfinite().all())  # without a guard, NaN
        True
        >>> guard.repairs[0].action, guard.repairs[0].module_path
        ('rescaled', 'Sequential:0')
    """
    check_function("guard(announce=...)", announce, "announce=print", 1)
    check_function("guard(observer=...)", observer, "observer=print", 4)
    check_type(
        "guard(journal=...)",
        journal,
        (str, Path, Journal, type(None)),
        "It is a folder, or an open journal.",
        'Use journal="journal".',
    )
    options = GuardOptions(
        on_fault=on_fault,
        observer=observer,
        announce=announce,
        plan=None if plan is None else take_plan(plan),
        journal=journal,
        maxima=maxima,
        frames=frames,
    )
    before = getattr(pipe, "stopdown_guard", None)
    if isinstance(before, Guard) and before.pipe is pipe and before.is_on:
        return before.give_way(options)
    _refuse_overlap(pipe)
    return Guard(pipe, options).put_on()


def _refuse_overlap(pipe: Any) -> None:
    """Refuse a program if one guard would repair a part of another guard's component."""
    others = {id(x): x for guard in list(LEFT_ON) for x in find_components(guard.pipe).values()}
    for name, module in find_components(pipe).items():
        if id(module) in others:
            continue
        own = {id(part) for part in module.modules()}
        for other in others.values():
            if id(other) in own or any(part is module for part in other.modules()):
                inner, outer = (other, module) if id(other) in own else (module, other)
                raise InputError(
                    f"A guard was requested for {name}, a {type(module).__name__}, but a guard is already "
                    f"on a {type(other).__name__}.",
                    expected=f"The {type(inner).__name__} is a part of the {type(outer).__name__}, and "
                    "repairs of both would multiply the same values.",
                    remedy=f"Guard the {type(outer).__name__} alone.",
                )


_NOT_BOUNDED = "Its bounds didn't hold in a run, so it is no longer certified."


def update_entry(
    entry: ComponentPlan, applied: tuple[ComponentPlan, ...], calls: int, reasons: Iterable[str]
) -> ComponentPlan:
    """Return a component's plan entry updated with repairs that a guard has applied, for later runs.

    Casts of inputs are left out, because they depend on a script.

    Args:
        applied: the repairs.
        calls: number of failed calls that new exponents rest on.
        reasons: for the entry, in sentences.
    """
    found = bare = dataclasses.replace(entry, scaling=None, calls=0, reasons=())
    notes = tuple(reasons)
    for one in applied:
        action = name_action(one)
        if action == "rescaled" and one.scaling is not None:
            scaling = _withdraw_claims(one.scaling)
            found = describe_scaling(found, scaling, one.precision, entry.calls + calls, notes)
        elif action == "cast":
            found = dataclasses.replace(bare, precision=one.precision, reasons=notes)
        elif action == "fp32-module":
            scaling, path = found.scaling or Scaling(), split_module_path(one.component)[1]
            fp32_modules = tuple(dict.fromkeys((*scaling.fp32_modules, path)))
            scaling = dataclasses.replace(scaling, fp32_modules=fp32_modules)
            said = tuple(dict.fromkeys((*found.reasons, *notes)))
            found = dataclasses.replace(found, scaling=scaling, reasons=said)
    return found


def _withdraw_claims(scaling: Scaling) -> Scaling:
    """Return a scaling without its proven bounds and trial, which a repair has made invalid.

    The limits of the inputs stay, so that calls beyond them are still reported.
    """
    note = _NOT_BOUNDED if scaling.certified or scaling.bounded else scaling.range_note
    return dataclasses.replace(
        scaling,
        certified=False,
        values=0,
        bounded=0,
        uncertain=(),
        measured_bits=None,
        trial=None,
        range_note=note,
    )
