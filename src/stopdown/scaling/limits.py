"""What the inputs of a component can be: the assumptions that a certificate rests on.

Whole-numbered timesteps are finitely many and computed one by one; others lie in cells around as many
points. Token ids need no limit. Sizes, crops and positions are those of the captured call. Any other
floating input has a limit by what its argument is called, raised where a measured call was larger.

**Catches** latents, pictures, embeddings, rotary tables, masks, timesteps and size conditions as
Diffusers and Transformers name them.
**Does not catch** an argument of another name that is larger than a latent: give its limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from stopdown.capture import Capture
from stopdown.scaling.bounds import Limits, Steps

LATENTS = 64.0
"""No element of a latent, noise or picture is larger: unit noise stays under 6, and those of
autoencoders without a scale under 40."""

EMBEDDINGS = 128.0
"""No element of what a text or image encoder gives is larger."""

TIMESTEPS = 1000
"""Whole-numbered timesteps go from 0 to this one."""

CELLS = 2000
"""Cells that a timestep which is no whole number can lie in."""

_STEPS = ("timestep", "t")
_UNIT = ("rotary", "freqs", "mask")
_FIXED = ("time_ids", "img_ids", "txt_ids", "size", "coords")
_FREE = ("guidance", "scale")
_ENCODED = ("encoder", "embed", "pooled", "cap_feats", "prompt", "context", "text")


def state_limits(
    capture: Capture,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    largest: Mapping[str, float] | None = None,
    measured: Mapping[str, float] | None = None,
) -> Limits:
    """The limits of a call's inputs.

    Args:
        args, kwargs: of the captured call; only names, dtypes and sizes are looked at.
        largest: limits by the name of the argument, instead of those stated here.
        measured: placeholder name to the largest magnitude seen; a limit is at least twice that.
    """
    given, seen = dict(largest or {}), dict(measured or {})
    found: dict[str, float] = {}
    steps: dict[str, Steps] = {}
    fixed: dict[str, torch.Tensor] = {}
    for placeholder, (name, tensor) in zip(capture.inputs, name_inputs(args, kwargs), strict=True):
        if any(word in name for word in _FIXED) and _has_values(tensor):
            fixed[placeholder] = tensor
        elif _is_timestep(name, tensor):
            steps[placeholder] = _list_steps(tensor)
        elif tensor.is_floating_point():
            limit = given.get(name, state_limit(name))
            found[placeholder] = max(limit, 2 * seen.get(placeholder, 0.0))
    return Limits(found, steps, fixed)


def _has_values(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _list_steps(tensor: torch.Tensor) -> Steps:
    """Whole numbers one by one; else cells from 0 to 1000, or to 1 where the call's own is no more."""
    if not tensor.is_floating_point():
        return Steps(torch.arange(TIMESTEPS + 1))
    last = 1.0 if _has_values(tensor) and float(tensor.abs().max()) <= 1 else float(TIMESTEPS)
    return Steps(torch.linspace(0, last, CELLS + 1).double(), last / CELLS / 2)


def name_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a call in the order of `flatten_call`, by the names of their arguments."""
    leaves, _ = pytree.tree_flatten_with_path((args, dict(sorted(kwargs.items()))))
    return [(_name(path), leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]


def _name(path: Any) -> str:
    keys = [str(key.key) for key in path if isinstance(key, pytree.MappingKey)]
    return keys[-1] if keys else ""


def _is_timestep(name: str, tensor: torch.Tensor) -> bool:
    return (name in _STEPS or name.startswith("timestep")) and tensor.numel() <= 16


def state_limit(name: str) -> float:
    """The limit of a floating argument by its name; inf for none."""
    if any(word in name for word in _UNIT):
        return 1.0
    if any(word in name for word in (*_FREE, *_FIXED)):
        return math.inf
    return EMBEDDINGS if any(word in name for word in _ENCODED) else LATENTS
