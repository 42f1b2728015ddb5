"""Guard the model calls of an unedited script, one by one, while it runs in this process (`stopdown run`).

Each call of a pipeline gets its own guard, and so does each outermost module call outside of pipelines.
The guard is removed when the call returns, so between calls the script moves, saves and adapts its
original weights. The repairs of one call are applied from the start of the next. A fault without a repair
is reported once, and the script gets the model's output, as without a guard.

**Catches** NaN and Inf in the outputs of components, which are repaired, inside and outside of Diffusers
pipelines; black, grey, frozen and noisy frames in a pipeline's output, which are reported.

**Does not catch** calls of modules in training, which are left alone; methods other than `encode` and
`decode` that a script calls on a module directly, unless a pattern names them (modules that they call are
guarded); frames that the script requested as latents.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from stopdown.component_call_names import name_call
from stopdown.component_calls.components import cast_component_, find_callees, read_precisions
from stopdown.component_calls.pipeline_interception import intercept_runs
from stopdown.diagnosis.texts import is_refusal
from stopdown.errors import PlanError, take_first_line
from stopdown.frames.frame_faults import find_frame_findings
from stopdown.interception.component_locks import find_lock
from stopdown.interception.patches import Patches
from stopdown.interception.randomness import find_weights_device, save_random
from stopdown.module_calls.call_interception import find_module
from stopdown.module_calls.callee import GENERAL_KEEPS, Callee
from stopdown.module_calls.outermost_calls import (
    Ending,
    hides_overflow,
    intercept_methods,
    is_in_training,
    is_transformed,
    listen,
    silenced,
)
from stopdown.number_formats import name_dtype
from stopdown.records import CallSummary, Finding, GuardRecord, Plan
from stopdown.runtime.guard import Guard, GuardOptions
from stopdown.runtime.later_gradients import graft_gradients
from stopdown.runtime.repair_cache import RepairCache
from stopdown.runtime.repair_log import RepairLog
from stopdown.runtime.run_check import collect_videos
from stopdown.scaling import ComponentCall, put_cast

_METHODS = ("encode", "decode")
"""Methods that are component calls if a class has both."""


@dataclass
class ModuleCalls:
    """Statistics of a script's module calls outside of pipelines.

    Attributes:
        log: of their repairs.
        calls: component → statistics of its calls.
        left: (component, reason) → number of calls that were left alone.
        unwanted: components that were called but that no pattern matches.
    """

    log: RepairLog
    calls: dict[str, CallSummary] = field(default_factory=dict)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)
    unwanted: set[str] = field(default_factory=set)
    _host_reads: int = 0
    _own_s: float = 0.0
    _unwatched: dict[str, None] = field(default_factory=dict)
    _reused: dict[str, None] = field(default_factory=dict)
    _names: WeakKeyDictionary[torch.nn.Module, str] = field(default_factory=WeakKeyDictionary)
    _classes: Counter[str] = field(default_factory=Counter)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def name_callee(self, module: torch.nn.Module, method: str) -> Callee:
        """Name a script's call of a module by class and order, such as `UNet`, `UNet_2`,
        `AutoencoderKL.decode`.
        """
        with self._counting:
            if module not in self._names:
                kind = type(getattr(module, "_orig_mod", module)).__name__  # of torch.compile
                self._classes[kind] += 1
                number = self._classes[kind]
                self._names[module] = kind if number == 1 else f"{kind}_{number}"
        name = self._names[module]
        if method == "forward":
            return Callee(name, module, method, "call", GENERAL_KEEPS)
        stage = method if method in _METHODS else "call"
        return Callee(name_call(name, method), module, method, stage, GENERAL_KEEPS)

    def count(self, component: str) -> int:
        return self.calls[component].calls if component in self.calls else 0

    def add(self, record: GuardRecord) -> None:
        """Add the record of one call's guard to the statistics."""
        for call in record.calls:  # of one module one thread at a time
            before = self.calls.get(call.component)
            self.calls[call.component] = before.add(call) if before else call
        with self._counting:
            self._host_reads += record.host_reads
            self._own_s += record.own_s
        self._unwatched |= dict.fromkeys(record.unwatched)
        self._reused |= dict.fromkeys(record.reused)

    def note_failure(self, name: str, error: Exception) -> None:
        """Record that a call ended with an error, to be listed among the calls that weren't checked."""
        self._unwatched[f"A call of {name} ended with {type(error).__name__}."] = None

    @property
    def record(self) -> GuardRecord | None:
        """All calls as one record; None if no module was called without a pipeline."""
        alone = [
            f"{name}: {count} call{'s' * (count != 1)} {why}, left alone."
            for (name, why), count in self.left.items()
        ]
        if not self.calls and not alone and not self._unwatched:
            return None
        return GuardRecord(
            pipeline="",
            calls=tuple(self.calls.values()),
            repairs=self.log.repairs,
            host_reads=self._host_reads,
            unwatched=(*self._unwatched, *alone),
            own_s=self._own_s,
            reused=tuple(self._reused),
        )


def _explain_leaving(module: torch.nn.Module) -> str:
    """Return the reason why a script's call of a module isn't guarded, such as `in training`; "" if it
    is.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return "of TorchScript"
    return "in training" if is_in_training(module) else ""


@dataclass
class ScriptGuard:
    """Guards the calls of every pipeline that is created while it is active, and of other modules.

    Attributes:
        announce: receives messages for the user.
        plan: applied to each pipeline that it belongs to; updated with the repairs of earlier calls.
        components: patterns of the components to guard; empty for all.
        precision: dtype for components that the script loads in the other 16-bit format; None leaves them.
        runs: the guard's record of each pipeline call.
        findings: problems in the pipelines' outputs.
        failed: whether a fault was left unrepaired.
    """

    announce: Callable[[str], None]
    plan: Plan | None = None
    components: tuple[str, ...] = ()
    precision: torch.dtype | None = None
    runs: list[GuardRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    failed: bool = False
    _inside: set[int] = field(default_factory=set)
    _repair_cache: RepairCache = field(default_factory=RepairCache)
    _logs: WeakKeyDictionary[Any, RepairLog] = field(default_factory=WeakKeyDictionary)
    _cast: WeakSet[torch.nn.Module] = field(default_factory=WeakSet)

    def __post_init__(self) -> None:
        self.modules = ModuleCalls(RepairLog(self.announce))

    def put_on(self, patches: Patches) -> None:
        """Guard the script's calls until `patches` is undone."""
        intercept_runs(self._run, patches)
        intercept_methods(_METHODS, patches)
        # of `*.decode` also where a class has one of `_METHODS`
        ends = {pattern.rpartition(".")[2] for pattern in self.components if "." in pattern}
        for name in sorted(x for x in ends - {"forward"} if x.isidentifier()):
            intercept_methods((name,), patches)
        listen(self._meet_module, patches, in_transforms=True)
        patches.defer(self._repair_cache.code.patches.undo)

    def _run(self, call: ComponentCall) -> Any:
        pipe: Any = call.callee.owner
        if id(pipe) in self._inside:  # a class that calls its parent's `__call__`
            return call.proceed()
        log = self._logs[pipe] = RepairLog(self.announce, self._logs.get(pipe))
        guarding = self._guard(pipe, type(pipe).__name__, self._choose(log=log))
        if guarding is None:
            return call.proceed()
        self._inside.add(id(pipe))
        try:
            with self._failing(guarding), silenced(), self._casting(find_callees(pipe)), guarding:
                output = guarding.run(call)
                self.plan = guarding.updated_plan() or self.plan
        finally:
            self._inside.discard(id(pipe))
            self.runs.append(guarding.record)
        self._look(type(pipe).__name__, output)
        return output

    @contextlib.contextmanager
    def _meet_module(self, module: torch.nn.Module, method: str) -> Iterator[Ending | None]:
        """Guard a call of a module outside of pipelines, made inside the block; other threads can't
        call it meanwhile.
        """
        if is_transformed():
            if hides_overflow(module):
                name = self.modules.name_callee(module, method).name
                self.modules.left[name, "inside of torch.func (vmap, grad) in fp16"] += 1
            yield None
            return
        is_left = bool(_explain_leaving(module))
        with contextlib.nullcontext() if is_left else find_lock(module).owned():
            yield from self._guard_call(module, method)

    def _guard_call(self, module: torch.nn.Module, method: str) -> Iterator[Ending | None]:
        """Put a guard on a module for one call (a generator for a `with` block), and record the call's
        statistics.
        """
        callee = self.modules.name_callee(module, method)
        guarding = self._guard_module(callee)
        if guarding is None:
            yield None
            return
        is_repaired = [False]
        restore = save_random(find_weights_device(module)) if torch.is_grad_enabled() else None

        def end(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if restore is None or not is_repaired[0]:
                return output
            return graft_gradients(module, method, (args, kwargs), output, restore)

        try:
            with self._failing(guarding), self._casting((callee,)), guarding:
                yield end
                is_repaired[0] = guarding.is_repairing
        except Exception as error:
            self.modules.note_failure(callee.name, error)
            raise
        finally:
            self.modules.add(guarding.record)

    @contextlib.contextmanager
    def _casting(self, callees: Iterable[Callee]) -> Iterator[None]:
        """Run component calls inside the block in the precision that the user requested, with outputs
        cast back.
        """
        with Patches() as patches:
            if self.precision is not None:
                for callee in callees:
                    if self._bring(callee, self.precision):
                        put_cast(callee, self.precision, patches, is_refusal=is_refusal)
            yield

    def _bring(self, callee: Callee, wanted: torch.dtype) -> bool:
        """Cast a component to `wanted` if it is in the other 16-bit format.

        Return whether it has been cast, by this call or an earlier one.
        """
        module = find_module(callee)
        found = next(iter(read_precisions(module)), None)
        if found in (torch.float16, torch.bfloat16) and found != wanted:
            cast_component_(module, wanted)
            self._cast.add(module)
            names = name_dtype(found), name_dtype(wanted)
            self.announce(f"{callee.component_name} was in {names[0]}, and runs in {names[1]}.")
        return module in self._cast

    def _guard_module(self, callee: Callee) -> Guard | None:
        """Put a guard on one module call; return None if the call is left alone."""
        why = _explain_leaving(callee.owner)
        if why:
            self.modules.left[callee.name, why] += 1
            return None
        before = self.modules.count(callee.name)
        options = self._choose(log=self.modules.log, calls_before=before)
        if not options.wants(callee):
            self.modules.unwanted.add(callee.name)
            return None
        return self._guard(callee, callee.name, options)

    @contextlib.contextmanager
    def _failing(self, guarding: Guard) -> Iterator[None]:
        """Set `failed` at the end of the block if the guard left a fault in it without a repair."""
        before = len(guarding.repairs)
        try:
            yield
        finally:
            self.failed |= any(repair.action == "none" for repair in guarding.repairs[before:])

    def _guard(self, program: Any, name: str, options: GuardOptions) -> Guard | None:
        try:
            by_plan = None if isinstance(program, Callee) else self._guard_by_plan(program, options)
            return by_plan or self._guard_by_what_was_found(program, options)
        except Exception as error:  # a program unlike all others: it runs as it is
            self._report_once(name, f"{name} couldn't be guarded: {take_first_line(error)}")
            return None

    def _report_once(self, name: str, text: str) -> None:
        self.modules.log.report_once(name, text, text)

    def _guard_by_plan(self, pipe: Any, options: GuardOptions) -> Guard | None:
        """Put a guard with the user's plan on a pipeline; return None without a plan, or if it is
        another model's.
        """
        if self.plan is None:
            return None
        try:
            return Guard(pipe, dataclasses.replace(options, plan=self.plan)).put_on()
        except PlanError as error:
            name = type(pipe).__name__
            self._report_once(name, f"{name} runs without the plan. {error}")
            return None

    def _guard_by_what_was_found(self, program: Any, options: GuardOptions) -> Guard:
        """Put a guard on a program, with the repairs that earlier calls of it needed."""
        options = dataclasses.replace(options, repair_cache=self._repair_cache)
        made = Guard(program, options).put_on()
        while self._repair_cache.outdated:
            self.announce(
                f"The weights or the code of {self._repair_cache.outdated.pop()} were changed since an "
                "earlier call repaired it; that repair is left out."
            )
        return made

    def _choose(self, **more: Any) -> GuardOptions:
        return GuardOptions(
            announce=self.announce,
            frames=False,
            hands_back=True,
            components=self.components,
            **more,
        )

    def _look(self, name: str, output: Any) -> None:
        for number, frames in enumerate(collect_videos(output)):
            module_path = f"{name}, call {len(self.runs)}, result {number + 1}"
            self.findings += find_frame_findings(frames, module_path)
