"""Refusal of image and video sizes that do not fit into memory, with a size that does.

Sizes are checked before weights are loaded. For a model on the Hub, the forecast of `stopdown fit` is shown
before the weights are downloaded, from the configurations and the headers of the weights.

A dry run is only made for a requested size that could be too large. A decoder needs about `DECODED_BYTES`
for each pixel of its output.

**Catches** a run that needs more memory than the device has, by the prediction of a dry run.
**Does not catch** the workspaces of a device's kernels, or memory used by other programs. With `--memory`,
only the size of the result is checked here; strategies are chosen when the weights are there.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from stopdown.app.display import Display, load_libraries
from stopdown.app.forecasts import fit_source
from stopdown.app.request_options import read_limit
from stopdown.devices.device_choice import Device, choose_device
from stopdown.devices.device_memory import HOST_SHARE, find_host_bytes
from stopdown.devices.device_profiles import describe_device
from stopdown.errors import OptionError
from stopdown.number_formats import format_bytes
from stopdown.pipelines.allowed_sizes import find_grid, read_configs
from stopdown.pipelines.requests import (
    PROMPTS,
    Request,
    build_arguments,
    find_frames,
    list_needed_fields,
)
from stopdown.plans.plan_files import read_plan
from stopdown.plans.precision import find_plan_path, parse_request
from stopdown.records import MemoryForecast, group_components
from stopdown.sources.source import Source
from stopdown.sources.sources import read_stored_dtypes

if TYPE_CHECKING:
    from stopdown.memory.forecast import Fit
    from stopdown.memory.smaller_requests import Size

DECODED_BYTES = 1024
"""Bytes per output pixel: Diffusers' autoencoders hold four 128-channel 16-bit tensors at full size."""

RETURNED_BYTES = 15
"""Bytes per pixel of a pipeline's returned output: three fp32 and three uint8 values."""

MOST_TRIED = 24


def refuse_too_large(
    source: Source,
    request: Request,
    device: Device,
    display: Display,
    *,
    precision: str = "auto",
    memory: str | None = None,
    offloads: bool = True,
) -> None:
    """Refuse a size that is predicted to take more memory than the limit.

    Args:
        request: the request of the run; the check is skipped if it sets no size.
        memory: value of `--memory`; None for all memory of the device.
        offloads: whether `--memory` can move idle weights off the device.

    Cost: none for a size that clearly fits; else a few dry runs of some seconds each.
    """
    sides = [side for side in (request.height, request.width) if side is not None]
    limit = read_limit(memory) or device.memory_bytes
    if not limit or (request.frames or 16) * max(sides, default=0) ** 2 * DECODED_BYTES <= limit:
        return
    from stopdown.memory.forecast import predict_resident
    from stopdown.memory.smaller_requests import find_largest_size, shrink_request
    from stopdown.pipelines.dry_run import Answer
    from stopdown.plans.precision_and_memory import build_way, find_ways

    way = find_ways(source, describe_device(device).supports, precision)[0]
    pipe, answers = build_way(source, way), dict[str, Answer]()  # at all sizes the text is the same
    asked = _find_size(pipe, request)

    def predict(size: Size) -> Fit:
        display.progress("predict", f"{size} in {way.chosen}", 0, 0)
        smaller = shrink_request(dataclasses.replace(request, steps=1), size)
        arguments = build_arguments(pipe, smaller)
        return predict_resident(pipe, arguments, on_cpu=device.type == "cpu", answers=answers)

    least = asked.pixels * RETURNED_BYTES
    if least <= limit and memory is None:
        least = _find_peak(predict(asked))
    if least <= limit:
        return
    found = find_largest_size(_list_sizes(asked, source, limit), predict, limit)
    raise OptionError(
        f"Making {asked} needs at least {format_bytes(least)}, and "
        + (
            f"{device} has {format_bytes(limit)}."
            if memory is None
            else f"the memory limit is {format_bytes(limit)}."
        ),
        expected=f"The largest size tried that fits is {found[0]}: {format_bytes(_find_peak(found[1]))}."
        if found
        else "No size that was tried fits.",
        remedy=(f"Use height={found[0].height} and width={found[0].width}." if found else "")
        + (
            ' Without memory="none", fewer weights are on the device at once.'
            if memory is None and offloads
            else ""
        ),
    )


def refuse_unmeasurable(
    source: Source, request: Request, device: str | None, display: Display, *, precision: str
) -> None:
    """Refuse a size as `refuse_too_large` does, for commands that add prompts and pictures themselves.

    Args:
        device: name of the device; None takes the host's memory as the limit.
    """
    from stopdown.pipelines.class_selection import select_class
    from stopdown.pipelines.loader import complete_source, find_class

    if request.height is None and request.width is None:
        return
    found = complete_source(source)
    if found.parts:  # its calls are recorded ones
        return
    found = select_class(found, request)
    needed = list_needed_fields(find_class("diffusers", found.pipeline_class))
    if "prompt" in needed:
        request = dataclasses.replace(request, prompt=request.prompt or PROMPTS[0])
    if all(getattr(request, name) is not None for name in needed):
        where = choose_device(device or "cpu")
        refuse_too_large(found, request, where, display, precision=precision, offloads=False)


def _find_peak(fit: Fit) -> int:
    return fit.predictions[0].peak_bytes


def _find_size(pipe: Any, request: Request) -> Size:
    """Return the frames, height and width of a request; a missing side equals the other one."""
    from stopdown.memory.smaller_requests import Size

    height, width = request.height or request.width, request.width or request.height
    frames = find_frames(pipe, build_arguments(pipe, request))
    return Size(frames, int(height or 0), int(width or 0))


def _list_sizes(asked: Size, source: Source, limit: int) -> list[Size]:
    """List smaller sizes that the model supports and that may fit, halving the pixels each time."""
    from stopdown.memory.smaller_requests import Size

    step = find_grid(read_configs(source.described)).side
    sizes = [
        Size(
            asked.frames,
            *(
                int(side * 2 ** (-number / 2)) // step * step
                for side in (asked.height, asked.width)
            ),
        )
        for number in range(1, MOST_TRIED + 1)
    ]
    return [
        size
        for size in dict.fromkeys(sizes)
        if min(size.height, size.width) >= step and size.pixels * DECODED_BYTES <= limit
    ]


def show_before_download(
    options: Any, source: Source, request: Request, display: Display
) -> MemoryForecast | None:
    """Show the forecast of a run before the download of its model, and refuse a model that will not fit.

    Args:
        options: options of `generate`.

    Returns:
        The forecast without its strategies (`rows`); None if the headers of the weights could not be read.

    Raises:
        OptionError: no strategy stays within the limit in the precision that the run would have.

    Cost: an HTTP range request for each weight file, and a few dry runs of some seconds each.
    """
    load_libraries(display)
    from stopdown.pipelines.loader import complete_source
    from stopdown.runtime.memory_limits import ask_memory, count_limit

    if not any(read_stored_dtypes(source).values()):
        return None
    device = choose_device(options.device)
    asked = ask_memory(options.memory, parse_request(options.precision))
    limit = count_limit(asked, device) if asked is not None else 0
    path = find_plan_path(options.precision)
    made = fit_source(
        options,
        complete_source(source),
        request,
        display,
        limit or 2**62,
        int(HOST_SHARE * find_host_bytes()),
        read_plan(path) if path is not None else None,
    )
    first = made.rows[0].precision
    display.inform(describe_forecast(made, is_limited=bool(limit)))
    if limit and made.precision != first:
        raise OptionError(
            f"{options.source} doesn't fit on {device} in {first}, and its weights weren't downloaded.",
            expected=made.answer.removeprefix("No, it doesn't fit. "),
            remedy=f"Use: {made.command}"
            if made.command
            else "Use a smaller model, or more memory.",
        )
    return dataclasses.replace(made, rows=())


def describe_forecast(made: MemoryForecast, *, is_limited: bool = True) -> str:
    """Return the answer of a forecast, followed by each precision with its reason."""
    answer = made.answer
    if not is_limited:
        taken, needed = format_bytes(made.peak_bytes), format_bytes(made.download_bytes)
        answer = f"Without a limit of memory: {taken} on the device, {needed} to download"
    told = ((x.component, f"{x.precision}. {x.reason}".strip()) for x in made.decisions)
    return "\n".join([answer, *(f"- {names}: {said}" for names, said in group_components(told))])
