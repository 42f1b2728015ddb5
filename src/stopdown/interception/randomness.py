"""Saving and restoring the state of random generators, so that a repeated call draws the same numbers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from stopdown.interception.patches import Patches

Restore = Callable[[], None]

HALVES = (torch.float16, torch.bfloat16)


class RandomSource(NamedTuple):
    """A random generator: functions that read and restore its state."""

    read: Callable[[], torch.Tensor]
    put: Callable[[torch.Tensor], object]


def find_random(device: torch.device, arguments: Iterable[Any]) -> list[RandomSource]:
    """List the random generators that a call may draw from: the CPU's, the device's, and its arguments'."""
    sources = [RandomSource(torch.get_rng_state, torch.set_rng_state)]
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        which = () if device.type == "mps" else (device,)  # of which there is one
        sources.append(
            RandomSource(
                lambda: module.get_rng_state(*which),
                lambda state: module.set_rng_state(state, *which),
            )
        )
    for value in arguments:
        for generator in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(generator, torch.Generator):
                sources.append(RandomSource(generator.get_state, generator.set_state))
    return sources


def find_weights_device(module: torch.nn.Module) -> torch.device:
    """Return the device of a module's first weight; the CPU if it has no weights."""
    weight = next(module.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device


def save_random(device: torch.device, arguments: Iterable[Any] = ()) -> Restore:
    """Return a function that restores the current states of the generators that a call may draw from.

    These are the CPU's, the device's, and those among the arguments.

    Cost: a copy of about 5 KB on the host; no operation on the device.
    """
    states = [(source.put, source.read()) for source in find_random(device, arguments)]

    def restore() -> None:
        for put, state in states:
            put(state)

    return restore


@contextlib.contextmanager
def kept_random(
    module: torch.nn.Module, args: Iterable[object], kwargs: Mapping[str, object]
) -> Iterator[None]:
    """Restore, after the block, the random generators that a module's call may draw from, so that it
    can be repeated.

    Cost: a copy of about 5 KB on the host.
    """
    weight = next(module.parameters(), None)
    is_here = weight is not None and not isinstance(weight, FakeTensor)
    device = weight.device if is_here else torch.device("cpu")  # type: ignore[union-attr]
    restore = save_random(device, (*args, *kwargs.values()))
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Draw random numbers from a seed inside the block; then restore the CPU's and current device's
    generators.
    """
    kind, device = torch.accelerator.current_accelerator(), torch.device("cpu")
    if (
        kind
        and torch.accelerator.is_available()
        and getattr(torch.get_device_module(kind), "is_initialized", lambda: True)()
    ):
        device = torch.device(kind.type, torch.accelerator.current_device_index())
    restore = save_random(device)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def same_noise() -> Iterator[None]:
    """Let `torch.randn` on the CPU draw in fp16 and bf16 the same noise as in fp32, rounded, inside the
    block.

    By itself, PyTorch draws other numbers in 16 bits (2.11.0), or other ones at the end of a tensor whose
    size isn't a multiple of 16 (2.13.0).
    """
    draw = torch.randn

    @functools.wraps(draw)
    def draw_in_fp32(*size: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        where = torch.device(device or torch.get_default_device())
        if dtype not in HALVES or where.type != "cpu" or "out" in options:
            return draw(*size, dtype=dtype, device=device, **options)
        return draw(*size, dtype=torch.float32, device=device, **options).to(dtype)

    with Patches() as patches:
        patches.set_attribute(torch, "randn", draw_in_fp32)
        yield
