"""The state of random numbers before a call, so that the same call draws the same ones again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

Restore = Callable[[], None]


class RandomSource(NamedTuple):
    """One source of random numbers: how its state is read, and put back."""

    read: Callable[[], torch.Tensor]
    put: Callable[[torch.Tensor], object]


def find_random(device: torch.device, arguments: Iterable[Any]) -> list[RandomSource]:
    """What a call may draw from: the CPU, the device, and the generators that it is given, in order."""
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


def save_random(device: torch.device, arguments: Mapping[Any, Any]) -> Restore:
    """Brings back the numbers of today: those of the CPU, of the device, and of given generators.

    Cost: a copy of about 5 KB on the host; no operation on the device.
    """
    states = [(source.put, source.read()) for source in find_random(device, arguments.values())]

    def restore() -> None:
        for put, state in states:
            put(state)

    return restore


@contextlib.contextmanager
def kept_random(
    module: torch.nn.Module, args: Iterable[object], kwargs: Mapping[str, object]
) -> Iterator[None]:
    """Put back the random numbers that a call draws: of the CPU, of the device, of given generators.

    Cost: a copy of about 5 KB on the host.
    """
    weight = next(module.parameters(), None)
    is_here = weight is not None and not isinstance(weight, FakeTensor)
    device = weight.device if is_here else torch.device("cpu")  # type: ignore[union-attr]
    restore = save_random(device, {**dict(enumerate(args)), **kwargs})
    try:
        yield
    finally:
        restore()
