"""Attributes `dtype` of modules, which follow when these are cast: code casts to them what it makes."""

from __future__ import annotations

import torch

from stopdown.interception.patches import Patches


def list_own_dtypes(module: torch.nn.Module) -> frozenset[torch.dtype]:
    """Return the dtypes of a module's floating parameters: some may be fp32 beside others in 16 bits."""
    return frozenset(x.dtype for x in module.parameters() if x.is_floating_point())


def set_own_dtypes(
    module: torch.nn.Module, before: frozenset[torch.dtype], dtype: torch.dtype, patches: Patches
) -> None:
    """Let the plain attributes `dtype` of modules with parameters follow when these are cast.

    Code of SAT, ComfyUI and TRELLIS casts the tensors that it makes to that attribute.

    Args:
        before: the dtypes that their parameters had.
    """
    for part in module.modules():
        if vars(part).get("dtype") in before and next(part.parameters(), None) is not None:
            patches.set_attribute(part, "dtype", dtype)
