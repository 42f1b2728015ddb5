"""By what a plan knows the weights that it was made for: a hash over a few values of each tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

SAMPLES = 16
"""Values of each tensor that tell one checkpoint from another."""


def sample_weights(module: torch.nn.Module) -> str:
    """SHA-256 over names, shapes and `SAMPLES` values of each weight, as hexadecimal.

    The same in fp32 and in the format that the checkpoint is stored in.
    Cost: one host read for each dtype.
    """
    return sample_tensors(sorted(module.state_dict().items()))


def sample_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """As `sample_weights`, of tensors that come one by one in the order of their names."""
    digest, taken = hashlib.sha256(), []
    for name, tensor in named:
        digest.update(f"{name}{tuple(tensor.shape)}\0".encode())
        if tensor.is_floating_point() and tensor.numel():
            flat = tensor.detach().reshape(-1)
            places = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64)
            taken.append(flat[places.long().to(flat.device)].float())
    if taken:
        digest.update(torch.cat(taken).cpu().numpy().tobytes())
    return digest.hexdigest()
