"""`guard`: intercept the component calls of a program, and repair what goes wrong there.

Around each component call lie two layers (`Rank.COMPONENT`, next to the component, and `Rank.GUARD`): one
keeps what the component is really called with, for a replay; the other checks what came out
(`call_check`) and has a fault answered (`fault_handler`). The repair stays until the guard is removed,
which leaves the program as it was, to the last bit. A pipeline's scheduler never sees the fault.

A pipeline's components are known from the start. Of any other program the calls of outermost modules are
found as they happen (`outermost_calls`); the layers lie there during the call and no longer.

What leaves the pipeline is looked at as well: a fault of the scheduler's last step, or of the pipeline's
own arithmetic behind it, reaches no component. It is named where it began, and stops the run.

**Catches** NaN and Inf in what a component returns or is given and in what the pipeline returns, from
any cause; fp16 clamps that were hit; frames that are black, grey, frozen or noise.
**Does not catch** arguments that a component changed in place before it failed. Calls that another
thread began before the guard was put on. Faults outside of the
components (in the scheduler, in the pipeline's own arithmetic) are named, not repaired. Components
whose parameters' gradients are wanted are left alone, which is said once: in training mode their calls, in
eval mode their faults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stopdown.argument_types import check_function, check_type
from stopdown.bounds.input_limits import Size
from stopdown.component_call_names import name_component, name_module_path, split_module_path
from stopdown.component_calls.call import ComponentCall
from stopdown.component_calls.call_interception import (
    Rank,
    find_module,
    find_slot,
    intercept,
    put_layer,
)
from stopdown.component_calls.components import (
    GENERAL,
    GENERAL_KEEPS,
    Callee,
    find_adapter,
    find_callees,
    find_component,
    find_components,
)
from stopdown.component_calls.outermost_calls import (
    entered,
    find_outermost,
    is_enclosed,
    is_in_training,
    listen,
    wants_gradients,
)
from stopdown.component_calls.pipeline_interception import put_run_layer
from stopdown.component_calls.step_counter import StepCounter
from stopdown.devices.model_needs import keeps_clamps
from stopdown.diagnosis import REFUSALS, is_refusal
from stopdown.errors import (
    InputError,
    NonFiniteError,
    OptionError,
    PlanError,
    ScalingError,
    take_first_line,
    warn_user,
)
from stopdown.frames.frame_faults import find_frame_findings
from stopdown.interception.patches import Patches
from stopdown.number_formats import name_dtype
from stopdown.numerics import iterate_tensors
from stopdown.plans.applier import check_plan, put_boundaries, watch_adapters
from stopdown.plans.plan_files import seal_plan, take_plan
from stopdown.plans.planned_loader import Loaded
from stopdown.records import (
    BlockMaximum,
    ComponentPlan,
    Finding,
    GuardRecord,
    Plan,
    Repair,
)
from stopdown.runtime.activation_maxima import is_compiled, put_sensors
from stopdown.runtime.call_check import CallCheck, check_call
from stopdown.runtime.component_locks import find_lock, is_changing
from stopdown.runtime.dtype_repairs import add_note
from stopdown.runtime.fault_handler import FaultHandler
from stopdown.runtime.fault_texts import Fault, name_counts
from stopdown.runtime.guarded_call import GuardedCall, GuardedComponent, RepeatableCall
from stopdown.runtime.hidden_values import noting_hidden
from stopdown.runtime.journal import Follower, Journal
from stopdown.runtime.outside_faults import Origin, find_origin
from stopdown.runtime.plan_updates import update_entry
from stopdown.runtime.rank_agreement import (
    agree_on_check,
    find_ranks,
    refuse_other_noise,
    refuse_other_runs,
)
from stopdown.runtime.repair_cache import RepairCache
from stopdown.runtime.repair_log import RepairLog
from stopdown.runtime.repair_order import ON_FAULT, OnFault
from stopdown.runtime.repairs import ComponentState, name_action
from stopdown.runtime.results import collect_videos, count_bad
from stopdown.runtime.session_check import WRONG_PICTURES, examine_calls
from stopdown.runtime.weight_history import WeightHistory
from stopdown.scaling.call_watch import ReplacedError, find_watch, has_passed

Announce = Callable[[str], None]
"""Told once of each kind of repair, in whole sentences."""

Observer = Callable[[str, str, int, int], None]
"""Told of each finished call: component, stage, steps done, steps in all (0 when unknown)."""


@dataclass(frozen=True)
class GuardOptions:
    """What a guard does, and whom it tells.

    Attributes:
        on_fault: `repair`: repair the component, run the call again, go on. `raise`: stop with what
            is known. `warn`: say it once and go on with the bad value.
        decisions: precision of each call with its reason, for messages.
        observer: told of each finished call.
        announce: told of each repair once; None warns with `StopdownWarning`.
        plan: put on the pipeline for as long as the guard is.
        loaded: by which plan the pipeline was loaded, in place of `plan`.
        journal: folder, or open journal.
        maxima: note the largest magnitude of each block at each step.
        repair_cache: what earlier guards found, put on from the start; what this one finds is added.
        frames: report black, grey, frozen and noisy frames in what the pipeline returns.
        names_culprit: run a call that failed once more to find where the fault begins.
        components: patterns of names or classes of components; empty for all.
        log: goes on with what other guards did; None begins anew.
        histories: weights as earlier guards met them; None begins anew.
        calls_before: of the component, under other guards.
    """

    on_fault: OnFault = "repair"
    decisions: tuple[ComponentPlan, ...] = ()
    observer: Observer | None = None
    announce: Announce | None = None
    plan: Plan | None = None
    loaded: Loaded | None = None
    journal: Journal | Follower | str | Path | None = None
    maxima: bool = False
    repair_cache: RepairCache | None = None
    frames: bool = True
    names_culprit: bool = True
    components: tuple[str, ...] = ()
    log: RepairLog | None = None
    histories: MutableMapping[torch.nn.Module, WeightHistory] | None = None
    calls_before: int = 0

    def wants(self, callee: Callee) -> bool:
        """Whether calls of a component are to be guarded."""
        words = (callee.name, type(callee.owner).__name__)
        found = (fnmatch.fnmatchcase(x, pattern) for x in words for pattern in self.components)
        return not self.components or any(found)

    def __post_init__(self) -> None:
        if self.on_fault not in ON_FAULT:
            raise OptionError(
                f"on_fault={self.on_fault!r} is unknown.",
                expected=f"Known values are {', '.join(ON_FAULT)}.",
                remedy='Use on_fault="repair".',
            )


LEFT_ON: weakref.WeakSet[Guard] = weakref.WeakSet()
"""Guards that were put on and not removed."""


class Guard:
    """What `guard` puts on a program; a context manager, and a handle with `record` and `remove`.

    Attributes:
        pipe: the program: a pipeline, a module, a dict of them, an object that holds modules.
        adapter: what is known of its family.
        options: as they were given.
        steps: of the run.
        host_reads: how often the host waited for values.
        own_s: seconds that the guard took itself.
    """

    def __init__(self, pipe: Any, options: GuardOptions | None = None) -> None:
        self.pipe, self.options = pipe, options or GuardOptions()
        self.adapter = find_adapter(pipe)
        self.host_reads, self.own_s = 0, 0.0
        self._ranks = find_ranks(pipe)
        is_silent = self._ranks is not None and self._ranks.number > 0  # the first one says it
        self._announce = self.options.announce or ((lambda text: None) if is_silent else warn_user)
        log = self.options.log
        self._log = RepairLog(self._announce) if log is None else log
        self._patches = Patches()
        self._components: dict[int, GuardedComponent] = {}
        self._calls: dict[str, GuardedCall] = {}
        self._maxima: dict[tuple[str, str, int | None, str], float] = {}
        self._plan: Plan | None = None
        self._journal: Journal | None = None
        self._repair_cache = self.options.repair_cache
        self._limits: dict[str, Mapping[str, float]] = {}  # of the plan's certificate
        self._sizes: dict[str, Mapping[str, Sequence[Size]]] = {}
        self._missed: list[str] = []
        self._reused: list[str] = []
        self._findings: list[Finding] = []
        self._running: set[int] = set()  # threads inside of the pipeline's call
        self._given: dict[str, Any] = {}  # what that was called with
        self._has_noise = False  # of this run, on every rank alike
        scheduled = pipe if self.adapter.is_pipeline else None
        self.steps = StepCounter(scheduled, Rank.GUARD, on_begin=self._renew)
        self._names: dict[int, str] = {}  # of modules whose calls are found as they happen
        self._is_left = threading.Event()  # it is removed, and the components are as they were
        self._counting = threading.RLock()  # threads that call at once
        self._handler = FaultHandler(
            pipe,
            self.options.on_fault,
            self._log,
            self.check,
            self._find_origin,
            self.options.names_culprit,
            self._ranks,
        )

    # What is put on

    def put_on(self) -> Guard:
        """Intercept the component calls; the guard itself comes back.

        Raises:
            PlanError: the plan does not belong to this pipeline. Nothing was changed.
            InputError: the journal belongs to another run, or is in use. Nothing was changed.
        """
        try:
            self._put_on()
        except BaseException:
            self._patches.undo()
            raise
        LEFT_ON.add(self)
        return self

    def _put_on(self) -> None:
        journal = self._open_journal()
        if self.options.plan is not None:
            check_plan(self.pipe, self.options.plan)
        for callee in self._list_callees():
            self._guard_call(callee)
        for module in find_components(self.pipe).values():
            self.steps.listen(module, self._patches)
        if self.options.plan is not None:
            self._put_plan(self.options.plan)
        if self.options.loaded is not None and not self.options.loaded.plan.is_bare:
            self._take_loaded_plan(self.options.loaded)
        self._reuse()
        for component in self._components.values():
            self._put_sensors(component)
        self.steps.follow()
        self._patches.defer(self.steps.stop)
        if self.adapter.is_pipeline:
            put_run_layer(self.pipe, self.run, self._patches)
        self._listen()
        if self._ranks is not None:
            self._ranks.watch(self._patches)
            refuse_other_runs(self._ranks, self.pipe, self._plan)
        for entry in self._plan.components if self._plan is not None else ():
            self.limit_inputs(entry.component, entry.in_force.limits, entry.in_force.sizes)
        self._put_journal(journal)

    def _list_callees(self) -> list[Callee]:
        """The calls that are known, and wanted."""
        return [x for x in find_callees(self.pipe) if self.options.wants(x)]

    def _open_journal(self) -> Journal | None:
        """The journal, None without one and on every rank but the first."""
        journal = self.options.journal
        if journal is not None and not self.adapter.is_pipeline:
            raise InputError(
                f"A journal was requested, but a {type(self.pipe).__name__} is not a pipeline.",
                expected="A journal identifies calls by their order in a pipeline's run.",
                remedy="Leave the journal out.",
            )
        if isinstance(journal, str | Path):
            opening = functools.partial(Journal, journal, announce=self._announce)
            journal = opening() if self._ranks is None else self._ranks.lead(opening)
            if journal is not None:
                self._patches.defer(journal.close)
        return journal if isinstance(journal, Journal) else None

    def _put_journal(self, journal: Journal | None) -> None:
        self._journal = journal

        def put_on() -> None:
            if journal is not None:
                journal.put_on(self.pipe, self._patches, lambda: len(self._log), self._ranks)

        if self._ranks is None or self.options.journal is None:
            put_on()
            return
        self._ranks.lead(put_on)
        if journal is None:
            Follower(self._ranks).put_on(self.pipe, self._patches)

    def _listen(self) -> None:
        """Find the calls of outermost modules as they happen, where the adapter does not know them."""
        modules = self.adapter.name_modules(self.pipe)
        self._names = {id(module): name for name, module in modules.items()}
        if self._has_free_methods:
            listen(self._meet_module, self._patches)
            for name, module in find_components(self.pipe).items():
                notice = functools.partial(self._notice_enclosed, name)
                self._patches.defer(module.register_forward_pre_hook(notice).remove)

    @property
    def _has_free_methods(self) -> bool:
        """Whether methods are known that may be called inside of another module's call."""
        return self.adapter.name == GENERAL.name

    def _notice_enclosed(self, name: str, module: torch.nn.Module, args: object) -> None:
        """A module that was given is called: report it once when another one's call encloses it."""
        enclosing = find_outermost()
        is_own = id(module) in self._names  # a copy has the hooks of what it is made of
        if is_own and enclosing not in (None, module) and id(enclosing) not in self._names:
            outer = type(enclosing).__name__
            text = (
                f"`{name}` is called inside of a {outer}, so its calls are not guarded. Give the "
                f"{outer} to the guard."
            )
            if text not in self._missed:
                self._missed.append(text)
                self._announce(text)

    @contextlib.contextmanager
    def _meet_module(self, module: torch.nn.Module, method: str) -> Iterator[None]:
        """Around the call of an outermost module: guarded when it is one of the program's."""
        name = self._names.get(id(module)) if method == "forward" else None
        if name is None or self._leaves(module, name):
            yield
            return
        callee = Callee(name, module, "forward", "call", GENERAL_KEEPS)
        if not self.options.wants(callee) or not self._admit(self._find_component(callee), name):
            yield
            return
        with self._counting:
            guarded = None if self._handler.is_over else self._calls.get(name)
            if not (self._handler.is_over or (guarded is not None and guarded.users)):
                self._guard_call(callee)
                guarded = self._calls[name]
                self._put_sensors(guarded.component)
            if guarded is not None:
                guarded.users += 1
        if guarded is None and not is_changing():
            self._is_left.wait()
        try:
            yield
        finally:
            with self._counting:
                if guarded is not None:
                    guarded.users -= 1
                    if not guarded.users:
                        guarded.patches.undo()

    def _leaves(self, module: torch.nn.Module, name: str) -> bool:
        """Whether a call of now is one of training, which is said once."""
        if not is_in_training(module):
            return False
        self._log.leave(
            name,
            f"`{name}` is in training: an optimizer has its parameters, or they have gradients. Its calls "
            "are not watched; those under torch.no_grad() are.",
        )
        return True

    def _admit(self, component: GuardedComponent, name: str) -> bool:
        """Whether a component is guarded; not when a part of it, or what it is a part of, is already."""
        with self._counting:
            if component.is_admitted is None:
                inside = {id(part) for part in component.state.module.modules()}
                other = next((x for x in self._components.values() if x.overlaps(inside)), None)
                component.is_admitted = other is None
                if other is not None:
                    names = [x.name for x in other.calls] or [type(other.state.module).__name__]
                    said = f"{name}: it shares modules with {names[0]}, which is guarded; "
                    self._missed.append(f"{said}its own calls were not watched.")
            return component.is_admitted

    def _guard_call(self, callee: Callee) -> None:
        """Intercept a component call; at another object in the component's place no more."""
        component, slot = self._find_component(callee), find_slot(callee)
        guarded = self._calls.get(callee.name)
        if guarded is None:
            guarded = self._calls[callee.name] = GuardedCall(callee, component, slot)
            guarded.limits, guarded.sizes = self._find_limits(callee)
            self._patches.defer(guarded.patches.undo)
        guarded.move_to(callee, component, slot)
        component.state.name, component.state.announce = callee.component_name, self._announce
        component.state.on_extended = functools.partial(self._note_extended, guarded)
        component.state.is_compiled |= guarded.is_compiled
        for rank, layer in (
            (Rank.COMPONENT, self._call_component),
            (Rank.GUARD, self._call_checked),
        ):
            intercept(callee, functools.partial(layer, guarded), guarded.patches, rank)
        whole = "_call_impl" if slot == "forward" else slot  # with the hooks of the module
        begin = functools.partial(self._call_whole, guarded)
        put_layer(callee.owner, whole, begin, guarded.patches, Rank.TURN)

    def _find_component(self, callee: Callee) -> GuardedComponent:
        return self._find_module(find_module(callee))

    def _find_module(self, module: torch.nn.Module) -> GuardedComponent:
        with self._counting:
            component = self._components.get(id(module))
            if component is None:
                component = self._components[id(module)] = GuardedComponent(ComponentState(module))
                if self.options.histories is not None:
                    component.weights = self.options.histories.setdefault(module, WeightHistory())
                self._patches.defer(component.state.leave)
            return component

    def _put_sensors(self, component: GuardedComponent) -> None:
        """Note what its modules give; outside of the hooks that a plan put there."""
        if not component.is_sensed and not any(
            is_compiled(x.callee.owner) for x in component.calls
        ):
            module, notes = component.state.module, component.notes
            put_sensors(module, notes, self._patches, maxima=self.options.maxima)
        component.is_sensed = True

    def _renew(self) -> None:
        """Intercept the calls of components that were compiled or replaced since."""
        for callee in self._list_moved():
            if callee.stage == "encode" and not self._running:  # called without the pipeline
                self._missed.append(
                    f"{callee.name}: it was compiled or replaced under the guard; calls "
                    "before the next run's first step were not watched."
                )
            self._guard_call(callee)
            self._put_sensors(self._calls[callee.name].component)

    def _note_extended(self, guarded: GuardedCall, method: str, what: str) -> None:
        """Exponents were found that hold for one more kind of call of a component."""
        name = guarded.callee.component_name
        name = name if method == "forward" else f"{name}.{method}"
        self._log.keep(
            Repair(
                component=name,
                module_path=guarded.callee.component_name,
                kind="signature",
                step=None,
                evidence=f"`{name}` was called {what}, for which its exponents did not hold.",
                action="rescaled",
                reason="Its exponents were found anew, for these calls and those before.",
            )
        )

    def _list_moved(self) -> list[Callee]:
        """Component calls that go past the guard: of components that were compiled or replaced."""
        places = {name: (call.callee.owner, call.slot) for name, call in self._calls.items()}
        return [
            callee
            for callee in self._list_callees()
            if (place := places.get(callee.name)) is None
            or place[0] is not callee.owner
            or place[1] != find_slot(callee)
        ]

    def _put_plan(self, plan: Plan) -> None:
        try:
            for entry in plan.components:
                self._find_state(entry).plan(_list_entries(entry))
        except ScalingError as error:
            raise PlanError(
                f"The plan for {plan.source} does not fit the pipeline: {error.what}",
                remedy="Make a plan for it: stopdown plan SOURCE.",
            ) from error
        put_boundaries(self.pipe, plan, self._patches)
        watch_adapters(self.pipe, plan, self._patches)
        self._plan = plan

    def _take_loaded_plan(self, loaded: Loaded) -> None:
        for entry in loaded.plan.components:
            off = loaded.off[entry.component]
            self._find_state(entry).stand_under(_list_entries(entry), off)
        self._plan = loaded.plan

    def _find_state(self, entry: ComponentPlan) -> ComponentState:
        module = find_component(self.pipe, entry.component)
        if module is None:
            raise ScalingError(f"There is no {entry.component} any more.")
        component = self._find_module(module)
        component.is_admitted = True  # another call of a part of it is no component
        return component.state

    def _reuse(self) -> None:
        """Put on what an earlier guard of the same components found."""
        if self._repair_cache is None:
            return
        for name, module in find_components(self.pipe).items():
            component = self._components.get(id(module))
            for applied in self._repair_cache.put_on(component.state) if component else ():
                place = name_module_path(name, split_module_path(applied.component)[1])
                self._reused.append(f"{place}: {name_action(applied)} ({applied.precision})")

    def limit_inputs(
        self,
        component: str,
        limits: Mapping[str, float],
        sizes: Mapping[str, Sequence[Size]] | None = None,
    ) -> None:
        """Compare a component's arguments with the limits of its plan's certificate.

        Args:
            limits: `forward.hidden_states` to the magnitude up to which it holds.
            sizes: the same to the sizes, without the batch.
        """
        self._limits[component], self._sizes[component] = limits, sizes or {}
        for call in self._calls.values():
            call.limits, call.sizes = self._find_limits(call.callee)

    def _find_limits(self, callee: Callee) -> tuple[dict[str, float], dict[str, Sequence[Size]]]:
        """Argument to the magnitude, and to the sizes, up to which a plan's certificate holds for it."""

        def choose(entries: Mapping[str, Any]) -> dict[str, Any]:
            parts = [(key.partition("."), limit) for key, limit in entries.items()]
            return {name: limit for (method, _, name), limit in parts if method == callee.method}

        name = callee.component_name
        return choose(self._limits.get(name, {})), choose(self._sizes.get(name, {}))

    def __repr__(self) -> str:
        found = f"{len(self._log)} fault{'s' * (len(self._log) != 1)} so far"
        return (
            f"Guard(of a {type(self.pipe).__name__}, on_fault={self.options.on_fault!r}, {found})"
        )

    def remove(self) -> None:
        """Leave the pipeline as it was, to the last bit. A second call does nothing."""
        LEFT_ON.discard(self)
        repair_cache, self._repair_cache = self._repair_cache, None
        with self._counting:
            self._handler.is_over = True
            components = list(self._components.values())
        found = []
        try:
            for component in components:
                lock = find_lock(component.state.module)
                with lock.changing():  # calls of other threads are over
                    if component.state.is_repaired:
                        found.append((component.state, component.state.applied))
                    component.state.leave()
                    for call in component.calls:
                        call.patches.undo()
        finally:
            self._is_left.set()
        self._patches.undo()
        for call in self._calls.values():
            call.forget()
        for state, applied in found:
            if repair_cache is not None:
                repair_cache.keep(state, applied)

    def give_way(self, options: GuardOptions) -> Guard:
        """Put another guard in the place of this one, which comes back when that is removed.

        Raises:
            PlanError, InputError: as `put_on`; this guard is on again then.
        """
        self.remove()
        own = dataclasses.replace(self.options, loaded=None)
        if options.plan is None and not self.repairs:
            loaded = dataclasses.replace(options, loaded=self.options.loaded)
            options, own = loaded, self.options
        other = Guard(self.pipe, dataclasses.replace(options, decisions=self.options.decisions))
        other._patches.defer(functools.partial(_guard_again, self.pipe, own))  # comes off last
        return other.put_on()

    def __deepcopy__(self, memo: object) -> Guard:
        return self  # hooks name it: a copy of a guarded module is not guarded

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.remove()
        except Exception as failure:  # memory may have run out: why the run ended is what counts
            if error is None:
                raise
            add_note(error, f"The pipeline could not be restored: {take_first_line(failure)}")

    # The layers around a component call

    def _call_whole(self, guarded: GuardedCall, call: ComponentCall) -> Any:
        """Around a call with all hooks of its module: no other thread changes that meanwhile.

        Where exponents are on, the layer that asks for them sees to it.
        """
        watch = find_watch(guarded.module)
        if is_changing() or (watch is not None and watch.has_call_here):
            return call.proceed()
        with find_lock(guarded.module).calling(), contextlib.suppress(ReplacedError):
            if find_watch(guarded.module) is None and not self._handler.is_over:
                return call.proceed()
        return call.begin_again(guarded.module)  # other layers are there now

    def _call_component(self, guarded: GuardedCall, call: ComponentCall) -> Any:
        """Next to the component: what it is really called with is kept for a replay."""
        with find_lock(guarded.module).calling():
            if not (is_changing() or has_passed(guarded.module)):
                raise ReplacedError
            begun = time.perf_counter()
            guarded.keep_latest(call, self.pipe)
            components = list(self._components.values())  # another thread may add one
            is_mixed = any(x.state.dtype is not None for x in components)
            self.own_s += time.perf_counter() - begun
            with self._noting(guarded):
                return guarded.state.call(call, is_mixed=is_mixed)

    def _noting(self, guarded: GuardedCall) -> AbstractContextManager[None]:
        """With what its code hides noted; compiled code would be compiled anew for that."""
        is_known = keeps_clamps(type(guarded.module).__name__)  # what it hides is part of the model
        compiled = any(x.is_compiled for y in self._components.values() for x in y.calls)
        if is_known or compiled or self._ranks is not None:
            return contextlib.nullcontext()
        return noting_hidden(guarded.component.notes.note_hidden)

    def _call_checked(self, guarded: GuardedCall, call: ComponentCall) -> Any:
        """Check what came out, and have a fault answered; a call inside of another one is left alone."""
        try:
            if not self._has_free_methods:
                return self._check_call(guarded, call)
            owner, method = guarded.callee.owner, guarded.callee.method
            if is_enclosed(owner, method) or self._leaves(guarded.module, guarded.name):
                return call.proceed()
            if not self._admit(guarded.component, guarded.name):
                return call.proceed()
            with entered(owner, method):
                return self._check_call(guarded, call)
        except ReplacedError:  # the call that is made instead is the one that counts
            if find_lock(guarded.module).is_calling:  # it begins anew, with the module's hooks
                raise
            return call.begin_again(guarded.module)

    def _check_call(self, guarded: GuardedCall, call: ComponentCall) -> Any:
        entered_at = time.perf_counter()
        guarded.begin(call)
        repeat = RepeatableCall(call)
        if self._ranks is not None and guarded.callee.stage == "denoise" and not self._has_noise:
            refuse_other_noise(self._ranks, call)
            self._has_noise = True
        called = time.perf_counter()
        try:
            output = call.proceed()
        except REFUSALS as error:
            if not is_refusal(error):
                raise
            guarded.note_kept()
            fault = self._make_fault(guarded, call)
            output = self._handler.answer_refusal(fault, error)
        returned = time.perf_counter()
        guarded.note_kept()
        check = self.check(guarded, output)
        repeat.ends, guarded.latest.repeat = check.ends, repeat
        with self._counting:
            guarded.count_call(returned - called, check)
        if check.inputs or not check.is_good:
            fault = self._make_fault(guarded, call, output, check)
            output = self._handler.answer(fault)
        if self.options.observer is not None:
            done, total = self.steps.done, self.steps.total
            self.options.observer(guarded.name, guarded.callee.stage, done, total)
        self.own_s += (called - entered_at) + (time.perf_counter() - returned)
        return output

    def _make_fault(
        self,
        guarded: GuardedCall,
        call: ComponentCall,
        output: Any = None,
        check: CallCheck | None = None,
    ) -> Fault:
        """A call that went wrong; without an output it ended in an error."""
        return Fault(
            guarded,
            call,
            output,
            check or CallCheck(),
            guarded.precision,
            *self._locate(guarded),
            self._name_reason(guarded),
            not self.adapter.is_pipeline and wants_gradients(guarded.module),
        )

    def check(self, guarded: GuardedCall, output: Any) -> CallCheck:
        """What a call's output and arguments are like; maxima and what a plan does not cover are kept.

        Cost: two operations, one for each module that clamps, and one host read; with ranks one
        all_reduce.
        """
        check = check_call(guarded.component.notes, output)
        if self._ranks is not None:
            check = agree_on_check(self._ranks, check)
        with self._counting:
            self.host_reads += check.host_reads
            for path, dtype, amax in check.maxima:
                key = (guarded.name, path, self.steps.find_step(guarded.callee), name_dtype(dtype))
                self._maxima[key] = max(self._maxima.get(key, 0.0), amax)
            for sentence in guarded.note_excesses(check):
                self._announce(sentence)
        return check

    def _locate(self, guarded: GuardedCall) -> tuple[int | None, str]:
        """The step of the latest call from 0, None outside of denoising; and ` at step 2 of 28`.

        Where nothing counts steps, ` at its call 3`.
        """
        if self.adapter.is_pipeline or self.steps.is_told:
            return self.steps.find_step(guarded.callee), self.steps.name_step(guarded.callee)
        kwargs = guarded.latest.call.kwargs if guarded.latest.call is not None else {}
        if (found := self.adapter.read_step(kwargs)) is not None:
            return found[0], f" at step {found[0] + 1} of {found[1]}"
        return None, f" at its call {guarded.count + self.options.calls_before}"

    def _name_reason(self, guarded: GuardedCall) -> str:
        chosen = (x for x in self.options.decisions if x.component == guarded.name)
        said = (f'{x.precision} was chosen for it: "{x.reason}"' for x in chosen)
        return next(said, "")

    # The pipeline's call

    def run(self, call: ComponentCall) -> Any:
        """One call of the pipeline, with what leaves it looked at.

        Args:
            call: of the pipeline itself.

        Raises:
            NonFiniteError: it returned NaN or Inf, and `on_fault` is not `warn`.

        Cost: a pass over the result; one host read when that holds tensors.
        """
        thread = threading.get_ident()
        if thread in self._running:  # a class that calls its parent's `__call__`
            return call.proceed()
        self._running.add(thread)
        try:
            self._begin_run(call)
            with self._ranks.ending() if self._ranks is not None else contextlib.nullcontext():
                output = call.proceed()
                begun = time.perf_counter()
                self._check_result(output)
            self.own_s += time.perf_counter() - begun
            return output
        finally:
            self._running.discard(thread)
            self._given = {}

    def _begin_run(self, call: ComponentCall) -> None:
        self._has_noise = False
        self._renew()
        self.steps.follow()
        self.steps.forget()
        names = list(inspect.signature(type(self.pipe).__call__).parameters)[1:]
        self._given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        self._log.begin_run()

    def _check_result(self, output: Any) -> None:
        nan, infinite, total = count_bad(output)
        if self._ranks is not None and any(self._ranks.agree(nan + infinite > 0)):
            nan, infinite, total = max(self._ranks.gather((nan, infinite, total)))
        self.host_reads += any(x.is_floating_point() for x in iterate_tensors(output))
        is_reported = any(repair.action == "none" for repair in self._log.of_this_run)
        if nan + infinite == 0:
            self.check_frames(output)
        elif not is_reported:
            counts = name_counts(nan, infinite)
            self._report_result(f"The pipeline's result holds {counts} in {total} values.")

    def _report_result(self, what: str) -> None:
        """Values that are not finite and that no component made: keep them, and stop the run."""
        origin = self._find_origin()
        repair = Repair(
            component="pipeline",
            module_path=origin.source,
            kind="input",
            step=None,
            evidence=f"{origin.what} {what}",
            action="none",
            reason="No component caused it, so there is nothing to repair.",
        )
        self._log.keep(repair)
        if self.options.on_fault != "warn":
            raise NonFiniteError(origin.what, expected=what, remedy=origin.remedy)

    def check_frames(self, output: Any) -> None:
        """Report black, grey, frozen and noisy pictures, and whether it is the session's fault.

        Args:
            output: what a pipeline returned; or a tuple of pictures `[B, H, W, 3]` in 0 to 1.

        Cost: a pass over the pictures; what `examine_calls` costs after one that is wrong.
        """
        if not self.options.frames or self._given.get("output_type") == "latent":
            return
        found = [
            finding
            for number, frames in enumerate(collect_videos(output), 1)
            for finding in find_frame_findings(frames, f"result {number}")
        ]
        is_alone = len(self._running) <= 1  # the latest calls are those of this run
        if is_alone and self._ranks is None and any(x.kind in WRONG_PICTURES for x in found):
            found += examine_calls(self._calls.values(), self.pipe)
        for finding in found:
            self._findings.append(finding)
            text = f"{finding.module_path}: {finding.evidence} {finding.remedy}"
            self._log.report_once("pipeline", f"{finding.kind} {finding.module_path}", text)

    def _find_origin(self) -> Origin:
        """Where values came from that are not finite, when no component made them."""
        unseen = [
            f"No tensor could be looked at in what `{call.name}` gave."
            for call in self._calls.values()
            if call.unseen
        ]
        moved = [
            f"`{callee.name}` was compiled or replaced under the guard and not watched."
            for callee in self._list_moved()
        ]
        return find_origin(self.steps, self._log.of_this_run, self._given, [*unseen, *moved])

    # What came of it

    @property
    def record(self) -> GuardRecord:
        """What was seen and done so far."""
        calls = self._calls.values()
        return GuardRecord(
            pipeline=type(self.pipe).__name__,
            calls=tuple(call.summarize() for call in calls if call.count),
            repairs=self._log.repairs,
            host_reads=self.host_reads,
            unwatched=(
                *(_describe_compiled(x) for x in calls if x.is_compiled),
                *self._missed,
                *self._log.left,
            ),
            own_s=self.own_s + (self._journal.own_s if self._journal else 0.0),
            maxima=tuple(
                BlockMaximum(component, path, step, precision, amax if amax < torch.inf else None)
                for (component, path, step, precision), amax in self._maxima.items()
            ),
            journal=self._journal.use if self._journal else None,
            reused=tuple(self._reused),
            uncertified=tuple(text for call in calls for text in call.list_excesses()),
            findings=tuple(self._findings),
        )

    @property
    def is_on(self) -> bool:
        """Whether it was put on and not removed."""
        return self in LEFT_ON

    @property
    def plan(self) -> Plan | None:
        """The plan that is on the pipeline; None without one."""
        return self._plan

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """One for each fault, in order."""
        return self._log.repairs

    def updated_plan(self) -> Plan | None:
        """The plan with the repairs in it, sealed; None when there is no plan, or was no repair."""
        if self._plan is None or not any(
            x.state.is_planned_anew for x in self._components.values()
        ):
            return None
        entries = tuple(self._update(entry) for entry in self._plan.components)
        return seal_plan(dataclasses.replace(self._plan, components=entries))

    def _update(self, entry: ComponentPlan) -> ComponentPlan:
        component = self._components.get(id(find_component(self.pipe, entry.component)))
        if component is None or not component.state.is_planned_anew:  # None: it was replaced
            return entry
        why = [
            f"A run repaired it: {x.evidence} {x.reason}"
            for x in self._log.repairs
            if name_component(x.component) == entry.component
            and x.action not in ("none", "replayed")
        ]
        state = component.state
        return update_entry(entry, state.applied, state.calibration.calls, dict.fromkeys(why))


def _list_entries(entry: ComponentPlan) -> tuple[ComponentPlan, ...]:
    """Return what of a plan's entry is in force on its component."""
    return () if entry.precision == "as loaded" else (entry,)


def _guard_again(pipe: Any, options: GuardOptions) -> None:
    pipe.stopdown_guard = Guard(pipe, options).put_on()


def _describe_compiled(call: GuardedCall) -> str:
    return (
        f"{call.name}: inside of compiled code neither clamps nor blocks are looked at; what it "
        "returns is."
    )


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

    A run without a fault gives the same bits as without a guard.

    Args:
        pipe: a Diffusers pipeline; or a module, a dict of modules and methods (`{"unet": module,
            "vae.decode": (vae, "decode")}`), or an object that holds modules, whose attributes are
            walked. Of these a component is each call that no other module's call encloses, and its
            name is the attribute path.
        plan: a `Plan`, or the path of its file: put on the pipeline for as long as the guard is.
        on_fault: `repair`: repair the component, run the call again, go on. `raise`: stop with what
            is known. `warn`: say it once and go on with the bad value.
        observer: told of each finished call.
        announce: told of each repair once; None warns with `StopdownWarning`.
        journal: folder, or open journal, for the outputs of calls: after a kill the same program
            goes on where it stopped. Its bound is `journal.LIMIT_BYTES`; remove the folder when the
            run is done.
        maxima: note the largest magnitude of each block at each step, for `.record.maxima`.
        frames: report black, grey, frozen and noisy frames in what the pipeline returns.

    Returns:
        A context manager and handle: `.record`, `.repairs`, `.remove()`, and `.updated_plan()` for the
        plan with the repairs in it.

    Raises:
        OptionError: `on_fault` is none of the three.
        PlanError: the plan does not belong to this pipeline.
        InputError: the journal belongs to another run, or is in use; the program holds no module; it
            holds a part of what another guard is on, or the reverse.
        NonFiniteError: out of the pipeline's call, when a fault is not repaired.

    Cost: per call of a component an operation for each floating argument, two for its outputs and
        one host read; one operation more for each module that clamps at fp16's maximum, and with
        `maxima` for each output of a block. Per call of the pipeline a pass over its result, and one
        host read for tensors. After a fault an instrumented replay, and one run of the call for each
        repair that is tried.
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
    """Refuse a program if what one guard would repair is a part of what another guard does.

    Raises:
        InputError: with both names.
    """
    others = {id(x): x for guard in list(LEFT_ON) for x in find_components(guard.pipe).values()}
    for name, module in find_components(pipe).items():
        if id(module) in others:
            continue
        own = {id(part) for part in module.modules()}
        for other in others.values():
            if id(other) in own or any(part is module for part in other.modules()):
                inner, outer = (other, module) if id(other) in own else (module, other)
                raise InputError(
                    f"A guard was requested for {name}, a {type(module).__name__}, and a guard is on a "
                    f"{type(other).__name__} already.",
                    expected=f"The {type(inner).__name__} is a part of the {type(outer).__name__}, and "
                    "repairs of both would multiply the same values.",
                    remedy=f"Guard the {type(outer).__name__} alone.",
                )
