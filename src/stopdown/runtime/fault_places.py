"""Which part of an output is bad: rows of the batch, frames, tokens.

**Catches** the rows, frames and tokens of what text encoders, denoisers and autoencoders return.
**Does not catch** channels, heights and widths: they say nothing that a person could act on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from stopdown.component_calls.components import Callee

_MOST_RANGES = 4


def name_axes(callee: Callee, shape: tuple[int, ...], arguments: dict[str, Any]) -> tuple[str, ...]:
    """What each dimension of a call's output counts; "" for channels, heights and widths.

    Args:
        shape: of the output. Five dimensions are a video: autoencoders have `[B, C, T, H, W]`,
            denoisers that or `[B, T, C, H, W]`; the number of latent channels tells which.
        arguments: of the call. An autoencoder that is given `num_frames` has frames for a batch.
    """
    if len(shape) == 3:
        return ("row", "token", "")
    if len(shape) == 4 and "num_frames" in arguments:
        return ("frame", "", "", "")
    if len(shape) == 5:
        return ("row", "frame", "", "", "") if _has_frames_first(callee, shape) else _VIDEO
    return ("row", *("",) * (len(shape) - 1))


_VIDEO = ("row", "", "frame", "", "")


def _has_frames_first(callee: Callee, shape: tuple[int, ...]) -> bool:
    config = getattr(callee.owner, "config", None)
    channels = getattr(config, "out_channels", None) or getattr(config, "in_channels", None)
    return callee.stage == "denoise" and shape[2] == channels and shape[1] != channels


def describe_place(bad: torch.Tensor, axes: tuple[str, ...]) -> str:
    """`row 2 of 2, frames 3 to 5 of 9`, counted from 1; "" when the fault is everywhere.

    Args:
        bad: boolean, of the shape of the output.
        axes: as `name_axes` gives them.

    Cost: one pass and one host read for each named dimension.
    """
    return ", ".join(_describe_axes(bad, axes))


def _describe_axes(bad: torch.Tensor, axes: tuple[str, ...]) -> Iterator[str]:
    for axis, name in enumerate(axes):
        others = tuple(d for d in range(bad.dim()) if d != axis)
        hit = (bad.any(dim=others) if others else bad).nonzero().flatten().tolist()
        if name and len(hit) < bad.shape[axis]:
            plural = "s" if len(hit) > 1 else ""
            yield f"{name}{plural} {_name_ranges(hit)} of {bad.shape[axis]}"


def _name_ranges(indices: list[int]) -> str:
    """`1, 3 to 5 and 8` for indices from 0; how many they are when there are many ranges."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    if len(ranges) > _MOST_RANGES:
        return f"{indices[0] + 1} to {indices[-1] + 1}, {len(indices)} of them,"
    told = [f"{a + 1}" if a == b else f"{a + 1} to {b + 1}" for a, b in ranges]
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"
