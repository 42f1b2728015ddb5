"""What modules keep in a dtype outside of their weights, which follows when these are cast.

An attribute `dtype`: code casts to it what it makes. Tensors in plain attributes, made in the 16 bits that
a module was built in, as the bounding box of Shap-E's renderer is: beside weights of another format they
are mixed dtypes. Tables in fp32 are meant to stay exact, and are left alone.
"""

from __future__ import annotations

import torch

from stopdown.interception.patches import Patches
from stopdown.interception.randomness import HALVES


def list_own_dtypes(module: torch.nn.Module) -> frozenset[torch.dtype]:
    """Return the dtypes of a module's floating parameters: some may be fp32 beside others in 16 bits."""
    return frozenset(x.dtype for x in module.parameters() if x.is_floating_point())


def set_own_dtypes(
    module: torch.nn.Module, before: frozenset[torch.dtype], dtype: torch.dtype, patches: Patches
) -> None:
    """Let the plain attributes of modules follow when their weights are cast.

    Code of SAT, ComfyUI and TRELLIS casts the tensors that it makes to the attribute `dtype`.

    Args:
        before: the dtypes that their parameters had.
    """
    for part in module.modules():
        if vars(part).get("dtype") in before and next(part.parameters(), None) is not None:
            patches.set_attribute(part, "dtype", dtype)
        for name, value in list(vars(part).items()):
            is_own = isinstance(value, torch.Tensor) and value.dtype in before
            if is_own and value.dtype in HALVES and value.dtype != dtype:
                patches.set_attribute(part, name, value.to(dtype))
