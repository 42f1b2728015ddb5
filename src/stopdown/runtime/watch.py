"""Watch a pipeline's calls: time, precision, and whether each output is finite.

Of each call's output the smallest and the largest value are found on the device and read once; NaN
and Inf travel, so the output of a call is the only cut that is needed to know that they exist. Where
the authors of a class clamp its values at the end of fp16's range (T5, CogView3-Plus, Flux), the
outputs of those modules are bounded as well, because a clamp hides an overflow; they are read with
the same transfer, and so are, when asked for, those of every block (`sensors`). A fault stops the
run there, before the scheduler or a file has seen the value, unless someone who is asked (`answer`)
gives a better output.

**Catches** NaN and +-Inf in any floating tensor that a component returns or is called with; in fp16,
values that a clamp at the end of the range brought back.
**Does not catch** values that `nan_to_num` or a softmax inside the component made finite, or a result
that is finite and wrong for another reason; the finished frames are looked at by
`frame_faults.find_frame_faults`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.bounds.input_limits import name_inputs
from stopdown.errors import NonFiniteError
from stopdown.number_formats import find_format, name_dtype
from stopdown.numerics import bound_values, count_non_finite, iterate_tensors, measure_amax
from stopdown.patches import Patches
from stopdown.pipelines.call_interception import (
    Call,
    find_argument_names,
    find_module,
    intercept,
    put_layer,
)
from stopdown.pipelines.components import Callee, find_callees, read_precisions
from stopdown.records import BlockMaximum, CallSummary, Decision
from stopdown.runtime.activation_maxima import Notes, find_compiled, is_compiled, put_sensors
from stopdown.runtime.clamps import CLAMPED_FROM
from stopdown.runtime.output_parts import describe_place, name_axes

Observer = Callable[[str, str, int, int], None]
"""Told of each finished call: component, stage, steps done, steps in all (0 when unknown)."""


@dataclass(frozen=True)
class Fault:
    """One call whose output was not what it should be.

    Attributes:
        callee: where.
        args, kwargs, output: of the call.
        precision: of most of the component's weights.
        step: of the run, from 0; None outside of denoising.
        clamped: the output is finite, and these modules clamped what was not: path to magnitude.
        call: what to call for the same call again.
        inputs: arguments that were not finite.
        is_good: the output is finite and nothing was clamped; it is the inputs that are not.
    """

    callee: Callee
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    precision: str
    step: int | None
    clamped: tuple[str, ...]
    call: Call
    inputs: tuple[str, ...] = ()
    is_good: bool = False


@dataclass(frozen=True)
class Look:
    """What one call showed.

    Attributes:
        is_finite: no value that it returned is NaN or Inf.
        clamped: modules that clamped what was not finite.
        inputs: arguments that were not finite; a mask may hold -Inf.
        is_seen: it returned tensors that could be looked at.
    """

    is_finite: bool = True
    clamped: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    is_seen: bool = True

    @property
    def is_good(self) -> bool:
        """Whether what it returned can be gone on with."""
        return self.is_finite and not self.clamped


@dataclass
class _Tally:
    """What is counted for one component call."""

    callee: Callee
    calls: int = 0
    elapsed_s: float = 0.0
    precisions: tuple[str, ...] = ()
    non_finite: int = 0
    unseen: int = 0
    notes: Notes = field(default_factory=Notes)
    patches: Patches = field(default_factory=Patches)


@dataclass
class _Beyond:
    """An argument that was larger than a certificate allows: in how many calls, and how large."""

    limit: float
    calls: int = 0
    largest: float = 0.0


@dataclass
class Watch:
    """A context manager that intercepts every component call of a pipeline.

    Args:
        pipe: a Diffusers pipeline.
        decisions: precision of each call with its reason, for messages; may be empty.
        observer: told of each finished call.
        answer: asked about each fault; it raises, or gives the output to go on with.
        wants_maxima: note the largest magnitude of each block at each step.
        tell: told, once for each argument, that a call is not covered by its plan's certificate.
        renew: called when the run's steps are set, to intercept component calls that are new.

    Raises:
        NonFiniteError: out of the pipeline's call, at the first output with NaN or Inf.
    """

    pipe: Any
    decisions: tuple[Decision, ...] = ()
    observer: Observer | None = None
    answer: Callable[[Fault], Any] | None = None
    wants_maxima: bool = False
    tell: Callable[[str], None] = lambda text: None
    renew: Callable[[], None] = lambda: None
    own_s: float = 0.0
    steps_done: int = 0
    host_reads: int = 0
    last_step: Any = None
    last_step_inputs: tuple[torch.Tensor, ...] = ()
    _patches: Patches = field(default_factory=Patches)
    _scheduler: Any = None
    _steps: Patches = field(default_factory=Patches)
    _tallies: dict[str, _Tally] = field(default_factory=dict)
    _notes: dict[int, Notes] = field(default_factory=dict)
    _maxima: dict[tuple[str, str, int | None, str], float] = field(default_factory=dict)
    _limits: dict[str, Mapping[str, float]] = field(default_factory=dict)
    _beyond: dict[tuple[str, str], _Beyond] = field(default_factory=dict)

    def __enter__(self) -> Watch:
        try:
            for callee in find_callees(self.pipe):
                self.stand(callee)
            self.follow_scheduler()
        except BaseException:
            self._patches.undo()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.undo()
        self._scheduler = None
        self.forget_step()

    def forget_step(self) -> None:
        """A new run: what an earlier one's scheduler gave says nothing about it."""
        self.last_step, self.last_step_inputs = None, ()

    def stand(self, callee: Callee) -> None:
        """Intercept a component call; at another of the same component no more."""
        tally = self._tallies.setdefault(callee.component, _Tally(callee))
        tally.patches.undo()
        tally.callee, owner = callee, find_module(callee)
        if id(owner) not in self._notes:  # both directions of an autoencoder share theirs
            self._notes[id(owner)] = Notes()
            if not is_compiled(callee.owner):
                notes = self._notes[id(owner)]
                put_sensors(owner, notes, self._patches, maxima=self.wants_maxima)
        tally.notes = self._notes[id(owner)]
        intercept(callee, functools.partial(self._around, callee), tally.patches)
        self._patches.defer(tally.patches.undo)

    def summarize(self) -> tuple[CallSummary, ...]:
        """What each component that was called did, in order of the pipeline's components."""
        return tuple(
            CallSummary(
                tally.callee.component,
                tally.callee.stage,
                tally.calls,
                tally.elapsed_s,
                tally.precisions,
                tally.non_finite,
            )
            for tally in self._tallies.values()
            if tally.calls
        )

    def follow_scheduler(self) -> None:
        """Count the steps of the pipeline's scheduler; of the one that it had before no more."""
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is self._scheduler:
            return
        self._steps.undo()
        self._scheduler = scheduler
        self._count_steps()
        self._patches.defer(self._steps.undo)

    def _count_steps(self) -> None:
        def step(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.last_step_inputs = tuple(iterate_tensors((args, kwargs)))
            self.last_step = call(*args, **kwargs)
            self.steps_done += 1
            return self.last_step

        def begin(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.steps_done = 0
            self.renew()
            return call(*args, **kwargs)

        for method, layer in (("step", step), ("set_timesteps", begin)):
            if callable(getattr(self._scheduler, method, None)):
                put_layer(self._scheduler, method, layer, self._steps)

    def _count_all_steps(self) -> int:
        """Steps of the run; fewer than the scheduler has when it starts from a picture or video."""
        told = getattr(self.pipe, "_num_timesteps", None)
        if isinstance(told, int):
            return told
        timesteps = getattr(getattr(self.pipe, "scheduler", None), "timesteps", None)
        return len(timesteps) if timesteps is not None else 0

    def _around(
        self, callee: Callee, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        entered = time.perf_counter()
        tally = self._tallies[callee.component]
        if not tally.precisions:
            found = read_precisions(find_module(callee))
            tally.precisions = tuple(name_dtype(dtype) for dtype in found)
        tally.notes.clear()
        given = name_inputs(args, kwargs, find_argument_names(callee))
        tally.notes.note_inputs(self._limits.get(callee.component, {}), given)
        called = time.perf_counter()
        output = call(*args, **kwargs)
        returned = time.perf_counter()
        tally.calls += 1
        tally.elapsed_s += returned - called
        seen = self.look(callee, output)
        tally.unseen += not seen.is_seen
        tally.non_finite += not seen.is_good
        if seen.inputs or not seen.is_good:
            step, precision = self._find_step(callee), _most(tally)
            output = self._answer(
                Fault(callee, args, kwargs, output, precision, step, seen.clamped, call,
                      seen.inputs, seen.is_good)
            )  # fmt: skip
        if self.observer is not None:
            self.observer(callee.component, callee.stage, self.steps_done, self._count_all_steps())
        self.own_s += (called - entered) + (time.perf_counter() - returned)
        return output

    def _answer(self, fault: Fault) -> Any:
        if self.answer is None:
            raise self.describe(fault)
        return self.answer(fault)

    def look(self, callee: Callee, output: Any) -> Look:
        """What a call's output and arguments are like.

        Cost: two operations, one for each module that clamps, and one host read.
        """
        notes = self._tallies[callee.component].notes
        outputs = [t for t in iterate_tensors(output) if t.is_floating_point() and t.numel()]
        bounds = bound_values(outputs, notes.bounds)
        if bounds is None:
            return Look(is_seen=False)
        self.host_reads += 1
        values = bounds.tolist()
        pairs = list(zip(values[::2], values[1::2], strict=True))
        inside = [max(-low, high) for low, high in pairs[len(outputs) :]]
        is_finite = all(map(math.isfinite, values[: 2 * len(outputs)]))
        clamped = tuple(
            path
            for (path, _), end in zip(notes.clamping, inside, strict=False)
            if end >= CLAMPED_FROM
        )
        rest = inside[len(notes.clamping) :]
        self._note_maxima(callee, notes, rest[: len(notes.blocks)])
        self._note_beyond(callee, notes, rest[len(notes.blocks) :])
        given = pairs[len(pairs) - len(notes.inputs) :]
        spoilt = [
            name
            for (name, *_), (low, high) in zip(notes.inputs, given, strict=True)
            if _is_spoilt(name, low, high)
        ]
        notes.clear()
        return Look(is_finite, clamped, tuple(dict.fromkeys(spoilt)), bool(outputs))

    def _note_maxima(self, callee: Callee, notes: Notes, ends: list[float]) -> None:
        """Keep the largest magnitude of each block in this step; NaN and Inf count as infinite."""
        step = self._find_step(callee)
        for (path, dtype, _), end in zip(notes.blocks, ends, strict=True):
            key = (callee.component, path, step, name_dtype(dtype))
            seen = end if math.isfinite(end) else math.inf
            self._maxima[key] = max(self._maxima.get(key, 0.0), seen)

    def limit_inputs(self, component: str, limits: Mapping[str, float]) -> None:
        """Compare a component's arguments with the limits of its plan's certificate.

        Args:
            limits: `forward.hidden_states` to the magnitude up to which it holds.
        """
        for tally in self._tallies.values():
            callee = tally.callee
            if callee.component.partition(".")[0] == component:
                mine = [(key.partition("."), size) for key, size in limits.items()]
                self._limits[callee.component] = {
                    name: size for (method, _, name), size in mine if method == callee.method
                }

    def _note_beyond(self, callee: Callee, notes: Notes, ends: list[float]) -> None:
        """Count the calls that a certificate does not cover; NaN is beyond every limit."""
        for (name, limit, _), end in zip(notes.inputs, ends, strict=True):
            if limit is None or end <= limit:
                continue
            seen = self._beyond.setdefault((callee.component, name), _Beyond(limit))
            seen.calls, seen.largest = seen.calls + 1, max(seen.largest, end)
            if seen.calls == 1:
                self.tell(_describe_beyond(callee.component, name, seen))

    @property
    def uncertified(self) -> tuple[str, ...]:
        """The calls that a plan's certificate does not cover, a sentence for each argument."""
        return tuple(_describe_beyond(*key, seen) for key, seen in self._beyond.items())

    @property
    def unwatched(self) -> tuple[str, ...]:
        """What nobody looks at, each with the reason."""
        return tuple(
            f"{tally.callee.component}: inside of compiled code neither clamps nor blocks are looked "
            "at; what it returns is."
            for tally in self._tallies.values()
            if is_compiled(tally.callee.owner) or find_compiled(find_module(tally.callee))
        )

    @property
    def maxima(self) -> tuple[BlockMaximum, ...]:
        """The largest magnitude of each block at each step, in the order in which they came."""
        return tuple(
            BlockMaximum(component, path, step, precision, amax if math.isfinite(amax) else None)
            for (component, path, step, precision), amax in self._maxima.items()
        )

    def note_precisions(self, module: torch.nn.Module, precisions: tuple[str, ...]) -> None:
        """The weights of a component were cast: what they are now comes before what they were."""
        for tally in self._tallies.values():
            if find_module(tally.callee) is module and tally.precisions:
                tally.precisions = tuple(dict.fromkeys((*precisions, *tally.precisions)))

    def name_last_step(self) -> str:
        """` at step 2 of 2`: the scheduler's last one; "" before the first."""
        total = self._count_all_steps()
        return f" at step {self.steps_done} of {total}" if self.steps_done and total else ""

    @property
    def unseen(self) -> tuple[str, ...]:
        """Components that returned nothing that could be looked at, each as a sentence."""
        return tuple(
            f"No tensor could be looked at in what `{tally.callee.component}` gave."
            for tally in self._tallies.values()
            if tally.unseen
        )

    def _find_step(self, callee: Callee) -> int | None:
        return self.steps_done if callee.stage == "denoise" else None

    def describe(self, fault: Fault, found: str = "") -> NonFiniteError:
        """The error that ends a run at a fault.

        Args:
            found: what is known besides of how it began, in whole sentences.
        """
        callee, precision = fault.callee, fault.precision
        inputs = [t for t in iterate_tensors((fault.args, fault.kwargs)) if t.is_floating_point()]
        parts = [found, _describe_inputs(inputs, precision), self._name_reason(callee)]
        return NonFiniteError(
            self.name_fault(fault),
            expected=" ".join(filter(None, parts)),
            remedy=suggest_remedy(callee, precision),
        )

    def name_fault(self, fault: Fault) -> str:
        """What was found and where, in one sentence."""
        outputs = [t for t in iterate_tensors(fault.output) if t.is_floating_point()]
        place = f"{self._name_place(fault.callee)}, in {fault.precision}."
        if fault.clamped:
            return (
                f"`{fault.callee.component}` gave a finite result of values that were not: "
                f"{len(fault.clamped)} clamps at the end of fp16 were hit, the first in "
                f"{fault.clamped[0]}{place}"
            )
        counts = [count_non_finite(tensor) for tensor in outputs]
        nan, infinite = (sum(column) for column in zip(*counts, strict=True))
        total = sum(tensor.numel() for tensor in outputs)
        return (
            f"`{fault.callee.component}` gave {name_counts(nan, infinite)} in {total} values"
            f"{_describe_part(fault)}{place}"
        )

    def _name_place(self, callee: Callee) -> str:
        if callee.stage != "denoise" or not self._count_all_steps():
            return ""
        return f" at step {self.steps_done + 1} of {self._count_all_steps()}"

    def _name_reason(self, callee: Callee) -> str:
        for decision in self.decisions:
            if decision.component == callee.component:
                return f'{decision.precision} was chosen for it: "{decision.reason}"'
        return ""


def _describe_beyond(component: str, name: str, seen: _Beyond) -> str:
    calls = f"{seen.calls} call{'s' * (seen.calls != 1)}"
    return (
        f"{calls} of `{component}` not certified: `{name}` reached {seen.largest:.4g}, and the "
        f"plan's bounds hold up to {seen.limit:.4g}. The output was watched as always."
    )


def _describe_part(fault: Fault) -> str:
    """` (row 2 of 2, frame 3 of 5)`; "" when the fault is everywhere in its output."""
    names = find_argument_names(fault.callee)
    given = {**dict(zip(names, fault.args, strict=False)), **fault.kwargs}
    for tensor in iterate_tensors(fault.output):
        if tensor.is_floating_point() and bool((bad := ~torch.isfinite(tensor)).any()):
            place = describe_place(bad, name_axes(fault.callee, tuple(tensor.shape), given))
            return f" ({place})" if place else ""
    return ""


def _most(tally: _Tally) -> str:
    return tally.precisions[0] if tally.precisions else "fp32"


def _is_spoilt(name: str, low: float, high: float) -> bool:
    """Whether an argument holds what is not finite; -Inf in a mask is what masks are made of."""
    if "mask" in name or "bias" in name:
        return math.isnan(low) or high == math.inf
    return not (math.isfinite(low) and math.isfinite(high))


def name_counts(nan: int, infinite: int) -> str:
    """`3 NaN and 1 Inf`."""
    parts = [f"{count} {name}" for count, name in ((nan, "NaN"), (infinite, "Inf")) if count]
    return " and ".join(parts)


def _describe_inputs(inputs: list[torch.Tensor], precision: str) -> str:
    """Whether the fault came in from outside, and the largest value that did."""
    spoilt = sum(sum(count_non_finite(tensor)) for tensor in inputs)
    if spoilt:
        return f"Its inputs already held {spoilt} values that are not finite."
    largest = max((measure_amax(tensor) for tensor in inputs), default=0.0)
    found = find_format(precision)
    ends = f"; {precision} ends at {found.largest:.5g}" if found else ""
    return f"Its inputs were finite (largest {largest:.5g}{ends})."


def suggest_remedy(callee: Callee, precision: str) -> str:
    """What to type after a component gave NaN or Inf in a precision."""
    if precision == "fp32":
        return (
            "More precision is not to be had: its weights may be damaged, or an input may be out of "
            "range. Load the model again from its source."
        )
    if precision == "fp16":
        return f"Use `--precision {callee.component}=bf16`, or fp32 where bf16 is slow or missing."
    return f"Use `--precision {callee.component}=fp32`."
