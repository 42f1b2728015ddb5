"""How a run stays within a limit of memory: a strategy, or a smaller size where that is allowed."""

from __future__ import annotations

import dataclasses
import inspect
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stopdown.component_call_names import split_call
from stopdown.component_calls.components import find_components
from stopdown.devices.device_memory import HOST_SHARE, find_host_bytes
from stopdown.devices.device_profiles import describe_device
from stopdown.devices.environment import Device
from stopdown.doctor import has_fused_attention
from stopdown.memory import speed as speeds
from stopdown.memory.forecast import Fit, choose, keep_tiling
from stopdown.memory.offloader import Offloader, make_offloader, predict_run
from stopdown.memory.smaller_calls import CHUNKS_DIFFER
from stopdown.memory.smaller_requests import Size, find_largest, list_smaller
from stopdown.number_formats import format_bytes, parse_bytes
from stopdown.pipelines.allowed_sizes import find_grid, find_own_sides
from stopdown.pipelines.loader import move_program
from stopdown.pipelines.requests import Request, build_arguments, find_frames, find_steps
from stopdown.plans.planned_loader import Loaded
from stopdown.records import Reduction


@dataclass(frozen=True)
class Fitted:
    """A run that is to stay within a limit.

    Attributes:
        request: what is made; smaller than asked for when `reduced` says so.
        offloader: keeps it within the limit; None when there is none.
        reduced: what was made smaller; None when nothing was.
        size: of what is made; None where it is not known.
    """

    request: Request
    offloader: Offloader | None = None
    reduced: Reduction | None = None
    size: Size | None = None


@dataclass(frozen=True)
class Limit:
    """What a run is to stay within.

    Attributes:
        memory: an amount, `8GiB`, or `auto` for what the device has: on the CPU what is free.
        allow: what may change for that: `smaller`, the size of what is made.
        share: runs that the device has at the same time, which `auto` divides by.
    """

    memory: str = "auto"
    allow: Collection[str] = ()
    share: int = 1

    def count_bytes(self, device: Device) -> int:
        """The limit on a device."""
        if self.memory != "auto":
            return parse_bytes(self.memory)
        there = find_host_bytes() if device.type == "cpu" else device.memory_bytes
        return there // self.share


def choose_limit(
    memory: str | None, allow: Collection[str], targets: Iterable[str], share: int = 1
) -> Limit | None:
    """Return the limit of runs: what was asked for, else all that the device has; None for `none`.

    Args:
        memory: of the command; None if it was not given.
        targets: calls that a precision was requested for. If both methods of an autoencoder are loaded in
            precisions of their own, all weights are placed on the device, unless a limit was given.
        share: as for `Limit`.
    """
    if memory == "none" or (memory is None and any(split_call(name)[1] for name in targets)):
        return None
    return Limit(memory or "auto", allow, share)


def fit_run(
    loaded: Loaded,
    request: Request,
    device: Device,
    limit: Limit | None,
    configs: Mapping[str, dict[str, Any]],
    announce: Callable[[str], None],
    *,
    tiling: bool | None = None,
) -> Fitted:
    """Place the weights of a run, and return what keeps it within a limit, and what it makes.

    Args:
        loaded: its weights wait in their files, or are where they were loaded.
        limit: None places all weights on the device. So does `auto` if the weights and a bound of the
            values fit: nothing is run dry then.
        tiling: whether the autoencoder works in tiles; None leaves that open.
    """
    limit_bytes = limit.count_bytes(device) if limit is not None else 0
    if limit is None or (
        limit.memory == "auto"
        and tiling is None
        and _bound_run(loaded, request, device) <= limit_bytes
    ):
        move_program(loaded.pipe, device)
        return Fitted(request)
    fit = _predict_loaded(loaded, request, device)
    if tiling is not None:
        fit = keep_tiling(fit, tiling)
    size = find_size(loaded.pipe, request, fit)
    reduced = None
    is_too_large = choose(fit, limit_bytes) is None
    if is_too_large and size is not None and "smaller" in limit.allow:
        found = find_smaller(
            request,
            size,
            configs,
            lambda one: _predict_loaded(loaded, one, device),
            limit_bytes,
        )
        if found is not None:
            request, fit, reduced, size = found
            announce(reduced.reason)
    stored_bytes = max(one.stored_bytes for one in fit.predictions)
    in_files = device.type == "cpu" or stored_bytes > HOST_SHARE * find_host_bytes()
    offloader = make_offloader(
        loaded.pipe,
        fit,
        limit_bytes,
        device=device.torch_name,
        store=Path(tempfile.gettempdir()) if in_files else None,
        announce=announce,
    )
    if offloader.taken.strategy.frames:
        announce(CHUNKS_DIFFER)
    return Fitted(request, offloader, reduced, size)


def _bound_run(loaded: Loaded, request: Request, device: Device) -> int:
    """Return bytes that a run with all weights on the device does not exceed.

    Its values are bounded by those of a decoder of `DECODED_BYTES` a pixel, and by whole score matrices
    where no kernel does without them.
    """
    pipe, arguments = loaded.pipe, build_arguments(loaded.pipe, request)
    taken = inspect.signature(type(pipe).__call__).parameters
    own = find_own_sides(pipe) or (1024, 1024)
    sides = []
    for name, side in zip(("height", "width"), own, strict=True):
        default = getattr(taken.get(name), "default", None)
        found = arguments.get(name) or (default if isinstance(default, int) else side)
        sides.append(int(found))
    pixels = find_frames(pipe, arguments) * math.prod(sides)
    modules = find_components(pipe).values()
    weights = sum(x.nbytes for module in modules for x in module.parameters())
    formats = {decision.precision for decision in loaded.decisions}
    has_scores = not has_fused_attention(describe_device(device), formats)
    scores = SCORE_BYTES * (pixels // PIXELS_A_TOKEN) ** 2 if has_scores else 0
    return weights + pixels * DECODED_BYTES + scores + MARGIN_BYTES


DECODED_BYTES = 2048
"""Of each pixel while it is decoded: 128 channels in 16 bits, eight values alive at a time."""

PIXELS_A_TOKEN = 256
"""Compression by 8 on each side and patches of 2 by 2: with more compression there are fewer tokens."""

SCORE_BYTES = 256
"""Of each pair of tokens: scores of 64 heads in fp32."""

MARGIN_BYTES = 2**28
"""What else a run takes: workspaces of kernels, and what the pipeline's own code makes."""


def find_size(pipe: Any, request: Request, fit: Fit) -> Size | None:
    """Frames, height and width of what a run makes; None where nothing is decoded."""
    if fit.sides is None:
        return None
    return Size(find_frames(pipe, build_arguments(pipe, request)), *fit.sides)


def shrink_request(request: Request, size: Size) -> Request:
    """The same request at another size; frames that were not asked for stay so where it has one."""
    frames = size.frames if size.frames > 1 and request.video is None else request.frames
    return dataclasses.replace(request, frames=frames, height=size.height, width=size.width)


def find_smaller(
    request: Request,
    size: Size,
    configs: Mapping[str, dict[str, Any]],
    predict: Callable[[Request], Fit],
    limit_bytes: int,
) -> tuple[Request, Fit, Reduction, Size] | None:
    """The largest smaller size that fits, with what is said of it; None when none does.

    Args:
        size: that `request` makes.
        configs: of the model, which say what sizes it can make.
        predict: what a request takes.
    """
    found = find_largest(
        list_smaller(size, find_grid(dict(configs)), keeps_frames=request.video is not None),
        lambda one: predict(shrink_request(request, one)),
        limit_bytes,
    )
    if found is None:
        return None
    made, fit = found
    reason = (
        f"No strategy stays within {format_bytes(limit_bytes)} at {size}; {made} is made instead, as was "
        "allowed."
    )
    return shrink_request(request, made), fit, Reduction(str(size), str(made), reason), made


def _predict_loaded(loaded: Loaded, request: Request, device: Device) -> Fit:
    formats = {decision.precision for decision in loaded.decisions}
    return predict_pipe(loaded.pipe, formats, request, device)


def predict_pipe(pipe: Any, formats: Collection[str], request: Request, device: Device) -> Fit:
    """What every strategy of a run takes.

    Args:
        pipe: may be without weights.
        formats: that it computes in.
    """
    arguments = build_arguments(pipe, request)
    return predict_run(
        pipe,
        arguments,
        steps=find_steps(pipe, arguments),
        fused=has_fused_attention(describe_device(device), formats),
        speed=speeds.measure_speed(device, formats),
        device=device.torch_name,
    )
