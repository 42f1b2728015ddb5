"""How a run stays within a limit of memory: a strategy, or a smaller size where that is allowed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stopdown.device_profiles import describe_device
from stopdown.doctor import has_fused_attention
from stopdown.environment import Device
from stopdown.memory import speed as speeds
from stopdown.memory.forecast import Fit, choose, keep_tiling
from stopdown.memory.offloader import Offloader, make_offloader, predict_run
from stopdown.memory.smaller_requests import Size, find_largest, list_smaller
from stopdown.number_formats import format_bytes, parse_bytes
from stopdown.pipelines.allowed_sizes import find_grid
from stopdown.pipelines.requests import Request, build_arguments, find_frames, find_steps
from stopdown.plans.out_of_memory_history import add_out_of_memory, find_failed
from stopdown.plans.planned_loader import Loaded
from stopdown.records import OutOfMemory, Plan, Reduction


@dataclass(frozen=True)
class Fitted:
    """A run that is to stay within a limit.

    Attributes:
        request: what is made; smaller than asked for when `reduced` says so.
        offloader: keeps it within the limit; None when there is none.
        reduced: what was made smaller; None when nothing was.
        plan: of the run; None without one.
        size: of what is made; None where it is not known.
    """

    request: Request
    offloader: Offloader | None = None
    reduced: Reduction | None = None
    plan: Plan | None = None
    device: str = ""
    limit_bytes: int = 0
    size: Size | None = None

    def add_out_of_memory(self, updated: Plan | None) -> Plan | None:
        """The plan with what running out of memory taught; as it came when nothing was learnt.

        Args:
            updated: the plan with repairs in it; None when there were none.
        """
        plan = updated if updated is not None else self.plan
        if (
            plan is None
            or self.offloader is None
            or self.size is None
            or not self.offloader.steps_down
        ):
            return updated
        entry = OutOfMemory(
            device=self.device,
            limit_bytes=self.limit_bytes,
            size=str(self.size),
            pixels=self.size.pixels,
            failed=tuple(dict.fromkeys(one.before for one in self.offloader.steps_down)),
            worked=self.offloader.taken.strategy.name,
        )
        return add_out_of_memory(plan, entry)


@dataclass(frozen=True)
class Limit:
    """What a run is to stay within.

    Attributes:
        memory: an amount, `8GiB`, or `auto` for what the device has.
        allow: what may change the picture for that: `fp8`, `int8`, `smaller`.
        share: runs that the device has at the same time, which `auto` divides by.
    """

    memory: str
    allow: Collection[str] = ()
    share: int = 1

    def count_bytes(self, device: Device) -> int:
        """The limit on a device."""
        is_auto = self.memory == "auto"
        return device.memory_bytes // self.share if is_auto else parse_bytes(self.memory)


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
    """What keeps a run within a limit, and what it makes.

    Args:
        tiling: whether the autoencoder works in tiles; None leaves that open.

    Raises:
        StopdownError: nothing fits; the message names the smallest.
    """
    if limit is None:
        return Fitted(request)
    limit_bytes = limit.count_bytes(device)
    fit = _predict_loaded(loaded, request, device)
    if tiling is not None:
        fit = keep_tiling(fit, tiling)
    size = find_size(loaded.pipe, request, fit)
    reduced = None
    is_too_large = choose(fit, limit_bytes, limit.allow) is None
    if is_too_large and size is not None and "smaller" in limit.allow:
        found = find_smaller(
            request,
            size,
            configs,
            lambda one: _predict_loaded(loaded, one, device),
            limit_bytes,
            limit.allow,
        )
        if found is not None:
            request, fit, reduced, size = found
            announce(reduced.reason)
    plan = loaded.loaded_plan.plan if loaded.loaded_plan is not None else None
    failed = find_failed(plan, str(device), limit_bytes, size.pixels) if size is not None else ()
    if failed:
        announce(
            "Not used, because the plan has recorded that they ran out of memory: "
            f"{', '.join(failed)}."
        )
    offloader = make_offloader(
        loaded.pipe,
        fit,
        limit_bytes,
        device=device.torch_name,
        store=Path(tempfile.gettempdir()) if device.type == "cpu" else None,
        allowed=limit.allow,
        failed=failed,
        announce=announce,
    )
    return Fitted(request, offloader, reduced, plan, str(device), limit_bytes, size)


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
    allow: Collection[str],
) -> tuple[Request, Fit, Reduction, Size] | None:
    """The largest smaller size that fits, with what is said of it; None when none does.

    Args:
        size: that `request` makes.
        configs: of the model, which say what sizes it can make.
        predict: what a request takes.
        allow: as for `Limit`.
    """
    found = find_largest(
        list_smaller(size, find_grid(dict(configs)), keeps_frames=request.video is not None),
        lambda one: predict(shrink_request(request, one)),
        limit_bytes,
        allow,
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
