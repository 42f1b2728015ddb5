"""The state of random numbers before a call, so that the same call draws the same ones again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Restore = Callable[[], None]


def save_random(device: torch.device, arguments: dict[str, Any]) -> Restore:
    """Brings back the numbers of today: those of the CPU, of the device, and of given generators.

    Cost: a copy of about 5 KB on the host; no operation on the device.
    """
    states: list[tuple[Callable[[torch.Tensor], object], torch.Tensor]] = [
        (torch.set_rng_state, torch.get_rng_state())
    ]
    if device.type == "cuda":
        kept = torch.cuda.get_rng_state(device)
        states.append((lambda state: torch.cuda.set_rng_state(state, device), kept))
    elif device.type == "mps":
        states.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    for value in arguments.values():
        for generator in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(generator, torch.Generator):
                states.append((generator.set_state, generator.get_state()))

    def restore() -> None:
        for put, state in states:
            put(state)

    return restore
