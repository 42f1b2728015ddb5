"""Choice of a default size for an fp32 run: one that suits the model and fits into memory.

A pipeline's own default size is meant for its authors' checkpoint. If the components' configs imply a far
smaller size (a small model, a test), that is used. If the peak of a dry run then exceeds the limit, the
largest smaller size that fits is chosen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stopdown.component_calls.components import find_components
from stopdown.memory.forecast import Fit, choose_prediction, predict_resident
from stopdown.pipelines.allowed_sizes import (
    Grid,
    choose_own_sides,
    find_grid,
    read_pipe_configs,
)
from stopdown.pipelines.requests import Request, find_frames, find_pipeline_argument
from stopdown.pipelines.skeletons import copy_skeleton

VIDEO_SHARES = ((0.75, 1.0), (0.5, 1.0), (0.5, 0.75), (0.25, 0.75), (0.25, 0.5), (0.125, 0.5))
"""Shares of the frames and of each side to try for a video, largest first."""

PICTURE_SHARES = tuple((1.0, side) for side in (0.875, 0.75, 0.625, 0.5, 0.375, 0.25))
FRAMES_SHARES = tuple((frames, 1.0) for frames in (0.75, 0.5, 0.375, 0.25, 0.125))
"""Shares of the frames to try for a model that makes pictures of one size only."""


@dataclass(frozen=True)
class Size:
    """The size of a video or picture, in frames and pixels."""

    frames: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        """The pixels of all frames together."""
        return self.frames * self.height * self.width

    def __str__(self) -> str:
        size = f"{self.height}x{self.width}"
        return size if self.frames == 1 else f"{self.frames} frames of {size}"


def list_smaller(size: Size, grid: Grid, *, keeps_frames: bool = False) -> list[Size]:
    """List smaller sizes that the model can generate, the largest first.

    Args:
        grid: the multiples that the model's sizes must have.
        keeps_frames: keep the number of frames, because it's that of an input video.
    """
    shares = PICTURE_SHARES if keeps_frames or size.frames == 1 else VIDEO_SHARES
    if grid.only is not None:
        shares = () if keeps_frames or size.frames == 1 else FRAMES_SHARES
    found = [
        Size(
            _round_frames(size.frames, frames, grid),
            _round_side(size.height, side, grid),
            _round_side(size.width, side, grid),
        )
        for frames, side in shares
    ]
    return [one for one in dict.fromkeys(found) if one != size]


def find_largest_size(
    sizes: Sequence[Size],
    predict: Callable[[Size], Fit],
    limit_bytes: int,
) -> tuple[Size, Fit] | None:
    """Find the largest size that fits by bisection; return it with its predictions, or None.

    Args:
        sizes: the largest first.
        predict: returns the predictions of all strategies at a size.

    Cost: about two calls of `predict` for four sizes, three for eight.
    """
    found, start, end = None, 0, len(sizes)
    while start < end:
        middle = (start + end) // 2
        fit = predict(sizes[middle])
        if choose_prediction(fit, limit_bytes) is None:
            start = middle + 1
        else:
            found, end = (sizes[middle], fit), middle
    return found


def shrink_request(request: Request, size: Size) -> Request:
    """Return a copy of a request at another size.

    The number of frames stays as requested, even unset, for a single frame or an input video.
    """
    frames = size.frames if size.frames > 1 and request.video is None else request.frames
    return dataclasses.replace(request, frames=frames, height=size.height, width=size.width)


def _round_frames(frames: int, share: float, grid: Grid) -> int:
    if share == 1.0:
        return frames
    return max(1, int((frames - 1) * share) // grid.frames) * grid.frames + 1


def _round_side(side: int, share: float, grid: Grid) -> int:
    return side if share == 1.0 else max(1, int(side * share) // grid.side) * grid.side


SHARE = 0.8
"""Share of the memory that a run may fill; the rest is for other programs and errors of the forecast."""


def choose_size(
    pipe: Any,
    arguments: Mapping[str, Any],
    *,
    memory_bytes: int,
    on_cpu: bool = True,
    has_weights: bool = True,
) -> tuple[dict[str, int], str]:
    """Choose the sizes that a call's arguments lack; return them and the reason if they were reduced.

    Args:
        arguments: of the pipeline call; if they contain a size, nothing is chosen.
        has_weights: whether all weights are in memory in fp32; False if they are loaded layer by layer.

    Cost: a dry run of one step (seconds), and two or three more if a smaller size is needed.
    """
    names = {
        name: find_pipeline_argument(name, type(pipe)) for name in ("frames", "height", "width")
    }
    if not names["height"] or not names["width"]:
        return {}, ""  # it takes its size from the picture or video that it is given
    if any(arguments.get(target) is not None for target in names.values() if target):
        return {}, ""
    own = choose_own_sides(pipe)
    forecast = functools.partial(_forecast, pipe, on_cpu=on_cpu)
    try:
        peak, made = forecast({**arguments, **own})
    except Exception:  # whatever a model's code does without values: there is no forecast
        return own, ""
    limit, passing = int(SHARE * memory_bytes), 0
    if not has_weights:
        parameters = (x for m in find_components(pipe).values() for x in m.parameters())
        passing = sum(4 * x.numel() for x in parameters)
    needed = peak.predictions[0].peak_bytes - passing
    if made is None or needed <= limit:
        return own, ""
    found, size = _shrink(pipe, names, {**arguments, **own}, made, limit + passing, forecast)
    why = (
        f"It was run at {size} and not at {made}, where a run in fp32 takes {needed / 2**30:.1f} GiB, "
        f"and {limit / 2**30:.1f} GiB are there for it."
    )
    return found, why


def _shrink(
    pipe: Any,
    names: Mapping[str, str | None],
    arguments: Mapping[str, Any],
    size: Size,
    limit: int,
    forecast: Any,
) -> tuple[dict[str, int], Size]:
    def express(one: Size) -> dict[str, int]:
        sizes = dataclasses.asdict(one)
        return {target: sizes[name] for name, target in names.items() if target}

    has_video = any(name in arguments for name in ("video", "control_video"))
    sizes = list_smaller(
        size, find_grid(read_pipe_configs(pipe)), keeps_frames=has_video or not names["frames"]
    )
    found = find_largest_size(sizes, lambda one: forecast({**arguments, **express(one)})[0], limit)
    made = found[0] if found else (sizes or [size])[-1]
    return express(made), made


def _forecast(pipe: Any, arguments: Mapping[str, Any], *, on_cpu: bool) -> tuple[Fit, Size | None]:
    """Predict the memory of one fp32 step with all weights on the device, and the output's size."""
    skeleton = copy_skeleton(pipe, dict.fromkeys(find_components(pipe), torch.float32))
    skeleton.set_progress_bar_config(disable=True)
    fit = predict_resident(skeleton, arguments, on_cpu=on_cpu)
    return fit, fit.sides and Size(find_frames(pipe, dict(arguments)), *fit.sides)
