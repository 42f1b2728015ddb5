"""Count the denoising steps of a run: as the pipeline reports them, or else by the calls of its scheduler.

Some loops of Diffusers pass the step, timestep and sigma of a denoiser's calls to its `cache_context`,
which works without a pipeline as well.

Not covered: samplers that are plain functions and report no step; all of their calls are in step 0.
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
        pipe: the object that has the scheduler; None without one.
        done: number of finished steps in this run.
        last_result: result of the scheduler's last step; None before the first.
        last_inputs: tensors in the arguments of that step.
    """

    def __init__(
        self,
        pipe: Any,
        rank: Rank,
        *,
        on_begin: Callable[[], None] = lambda: None,
        on_step: Callable[[Any], None] = lambda result: None,
    ) -> None:
        """Prepare to count the steps of a scheduler; `follow` begins to.

        Args:
            pipe: the object with the scheduler; without one, no steps are counted.
            rank: position of the functions around the scheduler's methods among others around them.
            on_begin: called when a run begins, before the scheduler's `set_timesteps`.
            on_step: called with the scheduler's result, before the step counts as done.
        """
        self.pipe, self.done = pipe, 0
        self.last_result: Any = None
        self.last_inputs: tuple[torch.Tensor, ...] = ()
        self._rank, self._on_begin, self._on_step = rank, on_begin, on_step
        self._scheduler: Any = None
        self._patches = Patches()
        self._told: Mapping[str, Any] = {}

    def listen(self, denoiser: Any, patches: Patches) -> None:
        """Read step, timestep and sigma of a denoiser's calls from its `cache_context`, if it has one."""
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
        """Count the steps of the pipeline's current scheduler instead of an earlier one's."""
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is self._scheduler:
            return
        self.stop()
        self._scheduler = scheduler
        for method, layer in (("step", self._step), ("set_timesteps", self._begin)):
            if callable(getattr(scheduler, method, None)):
                put_layer(scheduler, method, layer, self._patches, self._rank)

    def stop(self) -> None:
        """Remove the layers from the scheduler. A second call does nothing."""
        self._patches.undo()
        self._scheduler = None
        self.forget()

    def forget(self) -> None:
        """Forget the last result and inputs, which belong to an earlier run."""
        self.last_result, self.last_inputs = None, ()

    @property
    def is_told(self) -> bool:
        """Whether the pipeline has reported the step of the current call."""
        return self._told.get("step_index") is not None

    @property
    def total(self) -> int:
        """The number of steps of the run; from a picture or video, fewer than the scheduler has."""
        if self._told.get("num_inference_steps") is not None:
            return int(self._told["num_inference_steps"])
        told = getattr(self.pipe, "_num_timesteps", None)
        if isinstance(told, int):
            return told
        timesteps = getattr(getattr(self.pipe, "scheduler", None), "timesteps", None)
        return len(timesteps) if timesteps is not None else 0

    def find_step(self, callee: Callee) -> int | None:
        """Return the current step, counted from 0, for a call; None outside of denoising."""
        if self.is_told:
            return int(self._told["step_index"])
        return self.done if callee.stage == "denoise" else None

    def name_step(self, callee: Callee) -> str:
        """Describe the current step, such as ` at step 2 of 2 (sigma 0.9)`; "" outside of denoising."""
        step, total = self.find_step(callee), self.total
        if step is None or not total:
            return ""
        told = [f"{x} {float(self._told[x]):.3g}" for x in _PLACES if self._told.get(x) is not None]
        return f" at step {step + 1} of {total}" + (f" ({', '.join(told)})" if told else "")

    def name_last_step(self) -> str:
        """Describe the scheduler's last step, such as ` at step 2 of 2`; "" before the first."""
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
"""Keywords of Diffusers' `cache_context` that show a step's noise level."""
