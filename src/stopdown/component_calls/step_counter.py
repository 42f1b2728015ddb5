"""The steps of a run: as the pipeline tells them, else counted at the calls of its scheduler.

Some loops of Diffusers tell a denoiser's `cache_context` the step, timestep and sigma of its calls. That
holds for a model without a pipeline as well.

Not covered: samplers that are plain functions and tell nothing: there every call is in step 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from stopdown.interception.patches import Patches
from stopdown.module_calls.call_interception import put_layer
from stopdown.module_calls.callee import Callee
from stopdown.numerics import iterate_tensors
from stopdown.scaling import ComponentCall, Rank


class StepCounter:
    """Counts the steps of a pipeline's scheduler between `follow` and `stop`.

    Attributes:
        pipe: what has the scheduler; None if nothing counts the steps.
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
            on_begin: called when a run's steps are set, before the scheduler sets them.
            on_step: given the scheduler's result, before the step counts as done.
        """
        self.pipe, self.done = pipe, 0
        self.last_result: Any = None
        self.last_inputs: tuple[torch.Tensor, ...] = ()
        self._rank, self._on_begin, self._on_step = rank, on_begin, on_step
        self._scheduler: Any = None
        self._patches = Patches()
        self._told: Mapping[str, Any] = {}

    def listen(self, denoiser: Any, patches: Patches) -> None:
        """Take step, timestep and sigma of a denoiser's calls from its `cache_context`, if it has one."""
        if callable(getattr(denoiser, "cache_context", None)):
            put_layer(denoiser, "cache_context", self._hear, patches, self._rank)

    @contextlib.contextmanager
    def _hear(self, call: ComponentCall) -> Iterator[None]:
        before, self._told = self._told, call.kwargs
        try:
            with call.proceed():
                yield
        finally:
            self._told = before

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
        """Forget the last results of an earlier run's scheduler: they say nothing about a new run."""
        self.last_result, self.last_inputs = None, ()

    @property
    def is_told(self) -> bool:
        """Whether the loop passed the step to the present call."""
        return self._told.get("step_index") is not None

    @property
    def total(self) -> int:
        """Steps of the run; fewer than the scheduler has when it starts from a picture or video."""
        if self._told.get("num_inference_steps") is not None:
            return int(self._told["num_inference_steps"])
        told = getattr(self.pipe, "_num_timesteps", None)
        if isinstance(told, int):
            return told
        timesteps = getattr(getattr(self.pipe, "scheduler", None), "timesteps", None)
        return len(timesteps) if timesteps is not None else 0

    def find_step(self, callee: Callee) -> int | None:
        """Return the step, from 0, that a call made now belongs to; None outside of denoising."""
        if self.is_told:
            return int(self._told["step_index"])
        return self.done if callee.stage == "denoise" else None

    def name_step(self, callee: Callee) -> str:
        """Name the step of a call made now: ` at step 2 of 2 (sigma 0.9)`; "" outside of denoising."""
        step, total = self.find_step(callee), self.total
        if step is None or not total:
            return ""
        told = [f"{x} {float(self._told[x]):.3g}" for x in _PLACES if self._told.get(x) is not None]
        return f" at step {step + 1} of {total}" + (f" ({', '.join(told)})" if told else "")

    def name_last_step(self) -> str:
        """Name the scheduler's last step: ` at step 2 of 2`; "" before the first."""
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


_PLACES = ("timestep", "sigma")
"""Where in its noise a step is, as Diffusers tells it."""
