"""How `generate` stays within `--memory`: a strategy, or a smaller size where that is allowed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopdown.records import OutOfMemory, Plan, Reduction

if TYPE_CHECKING:
    from stopdown.app.display import Display
    from stopdown.app.request_options import RequestOptions
    from stopdown.environment import Device
    from stopdown.memory.forecast import Fit
    from stopdown.memory.offloader import Offloader
    from stopdown.memory.smaller_requests import Size
    from stopdown.pipelines.requests import Request
    from stopdown.plans.loader import Loaded


@dataclass(frozen=True)
class Fitted:
    """A run that is to stay within a limit.

    Attributes:
        request: what is made; smaller than asked for when `reduced` says so.
        room: keeps it within the limit; None when there is none.
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
        from stopdown.plans.out_of_memory_history import add_out_of_memory

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
            pixels=_count_pixels(self.size),
            failed=tuple(dict.fromkeys(one.before for one in self.offloader.steps_down)),
            worked=self.offloader.taken.strategy.name,
        )
        return add_out_of_memory(plan, entry)


def fit_run(
    loaded: Loaded,
    request: Request,
    device: Device,
    options: RequestOptions,
    display: Display,
    stages: dict[str, float],
    configs: Mapping[str, dict[str, Any]],
) -> Fitted:
    """What keeps a run within `--memory`, and what it makes.

    Raises:
        StopdownError: nothing fits; the message names the smallest.
    """
    if options.memory is None:
        return Fitted(request)
    import tempfile

    from stopdown.memory.offloader import make_offloader
    from stopdown.number_formats import parse_bytes
    from stopdown.plans.out_of_memory_history import find_failed

    begun = time.perf_counter()
    limit = device.memory_bytes if options.memory == "auto" else parse_bytes(options.memory)
    fit = _predict(loaded, request, device)
    size = find_size(loaded.pipe, request, fit)
    reduced = None
    if "smaller" in options.allow and size is not None:
        found = _shrink(loaded, request, device, options, configs, fit, size, limit)
        if found is not None:
            request, fit, reduced, size = found
            display.announce(reduced.reason)
    plan = loaded.loaded_plan.plan if loaded.loaded_plan is not None else None
    failed = find_failed(plan, str(device), limit, _count_pixels(size)) if size is not None else ()
    if failed:
        display.announce(f"Passed over, because of what the plan has learnt: {', '.join(failed)}.")
    offloader = make_offloader(
        loaded.pipe,
        fit,
        limit,
        device=device.torch_name,
        store=Path(tempfile.gettempdir()) if device.type == "cpu" else None,
        allowed=options.allow,
        failed=failed,
        announce=display.announce,
    )
    stages["dry_run"] = time.perf_counter() - begun
    return Fitted(request, offloader, reduced, plan, str(device), limit, size)


def find_size(pipe: Any, request: Request, fit: Fit) -> Size | None:
    """Frames, height and width of what a run makes; None where nothing is decoded."""
    from stopdown.memory.smaller_requests import Size
    from stopdown.pipelines.requests import build_arguments, find_frames

    if fit.sides is None:
        return None
    return Size(find_frames(pipe, build_arguments(pipe, request)), *fit.sides)


def shrink_request(request: Request, size: Size) -> Request:
    """The same request at another size; frames that were not asked for stay so where it has one."""
    frames = size.frames if size.frames > 1 and request.video is None else request.frames
    return dataclasses.replace(request, frames=frames, height=size.height, width=size.width)


def describe_reduction(asked: Size, made: Size, memory: str) -> Reduction:
    """What is said of a smaller size, everywhere."""
    return Reduction(
        str(asked),
        str(made),
        f"Nothing stays within {memory} at {asked}; {made} is made instead, as --allow smaller says.",
    )


def _shrink(
    loaded: Loaded,
    request: Request,
    device: Device,
    options: RequestOptions,
    configs: Mapping[str, dict[str, Any]],
    fit: Fit,
    size: Size,
    limit: int,
) -> tuple[Request, Fit, Reduction, Size] | None:
    """The largest smaller size that fits; None when the one asked for does, or none."""
    from stopdown.memory.forecast import choose
    from stopdown.memory.smaller_requests import find_largest, list_smaller
    from stopdown.pipelines.default_sizes import find_grid

    if choose(fit, limit, options.allow) is not None:
        return None
    found = find_largest(
        list_smaller(size, find_grid(dict(configs)), keeps_frames=request.video is not None),
        lambda one: _predict(loaded, shrink_request(request, one), device),
        limit,
        options.allow,
    )
    if found is None:
        return None
    made, fit = found
    reduced = describe_reduction(size, made, str(options.memory))
    return shrink_request(request, made), fit, reduced, made


def _predict(loaded: Loaded, request: Request, device: Device) -> Fit:
    from stopdown.device_profiles import describe_device
    from stopdown.doctor import has_fused_attention
    from stopdown.memory.offloader import predict_run
    from stopdown.memory.speed import measure_speed
    from stopdown.pipelines.requests import build_arguments, find_steps

    arguments = build_arguments(loaded.pipe, request)
    formats = {decision.precision for decision in loaded.decisions}
    return predict_run(
        loaded.pipe,
        arguments,
        steps=find_steps(loaded.pipe, arguments),
        fused=has_fused_attention(describe_device(device), formats),
        speed=measure_speed(device, formats),
        device=device.torch_name,
    )


def _count_pixels(size: Size) -> int:
    return size.frames * size.height * size.width
