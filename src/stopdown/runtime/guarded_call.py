"""One component call under the guard: what it was called with, what was seen of it, what is counted."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stopdown.interception.autocast import read_autocast
from stopdown.interception.component_locks import find_lock
from stopdown.interception.module_paths import casts_weights
from stopdown.interception.patches import Patches
from stopdown.interception.randomness import Restore
from stopdown.module_calls.call import HeldContainers, find_float_dtype
from stopdown.module_calls.call_inputs import fits, name_inputs, read_sizes, show_sizes
from stopdown.module_calls.callee import Callee
from stopdown.module_calls.kept_state import KeptState
from stopdown.number_formats import name_dtype
from stopdown.numerics import count_writes, iterate_tensors
from stopdown.records import BlockMaximum, CallSummary, ComponentPlan, Scaling
from stopdown.runtime.activation_maxima import find_compiled, is_compiled
from stopdown.runtime.call_check import CallCheck
from stopdown.runtime.repairs import Component
from stopdown.scaling import ComponentCall

_SAMPLES = 64
"""Values that are kept of a tensor whose writes PyTorch does not count."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GivenTensors:
    """The tensors that a call was given, as they were before it."""

    def __init__(self, call: ComponentCall) -> None:
        tensors = list(iterate_tensors((call.args, call.kwargs)))
        self._versions = [(x, count_writes(x)) for x in tensors]
        uncounted = [x for x, version in self._versions if version is None]
        self._samples = [(x, _sample_bits(x)) for x in uncounted if x.is_floating_point()]

    @property
    def were_written(self) -> bool:
        """Whether the arguments were written to since.

        Cost: a host read for each argument of inference mode.
        """
        return any(count_writes(x) != version for x, version in self._versions) or not all(
            torch.equal(sample, _sample_bits(x)) for x, sample in self._samples
        )


def _sample_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Copy up to `_SAMPLES` values of a tensor of any shape, as whole numbers of the same size."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, math.ceil(flat.numel() / _SAMPLES))
    return flat.view(_BITS[flat.element_size()])[::stride].clone()


@dataclass
class LatestCall(threading.local):
    """The call that each thread made last, as the component itself got it.

    Attributes:
        restores: of what it draws and changes.
        applied: what was in force on the component.
        given: what the guard got for it, once it is over.
        kept: what the component keeps between calls, as it was before; None if it keeps nothing.
        changed: names of what of it the call wrote.
        held: what its caller's containers held before.
        fills: it put tensors into them.
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
        """Restore random numbers, step caches and the caller's containers from before the call."""
        for restore in self.restores:
            restore()
        if self.held is not None:
            self.held.restore()


@dataclass
class Excess:
    """An argument that was larger than a certificate allows; `limit` and `reached` are words."""

    limit: str
    calls: int = 0
    largest: float = 0.0
    reached: str = ""


_NOTHING = CallSummary("", "", 0, 0.0, (), 0)


@dataclass(eq=False)
class Call:
    """One component call under the guard.

    Attributes:
        slot: the attribute that the call goes through.
        device: what computes it; None before the first call.
        summary: what was counted so far.
        maxima: largest magnitudes by module path, step and format.
        users: threads that make the call now, if its layers are put on for that.
        unseen: calls whose output could not be looked at.
        writes: it writes into what the component keeps between calls; None before the first one.
    """

    callee: Callee
    state: Component
    slot: str
    device: torch.device | None = None
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
        """The name in records: `vae.decode`."""
        return self.callee.name

    @property
    def module(self) -> torch.nn.Module:
        return self.state.module

    @property
    def precision(self) -> str:
        """The precision of the autocast around it, or of most of its weights."""
        return next(iter(self.summary.precisions), "fp32")

    def move_to(self, callee: Callee, state: Component, slot: str) -> None:
        """Go on counting for another object in the component's place."""
        self.patches.undo()
        if state is not self.state:
            self.writes = None
        self.callee, self.state, self.slot = callee, state, slot
        self.device, self.latest = None, LatestCall()
        self.summary = replace(self.summary, component=callee.name, stage=callee.stage)

    def forget(self) -> None:
        """Let go of the arguments of the latest call."""
        self.latest = LatestCall()

    def begin(self, call: ComponentCall, planned: Scaling) -> None:
        """Record the arguments of a call without synchronising.

        Args:
            planned: its arguments' magnitudes and sizes are held against the limits there.
        """
        before = self.state.planned if self.latest.call is None else self.latest.applied
        if self.summary.precisions and before != self.state.applied:
            self.record_cast()  # a call of another signature had the component repaired
        self.latest.kept = None if self.writes is False else KeptState(self.module)
        self.latest.changed, self.latest.applied = [], self.state.applied
        self.latest.held, self.latest.fills = HeldContainers(call), False
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
        """Choose the limits of this call's arguments: of `encode.z`, `z` for `vae.encode`."""
        parts = [(key.partition("."), limit) for key, limit in limits.items()]
        return {name: x for (method, _, name), x in parts if method == self.callee.method}

    def record_cast(self) -> None:
        """Put the formats of weights that were cast before those that they had."""
        if self.summary.precisions:
            self._record_precisions(*self.state.name_precisions())

    def record_own_precision(self, precision: str) -> None:
        """Note the precision of the code's own autocast or casts, beside that of its weights."""
        self._record_precisions(precision)

    def _record_precisions(self, *precisions: str) -> None:
        """Record formats before those that are known."""
        with find_lock(self.module).noting():
            found = tuple(dict.fromkeys((*precisions, *self.summary.precisions)))
            self.summary = replace(self.summary, precisions=found)

    def record(self, elapsed_s: float, check: CallCheck) -> None:
        """Count one more call."""
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
        """Count a call as right that was counted as one with a fault."""
        with find_lock(self.module).noting():
            self.summary = replace(self.summary, non_finite=self.summary.non_finite - 1)

    def record_maxima(self, step: int | None, check: CallCheck) -> None:
        """Keep the largest magnitudes of its modules at a step."""
        for path, dtype, amax in check.maxima:
            key = path, step, name_dtype(dtype)
            self.maxima[key] = max(self.maxima.get(key, 0.0), amax)

    def list_maxima(self) -> Iterator[BlockMaximum]:
        """List the largest magnitude of each module at each step; None for NaN and Inf."""
        for (path, step, precision), amax in self.maxima.items():
            known = amax if amax < math.inf else None
            yield BlockMaximum(self.name, path, step, precision, known)

    def record_arguments(self, call: ComponentCall, pipe: Any) -> None:
        """Keep a call for a replay, with the state that it draws from and changes."""
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
        latest.restores = call.save(self.module, self.find_device(pipe))

    def record_writes(self) -> None:
        """Note the finished call's writes to the component's state, until a call writes nothing."""
        latest = self.latest
        latest.fills = latest.held is not None and latest.held.is_filled
        if latest.kept is not None:
            latest.changed = latest.kept.list_changes()
            self.writes = bool(latest.changed)
            latest.kept = latest.kept if latest.changed else None

    def find_device(self, pipe: Any) -> torch.device:
        """Find the device that computes its calls; offloaded weights wait elsewhere until then."""
        if self.device is None:
            weights = (x.device for x in self.module.parameters() if not x.is_meta)
            self.device = next(weights, torch.device("cpu"))
            if self.device.type == "cpu":
                self.device = torch.device(getattr(pipe, "_execution_device", self.device))
        return self.device

    def record_excesses(self, check: CallCheck) -> Iterator[str]:
        """Count the arguments that a certificate does not cover; yield a sentence for each new one."""
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
        """Whether it, or a part of it, runs as compiled code."""
        return is_compiled(self.callee.owner) or bool(find_compiled(self.module))
