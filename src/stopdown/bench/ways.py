"""The ways in which a benchmark runs a model: formats, rescaled, guarded, compiled, offloaded.

Each way gives a context manager: inside, a pipeline runs in that way; outside, nothing of it is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stopdown.component_calls.components import cast_component_, find_callees, find_components
from stopdown.devices.device_memory import free_memory
from stopdown.devices.environment import Device
from stopdown.interception.accumulation import accumulating
from stopdown.memory.offloader import Offloader
from stopdown.memory.strategies import Placement, Prediction, Strategy
from stopdown.number_formats import FORMATS
from stopdown.plans.planned_loader import put_for_good
from stopdown.records import Plan
from stopdown.runtime.guard import guard


@dataclass(frozen=True)
class Way:
    """How a model is run.

    Attributes:
        residual: of the plan that brings it into the range of fp16; "" for no plan.
        placement: where weights wait.
        guarded: with the guard around it, which repairs nothing where there is nothing to repair.
        sums_in_fp16: PyTorch's switch for sums of fp16 products; None leaves it.
    """

    precision: str
    residual: str = ""
    placement: Placement = "resident"
    guarded: bool = False
    compiled: bool = False
    sums_in_fp16: bool | None = None


WAYS: dict[str, Way] = {
    "fp32": Way("fp32"),
    "bf16": Way("bf16"),
    "fp16": Way("fp16"),
    "rescaled": Way("fp16", "native"),
    "fp32 residual": Way("fp16", "fp32"),
    "guarded": Way("fp16", "native", guarded=True),
    "offloaded": Way("fp16", "native", "component"),
    "offloaded by block": Way("fp16", "native", "block"),
    "sums in fp32": Way("fp16", "native", sums_in_fp16=False),
    "sums in fp16": Way("fp16", "native", sums_in_fp16=True),
    "compiled": Way("fp16", "native", compiled=True),
}
"""In the order in which they run: what others are compared with first, what may take minutes last."""

Predict = Callable[[Any, Strategy], tuple[Prediction, dict[str, Any]]]


@contextlib.contextmanager
def running(
    build: Callable[[], Any],
    way: Way,
    device: Device,
    find_plan: Callable[[str], Plan],
    predict: Predict,
) -> Iterator[tuple[Any, int]]:
    """A pipeline that runs in one way, and the peak that is predicted of it.

    Args:
        predict: what a strategy is predicted to take, and which weights stray.
    """
    plan = find_plan(way.residual) if way.residual else None
    pipe = build()
    if plan is not None:
        put_for_good(pipe, plan)
    else:
        for module in find_components(pipe).values():
            cast_component_(module, FORMATS[way.precision].torch_dtype)
    free_memory()  # a plan's handle held the weights as they were
    prediction, strays = predict(pipe, Strategy(way.placement))
    if way.compiled:
        for callee in find_callees(pipe):
            if callee.stage == "denoise":
                callee.owner.compile()
    with contextlib.ExitStack() as stack:
        if way.placement != "resident":
            for module in find_components(pipe).values():
                module.to("cpu")
            free_memory()
            offloader = Offloader(pipe, prediction, (), strays, device=device.torch_name)
            stack.enter_context(offloader)
        if way.sums_in_fp16 is not None:
            stack.enter_context(accumulating(way.sums_in_fp16))
        if way.guarded:
            stack.enter_context(guard(pipe, announce=lambda text: None))
        stack.enter_context(torch.no_grad())
        yield pipe, prediction.peak_bytes
    del pipe
    free_memory()
