"""Fingerprints that tie a plan to its weights: a hash over a few values of each tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from stopdown.errors import PlanError
from stopdown.memory.weight_stores import find_waiting
from stopdown.numerics import is_away
from stopdown.scaling import StoredWeight

SAMPLES = 16
"""Number of values of each tensor that are hashed."""


def sample_weights(module: torch.nn.Module) -> str:
    """Return a fingerprint of a module's weights: the SHA-256 over names, shapes and `SAMPLES` values
    of each.

    It's hexadecimal, and the same in fp32 as in the checkpoint's format, and for offloaded weights.

    Raises:
        PlanError: a weight has no values, for example because another library offloads it.

    Cost: one host read if all weights are on one device, else one for each.
    """
    state = sorted(module.state_dict(keep_vars=True).items())
    weights = [(name, x) for name, x in state if isinstance(x, torch.Tensor)]
    named = [(name, find_waiting(module, x) or x) for name, x in weights]
    for name, x in named:
        if isinstance(x, torch.Tensor) and is_away(x):
            raise PlanError(
                f"{name} of a {type(module).__name__} has no values: it is stored elsewhere between calls, "
                "or was never loaded.",
                expected="A plan is made from weights, and belongs to them.",
                remedy="Make the plan first, and offload the pipeline afterwards. stopdown.load(source) "
                "does both.",
            )
    return sample_tensors(named)


def sample_tensors(named: Iterable[tuple[str, torch.Tensor | StoredWeight]]) -> str:
    """Return the fingerprint of (name, tensor) pairs that `sample_weights` would return for a module
    with them.

    Args:
        named: sorted by name; it may be lazy, as one tensor is needed at a time.
    """
    return join_samples((name, *take_samples(weight)) for name, weight in named)


def take_samples(
    weight: torch.Tensor | StoredWeight,
) -> tuple[tuple[int, ...], torch.Tensor | None]:
    """Return a weight's shape and `SAMPLES` of its values in fp32, or None if it has no float values."""
    tensor = weight.values if isinstance(weight, StoredWeight) else weight.detach()
    shape = tuple(tensor.shape)
    if not (tensor.is_floating_point() and tensor.numel()):
        return shape, None
    spread = torch.linspace(0, tensor.numel() - 1, SAMPLES, dtype=torch.float64, device="cpu")
    places = spread.long().to(tensor.device)
    is_stored = isinstance(weight, StoredWeight)
    found = weight.take(places) if is_stored else tensor.reshape(-1)[places]
    return shape, found.float()


def join_samples(named: Iterable[tuple[str, tuple[int, ...], torch.Tensor | None]]) -> str:
    """Return the SHA-256 of (name, shape, samples) triples, sorted by name, as hexadecimal."""
    digest, taken = hashlib.sha256(), []
    for name, shape, found in named:
        digest.update(f"{name}{shape}\0".encode())
        if found is not None:
            taken.append(found)
    if len({x.device for x in taken}) > 1:
        taken = [x.cpu() for x in taken]
    if taken:
        digest.update(torch.cat(taken).cpu().numpy().tobytes())
    return digest.hexdigest()
