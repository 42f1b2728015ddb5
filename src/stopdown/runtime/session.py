"""`Session`: the component calls of one guarded program, and the guard's layers around them.

Three classes hold a guard's state. A `Session` owns the program, the guard's options and log, the plan's
exponents, the step counter, and the other two; it decides what is guarded, until `stage` ends it. A
`Component` (`repairs`) owns one module: its plan entry and repairs, the ranges of its failed calls, and
the activation ranges of its modules. A `Call` (`guarded_call`) owns one way of calling a component: its
layers, its latest arguments and its statistics. A session has one component for each module and one call
for each name; several calls may share a component. `watch`, `fault_handler` and `run_check` work on these
and keep no state of calls. Around each call are the layers of the session's two listeners: the inner one
records the component's actual arguments (`Rank.COMPONENT`), the outer one checks its output
(`Rank.GUARD`). Around all hooks of the module, a further layer keeps other threads from changing it. A
pipeline's components are known from the start. In any other program, outermost module calls are found as
they happen (`outermost_calls`), and the layers exist only during the call.

**Catches** components that are compiled or replaced in the meantime, and so are their methods; calls of
several threads.
**Does not catch** calls that another thread began before the session was put on. Calls inside of another
module's call that isn't part of the program are reported, not guarded.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from stopdown.component_calls.components import GENERAL, find_adapter, find_callees, find_components
from stopdown.component_calls.stated_dtypes import state_dtypes
from stopdown.component_calls.step_counter import StepCounter
from stopdown.devices.environment import count_processes
from stopdown.errors import OptionError, warn_user
from stopdown.interception.component_locks import find_lock, is_changing
from stopdown.interception.patches import Patches, SameInCopies
from stopdown.interception.tracing import is_traced
from stopdown.module_calls.call_interception import find_module, find_slot, put_layer
from stopdown.module_calls.callee import GENERAL_KEEPS, Callee
from stopdown.module_calls.entrances import ReplacedError
from stopdown.module_calls.outermost_calls import (
    entered,
    find_outermost,
    hides_overflow,
    is_enclosed,
    is_in_training,
    is_plain,
    listen,
)
from stopdown.records import BlockMaximum, ComponentPlan, Plan, Scaling
from stopdown.runtime.activation_maxima import is_compiled
from stopdown.runtime.call_check import CallCheck, check_call
from stopdown.runtime.guarded_call import Call
from stopdown.runtime.journal import Journal
from stopdown.runtime.kept_code import KeptCode
from stopdown.runtime.repair_cache import RepairCache
from stopdown.runtime.repair_log import RepairLog
from stopdown.runtime.repair_order import ON_FAULT, OnFault
from stopdown.runtime.repairs import Admission, Calibration, Component, computes_bf16
from stopdown.scaling import CallWatch, ComponentCall, Rank, intercept
from stopdown.sources.hub import Progress

_PATIENCE_S = 0.01
"""Seconds that a call waits at a time for a guard's removal, which may itself wait for an outer call."""

Listener = Callable[[Call, ComponentCall], Any]
"""A function that runs around a component call; it continues by `call.proceed()` and returns the output."""


Announce = Callable[[str], None]
"""A function that receives a message for the user, once for each kind of repair."""

Observer = Callable[[str, str, int, int], None]
"""A function of each finished call's component, stage, finished steps and all steps (0 if unknown)."""


def tell_calls(progress: Progress) -> Observer:
    """Make an observer for a guard that reports component calls to a progress display.

    After the last step, it reports decoding.
    """

    def observe(component: str, stage: str, done: int, total: int) -> None:
        progress(stage, component, done + (stage == "denoise"), total)
        if stage == "denoise" and done + 1 >= total > 0:
            progress("decode", "", 0, 0)

    return observe


@dataclass(frozen=True)
class GuardOptions:
    """The options of a guard; those that aren't listed here are as for `guard`.

    Attributes:
        decisions: precision of each call with its reason, for messages.
        plan: applied before the guard, and removed with it.
        repair_cache: repairs of earlier guards, applied from the start; this guard's are added.
        names_culprit: run a failed call once more to find where the fault begins.
        components: patterns of names or classes of the components to guard; empty for all.
        log: of earlier guards, to be continued; None starts a new one.
        calls_before: number of the component's calls under earlier guards, for messages.
        hands_back: report a fault that can't be repaired, and return the model's output; False ends the
            run.
    """

    on_fault: OnFault = "repair"
    decisions: tuple[ComponentPlan, ...] = ()
    observer: Observer | None = None
    announce: Announce | None = None
    plan: Plan | None = None
    journal: Journal | str | Path | None = None
    maxima: bool = False
    repair_cache: RepairCache | None = None
    frames: bool = True
    names_culprit: bool = True
    components: tuple[str, ...] = ()
    log: RepairLog | None = None
    calls_before: int = 0
    hands_back: bool = False

    def wants(self, callee: Callee) -> bool:
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


class Session(SameInCopies):
    """The components and calls of one program, with the layers of a guard's listeners around them.

    Attributes:
        components: `id` of the module → component.
        calls: name, such as `vae.decode` → call.
        planned: component → exponents of its plan.
        turn: lock for the statistics, and condition to wait until `stage` is `left`.
        stage: `on`; `leaving`: the guard is being removed, and faulty calls are made again without it;
            `left`: all components are restored.
    """

    def __init__(self, pipe: Any, options: GuardOptions) -> None:
        self.pipe, self.options = pipe, options
        announce = options.announce or warn_user
        self.log = RepairLog(announce) if options.log is None else options.log  # one may be empty
        scheduled = find_adapter(pipe).find_scheduled(pipe)
        on_begin = functools.partial(self.follow, is_late=True)
        self.steps = StepCounter(scheduled, Rank.GUARD, on_begin=on_begin)
        self.patches = Patches()
        self.components: dict[int, Component] = {}
        self.calls: dict[str, Call] = {}
        self.planned: dict[str, Scaling] = {}
        self.host_reads = 0
        self.turn = threading.Condition()
        self.stage: Literal["on", "leaving", "left"] = "on"
        self._listeners: tuple[Listener, Listener] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the guard is removed, or is being removed."""
        return self.stage != "on"

    @property
    def names_culprit(self) -> bool:
        """Whether a failed call is run once more to find where it begins; not with several processes."""
        return self.options.names_culprit and count_processes() == 1

    def has_bf16(self, guarded: Call) -> bool:
        """Return whether the device that computes a call computes bf16 natively."""
        return computes_bf16(guarded.find_device(self.pipe))

    def put_on(self, inner: Listener, outer: Listener) -> None:
        """Intercept the component calls that are known before a run, such as a pipeline's.

        Args:
            inner: listener next to the component.
            outer: listener outside of plans and memory strategies.
        """
        self._listeners = inner, outer
        self.patches.defer(self._leave_all)
        for callee in self._list_callees():
            self._guard_call(callee)

    def listen(self) -> None:
        """Intercept outermost module calls as they happen, in a program that isn't a pipeline."""
        if not self._has_free_methods:
            return
        modules = find_adapter(self.pipe).name_modules(self.pipe)
        names = {id(module): name for name, module in modules.items()}
        listen(functools.partial(self._meet_module, names), self.patches)
        for name, module in find_components(self.pipe).items():
            noticed = functools.partial(self._notice_enclosed, names, name)
            self.patches.defer(module.register_forward_pre_hook(noticed).remove)
            noticed = functools.partial(self._notice_transformed, name)
            self.patches.defer(module.register_forward_pre_hook(noticed).remove)

    @property
    def _has_free_methods(self) -> bool:
        """Whether the program's methods may be called inside of other calls as well."""
        return find_adapter(self.pipe) is GENERAL

    def follow(self, *, is_late: bool = False) -> None:
        """Intercept the calls of components that were compiled or replaced since the last time, and drop
        those that the program no longer has.

        Args:
            is_late: the run has begun, so its encoders were already called.
        """
        if not is_late:
            self._drop_gone()
        for callee in self.list_moved():
            if is_late and callee.stage == "encode":
                self.log.leave(
                    f"{callee.name}, moved",
                    f"{callee.name}: it was compiled or replaced under the guard; calls "
                    "before the next run's first step weren't watched.",
                    is_fault=False,
                )
            self._guard_call(callee)

    def _follow_methods(self, now: str | None = None) -> None:
        """Intercept known calls again whose method was replaced on the module, as by a step cache.

        Args:
            now: name of the call that is made now, which is watched from its beginning. None for a call
                of a module that a program's method may have made: that is watched by itself, or reported.
        """
        for name, guarded in list(self.calls.items()):
            if not guarded.is_bypassed:
                continue
            with self.turn:
                if not self.is_over and guarded.is_bypassed:
                    self._guard_call(guarded.callee)
            if now not in (None, name):
                self.log.leave(
                    f"{name}, replaced",
                    f"{name}: its method was replaced under the guard; calls before the next one of "
                    f"{now} weren't watched.",
                    is_fault=False,
                )

    def _drop_gone(self) -> None:
        """Restore components that the program no longer has, and keep nothing of them but the calls'
        statistics, so that their memory is freed.
        """
        there = {id(find_module(x)) for x in find_callees(self.pipe)}
        for state in [x for x in list(self.components.values()) if id(x.module) not in there]:
            with find_lock(state.module).changing():
                state.leave()
                for call in self.list_calls(state):
                    call.move_to(replace(call.callee, owner=_NO_MODULE), Component(_NO_MODULE), "")
            with self.turn:
                del self.components[id(state.module)]

    def list_moved(self) -> list[Callee]:
        """List component calls that bypass the guard, because the component was compiled or replaced."""
        places = {name: (call.callee.owner, call.slot) for name, call in self.calls.items()}
        return [
            callee
            for callee in self._list_callees()
            if (place := places.get(callee.name)) is None
            or place[0] is not callee.owner
            or place[1] != find_slot(callee)
        ]

    def leave(self) -> list[tuple[Component, Any]]:
        """End the guard: take repairs off each component under its lock, then remove all layers.

        Returns:
            Repaired components with the repairs that were applied.
        """
        with self.turn:
            self.stage = "leaving"
            components = list(self.components.values())
        found = []
        try:
            for state in components:
                with find_lock(state.module).changing():  # calls of other threads are over
                    if state.applied and state.is_repaired:
                        found.append((state, state.applied))
                    self._leave_one(state)
        finally:
            with self.turn:
                self.stage = "left"
                self.turn.notify_all()
        self.patches.undo()
        for call in self.calls.values():
            call.forget()
        return found

    def _leave_all(self) -> None:
        for state in list(self.components.values()):
            self._leave_one(state)

    def _leave_one(self, state: Component) -> None:
        state.leave()
        for call in self.list_calls(state):
            call.patches.undo()

    def find_component(self, module: torch.nn.Module) -> Component:
        """Return the `Component` of a module; create it at the first call."""
        with self.turn:
            state = self.components.get(id(module))
            if state is None:
                state = self.components[id(module)] = Component(
                    module,
                    log=self.log,
                    calibration=Calibration(
                        may_repair=self.options.on_fault != "raise",
                        hands_back=self.options.hands_back,
                    ),
                )
                state_dtypes([module], (), self.patches)
            return state

    def list_calls(self, state: Component) -> list[Call]:
        return [call for call in list(self.calls.values()) if call.state is state]

    def _list_callees(self) -> list[Callee]:
        return [x for x in find_callees(self.pipe) if self.options.wants(x)]

    def _guard_call(self, callee: Callee) -> None:
        """Intercept a component call; if it was intercepted on another module before, move it."""
        assert self._listeners is not None
        state, slot = self.find_component(find_module(callee)), find_slot(callee)
        guarded = self.calls.get(callee.name)
        if guarded is None:
            guarded = self.calls[callee.name] = Call(callee, state, slot)
        guarded.move_to(callee, state, slot)
        state.name = callee.component_name
        if guarded.is_compiled and state.code is None:
            cache = self.options.repair_cache
            state.code = KeptCode() if cache is None else cache.code
        is_free = self._has_free_methods
        if not is_free:
            self._admit(state, callee)
        inner, outer = self._listeners
        for rank, layer in (
            (Rank.COMPONENT, functools.partial(inner, guarded)),
            (Rank.GUARD, functools.partial(self._call_outermost, outer, guarded, is_free)),
        ):
            intercept(callee, layer, guarded.patches, rank)
        if callee.owner is not state.module:  # compiled code goes past the layers of the module
            ends = functools.partial(CallWatch.scale_ends, state.module)
            intercept(callee, ends, guarded.patches, Rank.ENDS)
        whole = "_call_impl" if slot == "forward" else slot  # with the hooks of the module
        turn = functools.partial(self._call_whole, guarded)
        put_layer(callee.owner, whole, turn, guarded.patches, Rank.TURN, callee)

    def check(self, guarded: Call, output: object) -> CallCheck:
        """Check a finished call's output and arguments, record maxima, and report arguments beyond a
        plan's limits.

        Cost: two operations, one for each module that clamps, and one host read.
        """
        check = check_call(guarded.state.notes, output)
        with self.turn:
            self.host_reads += check.host_reads
            if check.maxima:
                guarded.record_maxima(self.steps.find_step(guarded.callee), check)
            for sentence in guarded.record_excesses(check):
                self.log.announce(sentence)
        return check

    @property
    def maxima(self) -> tuple[BlockMaximum, ...]:
        """The largest magnitude of each block at each step; None for NaN and Inf."""
        return tuple(found for call in self.calls.values() for found in call.list_maxima())

    # Calls that are found as they happen

    @contextlib.contextmanager
    def _meet_module(
        self, names: Mapping[int, str], module: torch.nn.Module, method: str
    ) -> Iterator[None]:
        """Guard an outermost call of a module, made inside the block, if the module belongs to the program.

        Args:
            names: `id` of each of the program's modules → name.
        """
        self._follow_methods()
        name = _find_name(names, module) if method == "forward" else None
        if name is None or self._leaves(module, name):
            yield
            return
        callee = Callee(name, module, "forward", "call", GENERAL_KEEPS)
        if not self.options.wants(callee) or not self._admit(
            self.find_component(find_module(callee)), callee
        ):
            yield
            return
        with self.turn:
            guarded = None if self.is_over else self.calls.get(name)
            if not (self.is_over or (guarded is not None and guarded.users)):
                self._guard_call(callee)
                guarded = self.calls[name]
            if guarded is not None:
                guarded.users += 1
        if guarded is None and not is_changing():
            self._wait_until_left()
        try:
            yield
        finally:
            with self.turn:
                if guarded is not None:
                    guarded.users -= 1
                    if not guarded.users:
                        guarded.patches.undo()

    def _wait_until_left(self, most_s: float | None = None) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.stage == "left", most_s)

    def _notice_enclosed(
        self, names: Mapping[int, str], name: str, module: torch.nn.Module, args: object
    ) -> None:
        """Report once that one of the program's modules is called inside of another module's call."""
        if is_traced():
            return
        enclosing = find_outermost()
        is_own = id(module) in names  # a copy has the hooks of what it is made of
        if is_own and enclosing not in (None, module) and _find_name(names, enclosing) is None:
            outer = type(enclosing).__name__
            text = (
                f"`{name}` is called inside of a {outer}, so its calls aren't guarded. Give the "
                f"{outer} to the guard."
            )
            self.log.leave(f"{name}, enclosed", text)

    def _notice_transformed(self, name: str, module: torch.nn.Module, args: object = ()) -> None:
        """Report once that an fp16 call inside `torch.func` can't be checked or repaired.

        A module with exponents needs no repair.
        """
        if hides_overflow(module) and not is_traced() and CallWatch.find(module) is None:
            self.log.leave(
                f"{name}, transformed",
                f"`{name}` is called inside of torch.func (vmap, grad), where no value can be read: what "
                "overflows there is neither found nor repaired. Call it once outside of that, which "
                "repairs it for these calls as well.",
            )

    def _leaves(self, module: torch.nn.Module, name: str) -> bool:
        """Return whether a call belongs to training and so isn't guarded; report the first such call."""
        if not is_in_training(module):
            return False
        self.log.leave(
            name,
            f"`{name}` is in training: an optimizer has its parameters, or they have gradients. Its calls "
            "aren't watched; those under torch.no_grad() are.",
        )
        return True

    def _admit(self, state: Component, callee: Callee) -> bool:
        """Return whether a component is guarded, which is decided at its first call.

        Outside of pipelines it isn't if one of its submodules, or a component around it, is guarded.
        """
        with self.turn:
            if state.admission is None:
                other = None
                if self._has_free_methods and not state.planned:
                    inside = {id(part) for part in state.module.modules()}
                    other = next((x for x in self.components.values() if x.overlaps(inside)), None)
                if other is None:
                    wraps = is_compiled(callee.owner)
                    state.admit(is_compiled=wraps, maxima=self.options.maxima)
                else:
                    state.admission = Admission(False)
                    names = [x.name for x in self.list_calls(other)]
                    name, guarded = callee.name, (names or [type(other.module).__name__])[0]
                    said = f"{name}: it shares modules with {guarded}, which is guarded; "
                    self.log.leave(
                        f"{name}, shared", f"{said}its own calls weren't watched.", is_fault=False
                    )
            return state.is_guarded

    # Layers

    def _call_whole(self, guarded: Call, call: ComponentCall) -> Any:
        """Make a call under the module's lock, so that other threads can't change the module meanwhile.

        If exponents are applied, the layer that checks them holds the lock instead.
        """
        self._follow_methods(guarded.name)
        watch = CallWatch.find(guarded.module)
        if is_changing() or (watch is not None and watch.has_call_here):
            return call.proceed()
        is_wrapped = guarded.callee.owner is not guarded.module  # by torch.compile
        if watch is not None and is_wrapped and not self.is_over:
            return watch.lead(call)
        with find_lock(guarded.module).calling(), contextlib.suppress(ReplacedError):
            if CallWatch.find(guarded.module) is None and not self.is_over:
                return call.proceed()
        if self.is_over:  # its turn comes once the guard has left
            self._wait_until_left(_PATIENCE_S)
        return call.begin_again(guarded.module)  # other layers are there now

    def _call_outermost(
        self, outer: Listener, guarded: Call, is_free: bool, call: ComponentCall
    ) -> Any:
        """Pass an outermost call to the guard's checking listener; make one inside another guarded call
        directly.

        Args:
            outer: the listener.
            is_free: whether the call may be inside another one.
        """
        if not is_plain():
            self._notice_transformed(guarded.name, guarded.module)
            return call.proceed()
        try:
            if not is_free:
                return outer(guarded, call)
            owner, method = guarded.callee.owner, guarded.callee.method
            if is_enclosed(owner, method) or self._leaves(guarded.module, guarded.name):
                return call.proceed()
            if not self._admit(guarded.state, guarded.callee):
                return call.proceed()
            with entered(owner, method):
                return outer(guarded, call)
        except ReplacedError:  # the call that is made instead is the one that counts
            if find_lock(guarded.module).is_calling:  # it begins anew, with the module's hooks
                raise
            return call.begin_again(guarded.module)


_NO_MODULE = torch.nn.Identity()
"""Stands for a component that is gone."""


def _find_name(names: Mapping[int, str], module: torch.nn.Module | None) -> str | None:
    """Return the name of one of the program's modules, also of a `torch.compile` wrapper; else None."""
    inner = getattr(module, "_orig_mod", module)
    return names.get(id(module), names.get(id(inner)))
