"""The steps of a run, counted at the calls of the pipeline's scheduler.

**Catches** schedulers with `set_timesteps` and `step`, also one that was put in another's place.
**Does not catch** samplers that are plain functions: there every call is in step 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stopdown.component_calls.call import ComponentCall
from stopdown.component_calls.call_interception import Rank, put_layer
from stopdown.component_calls.components import Callee
from stopdown.interception.patches import Patches
from stopdown.numerics import iterate_tensors


class StepCounter:
    """Counts the steps of a pipeline's scheduler between `follow` and `stop`.

    Attributes:
        pipe: the pipeline.
        done: steps that are over in this run.
        last_result: what the scheduler gave last; None before the first step.
        last_inputs: the tensors that it was given then.
    """

    def __init__(
        self,
        pipe: Any,
        rank: Rank,
        *,
        on_begin: Callable[[], None] = lambda: None,
        on_step: Callable[[Any], None] = lambda result: None,
    ) -> None:
        """
        Args:
            pipe: one without a scheduler makes no steps.
            rank: of the layers on the scheduler.
            on_begin: called when a run's steps are set, before the scheduler sets them.
            on_step: given what the scheduler returned, before the step counts as done.
        """
        self.pipe, self.done = pipe, 0
        self.last_result: Any = None
        self.last_inputs: tuple[torch.Tensor, ...] = ()
        self._rank, self._on_begin, self._on_step = rank, on_begin, on_step
        self._scheduler: Any = None
        self._patches = Patches()

    def follow(self) -> None:
        """Count the steps of the scheduler that the pipeline has now; of an earlier one no more."""
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is self._scheduler:
            return
        self.stop()
        self._scheduler = scheduler
        for method, layer in (("step", self._step), ("set_timesteps", self._begin)):
            if callable(getattr(scheduler, method, None)):
                put_layer(scheduler, method, layer, self._patches, self._rank)

    def stop(self) -> None:
        """Leave the scheduler as it was. A second call does nothing."""
        self._patches.undo()
        self._scheduler = None
        self.forget()

    def forget(self) -> None:
        """A new run: what an earlier one's scheduler gave says nothing about it."""
        self.last_result, self.last_inputs = None, ()

    @property
    def total(self) -> int:
        """Steps of the run; fewer than the scheduler has when it starts from a picture or video."""
        told = getattr(self.pipe, "_num_timesteps", None)
        if isinstance(told, int):
            return told
        timesteps = getattr(getattr(self.pipe, "scheduler", None), "timesteps", None)
        return len(timesteps) if timesteps is not None else 0

    def find_step(self, callee: Callee) -> int | None:
        """The step that a call of now belongs to, from 0; None outside of denoising."""
        return self.done if callee.stage == "denoise" else None

    def name_step(self, callee: Callee) -> str:
        """` at step 2 of 2`, for a call of now; "" outside of denoising."""
        step, total = self.find_step(callee), self.total
        return "" if step is None or not total else f" at step {step + 1} of {total}"

    def name_last_step(self) -> str:
        """` at step 2 of 2`: the scheduler's last one; "" before the first."""
        return f" at step {self.done} of {self.total}" if self.done and self.total else ""

    def _step(self, call: ComponentCall) -> Any:
        self.last_inputs = tuple(iterate_tensors((call.args, call.kwargs)))
        self.last_result = call.proceed()
        self._on_step(self.last_result)
        self.done += 1
        return self.last_result

    def _begin(self, call: ComponentCall) -> Any:
        self.done = 0
        self._on_begin()
        return call.proceed()
