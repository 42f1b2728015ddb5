"""What a benchmark runs: a model that is here, and generated weights of a size that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stopdown.devices.environment import Device
from stopdown.number_formats import format_bytes
from stopdown.pipelines.loader import load_pipeline, move_program
from stopdown.pipelines.requests import Request
from stopdown.pipelines.tiny_pipelines import build_wide, overflow_
from stopdown.sources.sources import Source

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
