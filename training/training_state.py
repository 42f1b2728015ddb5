"""Training that stops and goes on: checkpoints, and the learning rate of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn


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


def schedule(
    optimizers: Sequence[torch.optim.Optimizer], step: int, steps: int, rate: float = 1.0
) -> None:
    """Warm up over 30 steps, fall in a straight line over the second half and more."""
    share = min(1.0, (step + 1) / 30, (1 - step / steps) / 0.6 + 0.005)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak", group["lr"]) * share * rate
