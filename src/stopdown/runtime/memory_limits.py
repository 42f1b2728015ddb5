"""Decide how a loaded pipeline's run stays within a memory limit: weights on the device, offloaded, or
tiled.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from stopdown.component_call_names import split_call
from stopdown.component_calls.components import find_components
from stopdown.devices.device_choice import Device
from stopdown.devices.device_memory import HOST_SHARE, find_device_bytes, find_host_bytes
from stopdown.devices.device_profiles import describe_device
from stopdown.doctor import has_fused_attention
from stopdown.errors import CaptureError
from stopdown.mapped_weights import find_disk_folder
from stopdown.memory import speed as speeds
from stopdown.memory.caching_allocator import find_workspace
from stopdown.memory.forecast import Fit, choose_prediction, count_disk, keep_tiling
from stopdown.memory.offloader import make_offloader, predict_run
from stopdown.memory.smaller_calls import CHUNKS_DIFFER
from stopdown.memory.strategies import Prediction, Strategy
from stopdown.number_formats import FORMATS, format_bytes, parse_bytes
from stopdown.pipelines.allowed_sizes import find_own_sides
from stopdown.pipelines.loader import move_program
from stopdown.pipelines.requests import Request, build_arguments, find_frames, find_steps
from stopdown.pipelines.results import count_results
from stopdown.plans.applier import AppliedPlan
from stopdown.records import MemoryPlan


def ask_memory(
    memory: str | None, targets: Iterable[str] = (), share: int = 1
) -> MemoryPlan | None:
    """Return the memory limit of runs: the requested one, else all memory of the device.

    Args:
        memory: an amount such as `8GiB`, `auto` or `none`; None for the default.
        targets: names for which a precision was requested. If one is a method (`vae.decode`), there's no
            limit by default.
        share: number of simultaneous runs on the device.

    Returns:
        The limit; None for no limit.
    """
    if memory == "none" or (memory is None and any(split_call(name)[1] for name in targets)):
        return None
    return MemoryPlan(memory or "auto", share)


def count_limit(asked: MemoryPlan, device: Device) -> int:
    """Return the memory limit of a run on a device in bytes; `auto` is what other programs leave free.

    Runs at the same time share all of the device's memory, as each of them begins with another part free.
    An accelerator's limit is at most that, whatever was asked.
    """
    given = None if asked.asked == "auto" else parse_bytes(asked.asked)
    if device.type == "cpu":
        return find_host_bytes() // asked.share if given is None else given
    alone = asked.share == 1
    there = find_device_bytes(device) if alone else device.memory_bytes // asked.share
    return min(filter(None, (given, there)), default=0)


def fit_run(
    loaded: AppliedPlan,
    request: Request,
    device: Device,
    announce: Callable[[str], None],
    *,
    tiling: bool | None = None,
) -> AppliedPlan:
    """Choose a memory strategy for a run, and return the pipeline with the strategy in its plan.

    Without `Plan.memory`, all weights are moved to the device. For `auto` they are too, without a dry run,
    if the weights and a bound of the activations fit.

    Args:
        loaded: the pipeline, with weights in the checkpoint's files or in memory.
        announce: receives messages for the user.
        tiling: whether the autoencoder works in tiles; None leaves that to the choice.

    Returns:
        The pipeline, with an offloader to enter if the run needs one to stay within its limit.

    Raises:
        StopdownError: no strategy fits.
    """
    asked = loaded.plan.memory
    if asked is None:
        move_program(loaded.pipe, device)
        return loaded
    limit_bytes = count_limit(asked, device)
    if asked.asked != "auto" and limit_bytes < (given := parse_bytes(asked.asked)):
        announce(
            f"{device} has {format_bytes(limit_bytes)} for this run, less than the {format_bytes(given)} "
            "that it was given, so that is the limit."
        )
    if asked.asked == "auto" and tiling is None:
        bound = _bound_run(loaded, request, device)
        if bound <= limit_bytes:
            move_program(loaded.pipe, device)
            reason = f"The weights and a bound of the values come to {format_bytes(bound)}."
            return _say(
                loaded,
                limit_bytes=limit_bytes,
                strategy="resident",
                peak_bytes=bound,
                reason=reason,
            )
    try:
        fit = _predict_loaded(loaded, request, device)
    except CaptureError as error:
        fit = _bound_placements(loaded, request, device, tiling=bool(tiling))
        if choose_prediction(fit, limit_bytes) is None:
            raise
        announce(f"{error.what} Its memory can't be forecast, so an upper bound is used.")
    if tiling is not None:
        fit = keep_tiling(fit, tiling)
    stored_bytes = max(one.stored_bytes for one in fit.predictions)
    in_files = device.type == "cpu" or stored_bytes > HOST_SHARE * find_host_bytes()
    offloader = make_offloader(
        loaded.pipe,
        fit,
        limit_bytes,
        device=device.torch_name,
        store=find_disk_folder() if in_files else None,
        announce=announce,
    )
    taken = offloader.taken
    if taken.strategy.frames:
        announce(CHUNKS_DIFFER)
    reason = f"{taken.strategy.name} is the fastest that stays within {format_bytes(limit_bytes)}."
    return _say(
        dataclasses.replace(loaded, offloader=offloader),
        limit_bytes=limit_bytes,
        strategy=taken.strategy.name,
        peak_bytes=taken.peak_bytes,
        reserved_bytes=taken.reserved_bytes,
        stored_bytes=taken.stored_bytes,
        seconds=taken.seconds,
        reason=reason,
    )


def _say(loaded: AppliedPlan, **said: Any) -> AppliedPlan:
    """Return a loaded pipeline with a memory decision recorded in its plan.

    Args:
        said: fields of `MemoryPlan`.
    """
    asked = loaded.plan.memory or MemoryPlan()
    memory = MemoryPlan(asked.asked, asked.share, **said)  # nothing of an earlier size
    return dataclasses.replace(loaded, plan=dataclasses.replace(loaded.plan, memory=memory))


def _bound_run(loaded: AppliedPlan, request: Request, device: Device) -> int:
    """Return an upper bound of a run's memory in bytes, with all weights on the device."""
    return sum(_list_weight_bytes(loaded)) + _bound_values(loaded, request, device)


def _bound_placements(
    loaded: AppliedPlan, request: Request, device: Device, *, tiling: bool
) -> Fit:
    """Bound the memory of a run that can't be predicted, with the weights of all components or of one on
    the device.
    """
    weights, values = _list_weight_bytes(loaded), _bound_values(loaded, request, device)
    whole, largest = sum(weights), max(weights, default=0)
    resident, single = Strategy("resident", tiling), Strategy("component", tiling)
    return Fit(
        (
            Prediction(resident, whole + values, "", whole, 0),
            Prediction(single, largest + values, "", whole, whole),
        )
    )


def _list_weight_bytes(loaded: AppliedPlan) -> list[int]:
    modules = find_components(loaded.pipe).values()
    return [sum(x.nbytes for x in module.parameters()) for module in modules]


def _bound_values(loaded: AppliedPlan, request: Request, device: Device) -> int:
    """Return an upper bound of the bytes that a run needs beside its weights.

    Activations are bounded by those of a decoder with `DECODED_VALUES` for each pixel, in the widest of the
    run's formats, plus whole score matrices if no attention kernel avoids them.
    """
    pipe, arguments = loaded.pipe, build_arguments(loaded.pipe, request)
    taken = inspect.signature(type(pipe).__call__).parameters
    own = find_own_sides(pipe) or (1024, 1024)
    sides = []
    for name, side in zip(("height", "width"), own, strict=True):
        default = getattr(taken.get(name), "default", None)
        found = arguments.get(name) or (default if isinstance(default, int) else side)
        sides.append(int(found))
    pixels = count_results(type(pipe), arguments) * find_frames(pipe, arguments) * math.prod(sides)
    formats = {decision.precision for decision in loaded.decisions}
    has_scores = not has_fused_attention(describe_device(device), formats)
    scores = SCORE_BYTES * (pixels // PIXELS_A_TOKEN) ** 2 if has_scores else 0
    width = max((FORMATS[name].torch_dtype.itemsize for name in formats), default=4)
    return pixels * DECODED_VALUES * width + scores + MARGIN_BYTES


DECODED_VALUES = 2048
"""Values for each pixel while it is decoded: 128 channels, sixteen activations alive at a time.

In dry runs of Diffusers' decoders at full size, Stable Diffusion and Flux have 768 of them, CogVideoX
1350 and Qwen-Image 1731 (2026-11-30)."""

PIXELS_A_TOKEN = 256
"""Pixels for each token: compression by 8 on each side and patches of 2 × 2, the least of all models."""

SCORE_BYTES = 256
"""Bytes for each pair of tokens: scores of 64 heads in fp32."""

MARGIN_BYTES = 2**28
"""Bytes for kernels' workspaces and tensors of the pipeline's own code."""


def _predict_loaded(loaded: AppliedPlan, request: Request, device: Device) -> Fit:
    formats = {decision.precision for decision in loaded.decisions}
    return predict_pipe(loaded.pipe, formats, request, device)


SEGMENTED = ("cuda", "xpu")
"""PyTorch's names of the devices whose allocator reserves segments; ROCm's devices are `cuda` as well."""


def predict_pipe(pipe: Any, formats: Collection[str], request: Request, device: Device) -> Fit:
    """Predict the memory and time of a run under every memory strategy, such as offloading, without
    running it.

    If the host memory is too small for offloaded weights, times include reads from disk.

    Args:
        pipe: loaded, or without weights.
        formats: that it computes in.
    """
    arguments = build_arguments(pipe, request)
    fit = predict_run(
        pipe,
        arguments,
        steps=find_steps(pipe, arguments),
        fused=has_fused_attention(describe_device(device), formats),
        speed=speeds.measure_speed(device, formats),
        device=device.torch_name,
        workspace_bytes=find_workspace(describe_device(device))
        if device.type in SEGMENTED
        else None,
    )
    return count_disk(fit, int(HOST_SHARE * find_host_bytes()))
