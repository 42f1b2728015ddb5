"""Watch a pipeline's calls: time, precision, and whether each output is finite.

Each call's output is tested once for NaN and Inf, on the device, with one host read; NaN and Inf
travel, so the output of a call is the only cut that is needed to know that they exist. A fault stops
the run there, before the scheduler or a file has seen the value.

**Catches** NaN and +-Inf in any floating tensor that a component returns.
**Does not catch** values that a clamp inside the component made finite, saturation, or a result that
is finite and wrong; the finished frames are looked at by `media.find_frame_faults`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from stopdown.errors import NonFiniteError
from stopdown.formats import find_format, name_dtype
from stopdown.numerics import (
    all_finite,
    count_non_finite,
    iterate_tensors,
    measure_amax,
)
from stopdown.patches import Patches
from stopdown.pipelines.components import Door, find_doors, read_precisions
from stopdown.pipelines.doors import Call, find_module, put_door, put_layer
from stopdown.records import CallSummary, Decision

Observer = Callable[[str, str, int, int], None]
"""Told of each finished call: component, stage, steps done, steps in all (0 when unknown)."""


@dataclass
class _Tally:
    """What is counted for one door."""

    door: Door
    calls: int = 0
    elapsed_s: float = 0.0
    precisions: tuple[str, ...] = ()
    non_finite: int = 0


@dataclass
class Watch:
    """A context manager that stands at every door of a pipeline.

    Args:
        pipe: a Diffusers pipeline.
        decisions: precision of each call with its reason, for messages; may be empty.
        observer: told of each finished call.
        patches: where the doors are put; taken off on exit.

    Raises:
        NonFiniteError: out of the pipeline's call, at the first output with NaN or Inf.
    """

    pipe: Any
    decisions: tuple[Decision, ...] = ()
    observer: Observer | None = None
    own_s: float = 0.0
    steps_done: int = 0
    _patches: Patches = field(default_factory=Patches)
    _tallies: dict[str, _Tally] = field(default_factory=dict)

    def __enter__(self) -> Watch:
        try:
            for door in find_doors(self.pipe):
                self._tallies[door.component] = _Tally(door)
                put_door(door, functools.partial(self._around, door), self._patches)
            self._count_steps()
        except BaseException:
            self._patches.undo()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patches.undo()

    def summarize(self) -> tuple[CallSummary, ...]:
        """What each component that was called did, in order of the pipeline's components."""
        return tuple(
            CallSummary(
                tally.door.component,
                tally.door.stage,
                tally.calls,
                tally.elapsed_s,
                tally.precisions,
                tally.non_finite,
            )
            for tally in self._tallies.values()
            if tally.calls
        )

    def _count_steps(self) -> None:
        def step(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = call(*args, **kwargs)
            self.steps_done += 1
            return result

        def begin(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.steps_done = 0
            return call(*args, **kwargs)

        scheduler = getattr(self.pipe, "scheduler", None)
        for method, layer in (("step", step), ("set_timesteps", begin)):
            if callable(getattr(scheduler, method, None)):
                put_layer(scheduler, method, layer, self._patches)

    def _count_all_steps(self) -> int:
        """Steps of the run; fewer than the scheduler has when it starts from a picture or video."""
        told = getattr(self.pipe, "_num_timesteps", None)
        if isinstance(told, int):
            return told
        timesteps = getattr(getattr(self.pipe, "scheduler", None), "timesteps", None)
        return len(timesteps) if timesteps is not None else 0

    def _around(self, door: Door, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered = time.perf_counter()
        tally = self._tallies[door.component]
        if not tally.precisions:
            found = read_precisions(find_module(door))
            tally.precisions = tuple(name_dtype(dtype) for dtype in found)
        called = time.perf_counter()
        output = call(*args, **kwargs)
        returned = time.perf_counter()
        tally.calls += 1
        tally.elapsed_s += returned - called
        self._judge(door, tally, args, kwargs, output)
        if self.observer is not None:
            self.observer(door.component, door.stage, self.steps_done, self._count_all_steps())
        self.own_s += (called - entered) + (time.perf_counter() - returned)
        return output

    def _judge(
        self,
        door: Door,
        tally: _Tally,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        outputs = list(iterate_tensors(output))
        finite = all_finite(outputs)
        if finite is None or bool(finite):
            return
        tally.non_finite += 1
        inputs = [t for t in iterate_tensors((args, kwargs)) if t.is_floating_point()]
        raise self._describe(door, tally, inputs, [t for t in outputs if t.is_floating_point()])

    def _describe(
        self,
        door: Door,
        tally: _Tally,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> NonFiniteError:
        counts = [count_non_finite(tensor) for tensor in outputs]
        nan, infinite = (sum(column) for column in zip(*counts, strict=True))
        total = sum(tensor.numel() for tensor in outputs)
        precision = tally.precisions[0] if tally.precisions else name_dtype(outputs[0].dtype)
        what = (
            f"`{door.component}` gave {_name_counts(nan, infinite)} in {total} values"
            f"{self._name_place(door)}, in {precision}."
        )
        expected = " ".join([_describe_inputs(inputs, precision), self._name_reason(door)]).strip()
        return NonFiniteError(what, expected=expected, remedy=suggest_remedy(door, precision))

    def _name_place(self, door: Door) -> str:
        if door.stage != "denoise" or not self._count_all_steps():
            return ""
        return f" at step {self.steps_done + 1} of {self._count_all_steps()}"

    def _name_reason(self, door: Door) -> str:
        for decision in self.decisions:
            if decision.component == door.component:
                return f'{decision.precision} was chosen for it: "{decision.reason}"'
        return ""


def _name_counts(nan: int, infinite: int) -> str:
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


def suggest_remedy(door: Door, precision: str) -> str:
    """What to type after a component gave NaN or Inf in a precision."""
    if precision == "fp32":
        return (
            "More precision is not to be had: its weights may be damaged, or an input may be out of "
            "range. Load the model again from its source."
        )
    if precision == "fp16":
        return f"Use `--precision {door.component}=bf16`, or fp32 where bf16 is slow or missing."
    return f"Use `--precision {door.component}=fp32`."
