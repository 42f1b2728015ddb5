"""`Call`: what a guard knows of one component call: the latest arguments, to repeat it, and its
statistics.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stopdown.interception.arguments import count_writes
from stopdown.interception.autocast import read_autocast
from stopdown.interception.component_locks import find_lock
from stopdown.interception.module_paths import casts_weights
from stopdown.interception.patches import Patches
from stopdown.interception.randomness import Restore
from stopdown.module_calls.call import find_float_dtype
from stopdown.module_calls.call_inputs import fits, name_inputs, read_sizes, show_sizes
from stopdown.module_calls.call_interception import has_layer
from stopdown.module_calls.callee import Callee
from stopdown.module_calls.kept_state import HeldContainers, KeptState
from stopdown.number_formats import name_dtype
from stopdown.numerics import iterate_tensors
from stopdown.records import BlockMaximum, CallSummary, ComponentPlan, Scaling
from stopdown.runtime.activation_maxima import find_compiled, is_compiled
from stopdown.runtime.call_check import CallCheck
from stopdown.runtime.repairs import Component
from stopdown.scaling import ComponentCall, Rank

_SAMPLES = 64
"""Number of values that are copied of a tensor whose in-place writes PyTorch doesn't count."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GivenTensors:
    """A snapshot of the tensors in a call's arguments, to detect that the call wrote to them in place.

    A call that did can't be repeated.
    """

    def __init__(self, call: ComponentCall) -> None:
        tensors = list(iterate_tensors((call.args, call.kwargs)))
        self._versions = [(x, count_writes(x)) for x in tensors]
        uncounted = [x for x, version in self._versions if version is None]
        self._samples = [(x, _sample_bits(x)) for x in uncounted if x.is_floating_point()]

    @property
    def were_written(self) -> bool:
        """Whether the arguments were written to since the snapshot.

        Cost: a host read for each argument that was created in inference mode.
        """
        return any(count_writes(x) != version for x, version in self._versions) or not all(
            torch.equal(sample, _sample_bits(x)) for x, sample in self._samples
        )


def _sample_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Copy up to `_SAMPLES` elements of a tensor, reinterpreted as integers so that NaN compares equal."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, math.ceil(flat.numel() / _SAMPLES))
    return flat.view(_BITS[flat.element_size()])[::stride].clone()


@dataclass
class LatestCall(threading.local):
    """Each thread's latest call of a component, with the state to repeat it.

    Attributes:
        call: as the component itself received it.
        restores: functions that restore random generators and step caches.
        applied: plan entry and repairs that were applied to the component.
        given: snapshot of the guard's arguments, once the call has ended.
        kept: snapshot of the component's state before the call; None if calls don't change it.
        changed: names of the state that the call changed.
        held: snapshot of the caller's containers before the call.
        fills: whether the call put tensors into them.
    """

    call: ComponentCall | None = None
    restores: tuple[Restore, ...] = ()
    applied: tuple[ComponentPlan, ...] = ()
    given: GivenTensors | None = None
    kept: KeptState | None = None
    changed: list[str] = field(default_factory=list)
    held: HeldContainers | None = None
    fills: bool = False

    def restore(self) -> None:
        """Restore random numbers, step caches and the component's state from before the call."""
        self.restore_around()
        if self.kept is not None:
            self.kept.restore(self.changed)

    def restore_around(self) -> None:
        """Restore what the call changed outside the component: random numbers, step caches, the
        caller's containers.
        """
        for restore in self.restores:
            restore()
        if self.held is not None:
            self.held.restore()


@dataclass
class Excess:
    """Statistics of a call's argument that exceeded a certificate's limit; `limit` and `reached` are in
    words.
    """

    limit: str
    calls: int = 0
    largest: float = 0.0
    reached: str = ""


_NOTHING = CallSummary("", "", 0, 0.0, (), 0)


@dataclass(eq=False)
class Call:
    """A kind of component call under the guard, such as `vae.decode`: its target, latest arguments and
    statistics.

    Attributes:
        callee: its target.
        state: its component, which other calls may share.
        slot: name of the attribute that the call goes through.
        latest: each thread's latest call.
        summary: statistics so far.
        excesses: (argument, `values` or `size`) → calls beyond the certificate's limits.
        maxima: (module path, step, format) → largest magnitude.
        users: number of threads that make the call now, if its layers exist only during calls.
        unseen: number of calls whose output could not be checked.
        writes: whether calls change the component's state; None before the first one.
    """

    callee: Callee
    state: Component
    slot: str
    latest: LatestCall = field(default_factory=LatestCall)
    summary: CallSummary = _NOTHING
    excesses: dict[tuple[str, str], Excess] = field(default_factory=dict)
    maxima: dict[tuple[str, int | None, str], float] = field(default_factory=dict)
    users: int = 0
    unseen: int = 0
    writes: bool | None = None
    patches: Patches = field(default_factory=Patches)

    @property
    def name(self) -> str:
        """The call's name in records, such as `vae.decode`."""
        return self.callee.name

    @property
    def module(self) -> torch.nn.Module:
        return self.state.module

    @property
    def precision(self) -> str:
        """The precision that the component computes in: autocast's, else that of most of its weights."""
        return next(iter(self.summary.precisions), "fp32")

    @property
    def is_bypassed(self) -> bool:
        """Whether the method was replaced since its layers were put on, so that calls go past them."""
        return bool(self.patches) and not has_layer(self.callee.owner, self.slot, Rank.GUARD)

    def move_to(self, callee: Callee, state: Component, slot: str) -> None:
        """Continue with another module that has replaced the component, keeping the statistics."""
        was_on = bool(self.patches)
        self.patches.undo()
        if was_on and state is self.state and (callee, slot) == (self.callee, self.slot):
            return  # its method was replaced
        if state is not self.state:
            self.writes = None
        self.callee, self.state, self.slot = callee, state, slot
        self.latest = LatestCall()
        self.summary = replace(self.summary, component=callee.name, stage=callee.stage)

    def forget(self) -> None:
        """Drop the references to the latest call's arguments, so that their memory is freed."""
        self.latest = LatestCall()

    def begin(self, call: ComponentCall, planned: Scaling) -> None:
        """Record the ranges and sizes of a call's arguments and the component's state before it,
        without reading the device.

        Args:
            planned: has the limits that the arguments are compared with.
        """
        before = self.state.planned if self.latest.call is None else self.latest.applied
        if self.summary.precisions and before != self.state.applied:
            self.record_cast()  # a call of another signature had the component repaired
        self.latest.kept = None if self.writes is False else KeptState(self.module)
        self.latest.changed, self.latest.applied = [], self.state.applied
        self.latest.held, self.latest.fills = HeldContainers((call.args, call.kwargs)), False
        notes = self.state.notes
        notes.clear()
        names = call.callee.argument_names
        limits, allowed = self._choose(planned.limits), self._choose(planned.sizes)
        notes.note_inputs(limits, name_inputs(call.args, call.kwargs, names))
        sizes = read_sizes(call.args, call.kwargs, names) if allowed else ()
        known = [(name, size) for name, size in sizes if name in allowed]
        notes.oversizes = {
            name: (show_sizes([size]), show_sizes(allowed[name]))
            for name, size in known
            if not fits(size, allowed[name])
        }

    def _choose(self, limits: Mapping[str, Any]) -> dict[str, Any]:
        """Return those limits that concern this call's method, by argument: `encode.z` becomes `z` for
        `vae.encode`.
        """
        parts = [(key.partition("."), limit) for key, limit in limits.items()]
        return {name: x for (method, _, name), x in parts if method == self.callee.method}

    def record_cast(self) -> None:
        """Record the present formats of weights that a repair has cast, ahead of the earlier formats."""
        if self.summary.precisions:
            self._record_precisions(*self.state.name_precisions())

    def record_own_precision(self, precision: str) -> None:
        """Record the precision of the component's own autocast or casts, ahead of its weights' formats."""
        self._record_precisions(precision)

    def _record_precisions(self, *precisions: str) -> None:
        """Prepend formats to the recorded formats of the call."""
        with find_lock(self.module).noting():
            found = tuple(dict.fromkeys((*precisions, *self.summary.precisions)))
            self.summary = replace(self.summary, precisions=found)

    def record(self, elapsed_s: float, check: CallCheck) -> None:
        """Add one finished call, with its duration and check, to the statistics."""
        with find_lock(self.module).noting():
            self.unseen += not check.is_seen
            one = replace(
                self.summary,
                calls=1,
                elapsed_s=elapsed_s,
                non_finite=int(not check.is_good),
                headroom_bits=check.headroom_bits,
            )
            self.summary = self.summary.add(one)

    def record_as_right(self) -> None:
        """Subtract one call from the count of faulty ones, because its NaN or Inf was found to be
        intended.
        """
        with find_lock(self.module).noting():
            self.summary = replace(self.summary, non_finite=self.summary.non_finite - 1)

    def record_maxima(self, step: int | None, check: CallCheck) -> None:
        """Update the largest magnitude of each of the component's blocks at a step.

        Args:
            step: of the run, from 0; None outside of denoising.
        """
        for path, dtype, amax in check.maxima:
            key = path, step, name_dtype(dtype)
            self.maxima[key] = max(self.maxima.get(key, 0.0), amax)

    def list_maxima(self) -> Iterator[BlockMaximum]:
        """Yield the largest magnitude of each block of the component at each step; None stands for NaN
        and Inf.
        """
        for (path, step, precision), amax in self.maxima.items():
            known = amax if amax < math.inf else None
            yield BlockMaximum(self.name, path, step, precision, known)

    def record_arguments(self, call: ComponentCall, pipe: Any) -> None:
        """Record a call, with the random generators and caches that it changes, so that it can be
        repeated.
        """
        if not self.summary.precisions:
            # autocast around the call comes first; weights that are cast follow its arguments
            if casts_weights(self.module):
                self.state.computes_in = find_float_dtype(call.named, call.keeps)
            ambient = read_autocast(self.module)
            around = () if ambient is None else (name_dtype(ambient),)
            self._record_precisions(*around, *self.state.name_precisions())
        latest = self.latest
        latest.call, latest.given = call, None
        latest.applied = self.state.applied
        host, is_alone = torch.device("cpu"), not torch.accelerator.is_available()
        latest.restores = call.save(self.module, host if is_alone else self.find_device(pipe))

    def record_writes(self) -> None:
        """Record which of the component's buffers and attributes the finished call changed, so that a
        repeat restores them.

        After a call that changed nothing, later calls aren't examined.
        """
        latest = self.latest
        latest.fills = latest.held is not None and latest.held.is_filled
        if latest.kept is not None:
            latest.changed = latest.kept.list_changes()
            self.writes = bool(latest.changed)
            latest.kept = latest.kept if latest.changed else None

    def find_device(self, pipe: Any) -> torch.device:
        """Return the device that computes the calls now, also for offloaded weights.

        Cost: for weights on the host, Diffusers looks through the hooks of all modules (milliseconds).
        """
        weights = (x.device for x in self.module.parameters() if not x.is_meta)
        held = next(weights, torch.device("cpu"))
        own = getattr(pipe, "_execution_device", held) if held.type == "cpu" else held
        return torch.device(own)

    def record_excesses(self, check: CallCheck) -> Iterator[str]:
        """Count a call's arguments beyond the certificate's limits; yield a sentence at the first
        excess of each.
        """
        for name, limit, largest in check.limited:
            if largest <= limit:  # NaN is beyond every limit
                continue
            seen = self.excesses.setdefault((name, "values"), Excess(f"{limit:.4g}"))
            seen.largest = max(seen.largest, largest)
            yield from self._count_excess(name, seen, f"reached {seen.largest:.4g}")
        for name, (size, allowed) in self.state.notes.oversizes.items():
            seen = self.excesses.setdefault((name, "size"), Excess(allowed))
            yield from self._count_excess(name, seen, f"was {size}")

    def _count_excess(self, name: str, seen: Excess, reached: str) -> Iterator[str]:
        seen.calls, seen.reached = seen.calls + 1, reached
        if seen.calls == 1:
            yield self._describe_excess(name, seen)

    def list_excesses(self) -> list[str]:
        """Describe the calls that a plan's certificate does not cover, a sentence for each argument."""
        return [self._describe_excess(name, seen) for (name, _), seen in self.excesses.items()]

    def _describe_excess(self, name: str, seen: Excess) -> str:
        calls = f"{seen.calls} call{'s' * (seen.calls != 1)}"
        return (
            f"{calls} of `{self.name}` not certified: `{name}` {seen.reached}, and the plan's bounds "
            f"hold up to {seen.limit}. The output was watched as always."
        )

    @property
    def is_compiled(self) -> bool:
        """Whether the component or one of its modules runs as compiled code."""
        return is_compiled(self.callee.owner) or bool(find_compiled(self.module))
