"""Training that stops and goes on: checkpoints, optimizers, learning rates and averaged weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn

from muon import Muon


def restore(
    path: Path, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Load a checkpoint, if there's one, into models and optimizers.

    Returns:
        steps that were done, and the seconds that they took.
    """
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    for name, model in models.items():
        model.load_state_dict(state[name])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], state["spent_s"]


def store(
    path: Path,
    models: Mapping[str, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    step: int,
    spent_s: float,
) -> None:
    """Write a checkpoint; the one before remains until the new one is whole."""
    state = {name: model.state_dict() for name, model in models.items()}
    state |= {
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "spent_s": spent_s,
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


class HasSteps(Protocol):
    """A part of training: of its steps only the number matters here."""

    @property
    def steps(self) -> int: ...


Cycle = TypeVar("Cycle", bound=HasSteps)


def find_cycle(cycles: Sequence[Cycle], step: int) -> tuple[Cycle, int]:
    """Find the cycle that a step belongs to, and the step's number inside it.

    Raises:
        ValueError: the step lies behind the last cycle.
    """
    for cycle in cycles:
        if step < cycle.steps:
            return cycle, step
        step -= cycle.steps
    raise ValueError("the step lies behind the last cycle")


def schedule(
    optimizers: Sequence[torch.optim.Optimizer], step: int, steps: int, rate: float = 1.0
) -> None:
    """Warm up over 30 steps, fall in a straight line over the second half and more."""
    share = min(1.0, (step + 1) / 30, (1 - step / steps) / 0.6 + 0.005)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak", group["lr"]) * share * rate


def make_denoiser_optimizers(
    model: nn.Module, outside: Sequence[str], rate: float, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """Give Muon the matrices of attention and feed-forward, AdamW everything else.

    Args:
        outside: parts of the names of matrices in blocks that AdamW gets as well.
        rate: learning rate of AdamW.
        dtype: of Muon's products.
    """
    inside = [
        weight
        for name, weight in model.named_parameters()
        if weight.dim() == 2 and "block" in name and not any(part in name for part in outside)
    ]
    taken = {id(weight) for weight in inside}
    rest = [weight for weight in model.parameters() if id(weight) not in taken]
    return [Muon(inside, lr=0.01, dtype=dtype), torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98))]


@torch.no_grad()
def average(shadow: nn.Module, model: nn.Module, step: int, most: float) -> None:
    """Move the averaged weights, which are what ships, towards those of this step.

    Args:
        most: decay of the average once it has seen many steps.
    """
    decay = min(most, (step + 1) / (step + 20))
    for slow, fast in zip(shadow.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)
