"""Update dtypes that modules keep outside of their weights, after the weights were cast.

These are attributes `dtype`, to which code casts new tensors, and tensors in plain attributes with the 16
bits in which a module was built, such as the bounding box of Shap-E's renderer. With weights in another
format, they would lead to mixed dtypes. Tables in fp32 are meant to be exact and stay so.
"""

from __future__ import annotations

import torch

from stopdown.interception.patches import Patches
from stopdown.interception.randomness import HALVES


def list_own_dtypes(module: torch.nn.Module) -> frozenset[torch.dtype]:
    """Return the set of dtypes of a module's floating parameters."""
    return frozenset(x.dtype for x in module.parameters() if x.is_floating_point())


def set_own_dtypes(
    module: torch.nn.Module, before: frozenset[torch.dtype], dtype: torch.dtype, patches: Patches
) -> None:
    """Update modules' `dtype` attributes and 16-bit tensor attributes after their weights were cast.

    Code of SAT, ComfyUI and TRELLIS casts new tensors to the attribute `dtype`.

    Args:
        before: dtypes of the parameters before the cast; attributes in others stay.
        dtype: the new one.
    """
    for part in module.modules():
        if vars(part).get("dtype") in before and next(part.parameters(), None) is not None:
            patches.set_attribute(part, "dtype", dtype)
        for name, value in list(vars(part).items()):
            is_own = isinstance(value, torch.Tensor) and value.dtype in before
            if is_own and value.dtype in HALVES and value.dtype != dtype:
                patches.set_attribute(part, name, value.to(dtype))
