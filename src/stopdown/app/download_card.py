"""What a run of a model on the Hub will take, shown before its weights are downloaded.

Configurations and the headers of the weights are there then. The forecast is that of `stopdown fit`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from stopdown.app.display import Display, load_libraries
from stopdown.app.forecasts import fit_source
from stopdown.devices.device_memory import HOST_SHARE, find_host_bytes
from stopdown.devices.environment import choose_device, read_rank
from stopdown.errors import OptionError
from stopdown.number_formats import format_bytes
from stopdown.pipelines.requests import Request
from stopdown.plans.plan_files import read_plan
from stopdown.plans.precision import find_plan_path, parse_request
from stopdown.records import MemoryForecast
from stopdown.sources.sources import Source, read_stored_dtypes


def show_before_download(
    options: Any, source: Source, request: Request, display: Display
) -> MemoryForecast | None:
    """Show how a model on the Hub will run and what that takes, and refuse what will not fit.

    Args:
        options: of `generate`.

    Returns:
        The forecast without its table; None where the Hub cannot be asked.

    Raises:
        OptionError: no strategy stays within the limit in the precision that the run would take.

    Cost: an HTTP range for each file of weights, and a few dry runs of some seconds each.
    """
    load_libraries(display)
    from stopdown.pipelines.loader import complete_source
    from stopdown.runtime.memory_limits import ask_memory, count_limit

    if not any(read_stored_dtypes(source).values()):
        return None
    device = choose_device(options.device)
    asked = None  # several processes keep all weights on their devices
    if read_rank() is None:
        asked = ask_memory(options.memory, options.allow, parse_request(options.precision))
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
    is_reduced = made.reduced is not None and "smaller" in options.allow
    if limit and made.precision != first and not is_reduced:
        raise OptionError(
            f"{options.source} does not fit on {device} in {first}, and its weights were not downloaded.",
            expected=made.answer,
            remedy=f"Use: {made.command}"
            if made.command
            else "Use a smaller model, or more memory.",
        )
    return dataclasses.replace(made, rows=())


def describe_forecast(made: MemoryForecast, *, is_limited: bool = True) -> str:
    """The answer, and below it each precision with its reason."""
    answer = made.answer
    if not is_limited:
        taken, needed = format_bytes(made.peak_bytes), format_bytes(made.download_bytes)
        answer = f"Without a limit of memory: {taken} on the device, {needed} to download"
    grouped: dict[str, list[str]] = {}
    for entry in made.decisions:
        said = f"{entry.precision}. {entry.reason}".strip()
        grouped.setdefault(said, []).append(entry.component)
    return "\n".join([answer, *(f"- {', '.join(x)}: {said}" for said, x in grouped.items())])
