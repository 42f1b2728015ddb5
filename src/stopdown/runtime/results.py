"""What a pipeline returned: whether it is finite, and the videos and pictures in it.

**Catches** NaN and Inf in tensors and arrays, latents too.
**Does not catch** pictures that were rounded to bytes already: NaN is black there, which is found in the
frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from stopdown.frames.media import to_uint8
from stopdown.numerics import bound_values, iterate_leaves

_WHOLE_VIDEO = 4
"""Dimensions of a video's array: frames, rows, columns, channels."""


def count_bad(output: Any) -> tuple[int, int, int]:
    """How many values of a result are NaN, how many infinite, and how many there are in all.

    Cost: a pass over it; one host read when it holds tensors that are not on the CPU.
    """
    leaves = list(iterate_leaves(output, (torch.Tensor, np.ndarray)))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    arrays = [x for x in leaves if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    bounds = bound_values(tensors)
    is_finite = bounds is None or bool(torch.isfinite(bounds).all())
    if is_finite and all(np.isfinite(x).all() for x in arrays):
        return 0, 0, 0
    arrays += [x.detach().float().cpu().numpy() for x in tensors]
    nan = sum(int(np.isnan(x).sum()) for x in arrays)
    infinite = sum(int(np.isinf(x).sum()) for x in arrays)
    return nan, infinite, sum(x.size for x in arrays)


def collect_videos(output: Any) -> list[np.ndarray[Any, Any]]:
    """Videos and pictures in what a pipeline returned, each `[T, H, W, 3]` uint8.

    Latents, and whatever else is no picture, are left out.
    """
    found = getattr(output, "frames", None)
    if found is None:
        found = getattr(output, "images", None)
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if found is None or not hasattr(found, "__len__") or len(found) == 0:
        return []
    return list(_iterate_videos(found))


def _iterate_videos(found: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(found, list) and isinstance(found[0], list):
        yield from (video for clip in found if (video := _stack(clip)) is not None)
        return
    whole = _stack(found)
    if whole is None:
        return
    if whole.ndim > _WHOLE_VIDEO:
        yield from whole
    else:
        yield from (whole[i : i + 1] for i in range(len(whole)))


def _stack(pictures: Any) -> np.ndarray[Any, Any] | None:
    """Pictures as one array of uint8 with colours last; None for anything else."""
    try:
        array = np.stack([_to_array(picture) for picture in pictures])
    except (TypeError, ValueError, RuntimeError):
        return None
    if array.ndim < _WHOLE_VIDEO or array.shape[-1] != 3:
        return None
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        return None
    flat = array.reshape(-1, *array.shape[-3:])
    return to_uint8(np.nan_to_num(flat, nan=0, posinf=0, neginf=0)).reshape(array.shape)


def _to_array(picture: Any) -> np.ndarray[Any, Any]:
    """Of a tensor with its colours last, which Diffusers has before the rows."""
    if not isinstance(picture, torch.Tensor):
        return np.asarray(picture)
    array = picture.detach().float().cpu().numpy()
    has_colours = array.ndim > 2 and array.shape[-3] == 3
    return np.moveaxis(array, -3, -1) if has_colours else array
