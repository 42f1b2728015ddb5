"""What a benchmark runs, a model that is here or generated weights of a size that fits, and the ways in
which it does: formats, rescaled, guarded, compiled, offloaded.

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
from stopdown.number_formats import FORMATS, format_bytes
from stopdown.pipelines.loader import load_pipeline, move_program
from stopdown.pipelines.requests import Request
from stopdown.pipelines.tiny_pipelines import build_wide, overflow_
from stopdown.plans.applier import load_entry, put_plan
from stopdown.records import Plan
from stopdown.runtime.guard import guard
from stopdown.sources.sources import Source


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
        put_plan(pipe, plan, load_entry)
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


FP32_SHARE = 0.3
"""Of a device's memory for generated weights in fp32: a plan is tried on a copy beside them."""

_WIDTHS = (48, 30, 16, 8, 4, 2)
"""Heads of 64 of CogVideoX-5B, CogVideoX-2B, and smaller ones."""
_MOST_LAYERS = 42
_LEAST_LAYERS = 2
_TIME_WIDTH = 512


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        meaning: what it is, in words without a path.
        build: its pipeline in fp32 on the device, each time the same.
    """

    name: str
    meaning: str
    build: Callable[[], Any]
    request: Request


def make_real(source: Source, device: Device, request: Request) -> Subject:
    """A checkpoint that is here; a folder of one's own is not named."""
    name = source.name if source.kind == "bundled" else source.pipeline_class

    def build() -> Any:
        return move_program(load_pipeline(source, torch_dtypes=torch.float32), device)

    return Subject(name, f"{source.pipeline_class} with its own weights.", build, request)


def make_generated(size_bytes: int, device: Device, steps: int) -> Subject:
    """A CogVideoX denoiser of random weights that overflows in fp16 as it comes.

    Args:
        size_bytes: of its weights in fp16, about.
    """
    heads, layers = choose_shape(size_bytes)
    side = 32 if device.type == "cpu" or layers * heads < 64 else 256
    request = Request(prompt="a", frames=9, height=side, width=side, steps=steps, guidance=1.0)

    def build() -> Any:
        pipe = build_wide(heads, layers, _TIME_WIDTH, device.torch_name)
        overflow_(pipe.transformer)
        pipe.set_progress_bar_config(disable=True)
        return move_program(pipe, device)

    size = format_bytes(layers * _count_layer(heads) * 2)
    meaning = (
        f"CogVideoX's denoiser, {layers} layers {heads * 64} wide, {size} in fp16, random weights that "
        f"overflow in fp16; {side}x{side} and 9 frames."
    )
    return Subject("generated", meaning, build, request)


def choose_shape(size_bytes: int) -> tuple[int, int]:
    """Heads and layers of a denoiser with about this many bytes in fp16: as wide as two layers allow."""
    for heads in _WIDTHS:
        layers = size_bytes // (2 * _count_layer(heads))
        if layers >= _LEAST_LAYERS:
            return heads, min(_MOST_LAYERS, int(layers))
    return _WIDTHS[-1], 1


def _count_layer(heads: int) -> int:
    """Parameters of a layer: attention, feed-forward, and the two norms that a timestep modulates."""
    width = heads * 64
    return 12 * width**2 + 12 * _TIME_WIDTH * width
