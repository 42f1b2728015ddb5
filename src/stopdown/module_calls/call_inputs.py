"""Recognise a call's inputs by the names of its arguments (latents, timesteps, embeddings, masks), and
read their sizes.

Names are those that Diffusers and Transformers give their arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stopdown.module_calls.call import ComponentCall
from stopdown.numerics import has_values, measure_amax

Size = tuple[int, ...]
"""Shape of an argument without its batch: `(226, 4096)` for 226 tokens."""

_STEPS = ("timestep", "t")
UNIT_NAMES = ("rotary", "freqs", "mask")
FIXED_NAMES = ("time_ids", "img_ids", "txt_ids", "size", "coords")
FREE_NAMES = ("guidance", "scale")
_ENCODED = ("encoder", "embed", "pooled", "cap_feats", "prompt", "context", "text")


def read_names(module: torch.nn.Module, method: str) -> tuple[str, ...]:
    """Return the argument names of a module's method, without `self`, in order; "" means `forward`."""
    called = getattr(type(module), method or "forward")
    return tuple(inspect.signature(called).parameters)[1:]


def name_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = ()
) -> list[tuple[str, torch.Tensor]]:
    """Return each tensor of a call with its argument's name, in the order of `flatten_call`."""
    return [(name, tensor) for name, tensor, _ in _list_inputs(args, kwargs, names)]


def _list_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]
) -> list[tuple[str, torch.Tensor, bool]]:
    """Return each tensor of a call, its argument's name, and whether it is an item of a list.

    Args:
        names: names of the positional arguments.
    """
    leaves, _ = pytree.tree_flatten_with_path((args, dict(sorted(kwargs.items()))))
    return [
        (_name(path, names), leaf, len(path) > 2 and isinstance(path[-1], pytree.SequenceKey))
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]


def _name(path: Any, names: Sequence[str]) -> str:
    keys = [str(key.key) for key in path if isinstance(key, pytree.MappingKey)]
    if keys:
        return keys[-1]
    place = path[1].idx
    return names[place] if place < len(names) else ""


def read_sizes(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = ()
) -> list[tuple[str, Size]]:
    """Return the length, or height and width, of each argument: its shape without the batch.

    A matrix in a list is one item of the batch, so its whole shape counts. Timesteps and size
    conditions have no length. Rotary tables and masks are left out, as their lengths follow from other
    arguments.
    """
    return [
        (name, tuple(map(int, tensor.shape if listed and tensor.dim() == 2 else tensor.shape[1:])))
        for name, tensor, listed in _list_inputs(args, kwargs, names)
        if tensor.dim() > 1
        and not is_timestep(name, tensor)
        and not any(word in name for word in (*UNIT_NAMES, *FREE_NAMES, *FIXED_NAMES))
    ]


def fits(size: Size, largest: Collection[Size]) -> bool:
    """Return whether a size is no larger in any dimension than at least one of several sizes."""
    pairs = (zip(size, most, strict=True) for most in largest if len(most) == len(size))
    return any(all(x <= y for x, y in pair) for pair in pairs)


def show_sizes(sizes: Iterable[Size]) -> str:
    """Format a size as `16 × 60 × 90`; join several with `or`."""
    return " or ".join(" × ".join(map(str, size)) for size in sizes)


def find_largest_step(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = ()
) -> float:
    """Return the largest timestep among a call's arguments; 0 if there is none."""
    named = name_inputs(args, kwargs, names)
    steps = [x for name, x in named if is_timestep(name, x) and has_values(x)]
    return max((measure_amax(x.float()) for x in steps), default=0.0)


def is_timestep(name: str, tensor: torch.Tensor) -> bool:
    return (name in _STEPS or name.startswith("timestep")) and tensor.numel() <= 16


def is_encoded(name: str) -> bool:
    """Return whether the argument of this name takes a text or image encoder's output."""
    return any(word in name for word in _ENCODED)


def read_call_sizes(
    calls: Sequence[ComponentCall],
) -> list[tuple[str, list[tuple[str, Size]]]]:
    """Return the name of each call with the sizes of its arguments."""
    return [
        (x.callee.name, read_sizes(x.args, x.kwargs, read_names(x.callee.owner, x.callee.method)))
        for x in calls
    ]
