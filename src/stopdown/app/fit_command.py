"""Implementation of `stopdown fit`: predict whether a model fits into memory, and how.

The prediction is for the precision that `generate` would choose. Others are compared if it does not fit,
or with `--verbose`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from stopdown.app.display import Display, load_libraries
from stopdown.app.flags import FitRunOptions, ModelOptions, SourceArgument
from stopdown.app.forecasts import fit_source
from stopdown.app.request_options import find_named_source, read_request
from stopdown.devices.device_memory import HOST_SHARE, find_host_bytes
from stopdown.devices.device_profiles import find_device_target, is_profile
from stopdown.errors import OptionError
from stopdown.number_formats import format_bytes, parse_bytes
from stopdown.plans.plan_files import read_plan
from stopdown.plans.precision import find_plan_path
from stopdown.records import MemoryForecast, MemoryPlan, MemoryRow

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class FitOptions(FitRunOptions, ModelOptions):
    """Predict whether a model fits in memory, and how.

    Predicts the memory use of each strategy from the model's configs, even for a device that isn't in
    this machine. No weights are loaded. -v lists every strategy.

    Examples:
      stopdown fit shapes
      stopdown fit zai-org/CogVideoX-5b --device t4
      stopdown fit zai-org/CogVideoX-5b --memory 15GiB --host-memory 12GiB -v
    """

    source: SourceArgument
    device: Annotated[
        str | None,
        typer.Option(
            help="auto, cuda, cuda:1, mps or cpu; or a device that isn't in this machine, such as t4."
        ),
    ] = None
    memory: Annotated[
        str,
        typer.Option(
            help=(
                "Device memory, such as 15GiB; auto is what is free now, or all memory of a device that "
                "isn't in this machine."
            )
        ),
    ] = "auto"
    host_memory: Annotated[
        str,
        typer.Option(
            help=(
                "Host memory for offloaded weights, such as 12GiB; auto is what is free now. "
                "Weights that don't fit are read from disk."
            )
        ),
    ] = "auto"
    precision: Annotated[
        str,
        typer.Option(
            help="auto predicts what generate would choose; or fp32, bf16, fp16, or a plan file."
        ),
    ] = "auto"


def run_fit_command(options: FitOptions) -> int:
    """Run the command and print the answer; return 1 if no strategy fits."""
    from stopdown.app.progress import open_display, print_result

    with open_display(options) as display:
        made = fit(options, display)
    draw = functools.partial(print_fit, made, verbose=options.verbose)
    print_result(options, made, draw, name=made.answer, highlight=False)
    return 0 if made.fits else 1


def fit(options: FitOptions, display: Display) -> MemoryForecast:
    """Predict the memory of every strategy on a device, and choose one; no weights are read."""
    begun = time.perf_counter()
    read = read_request(options, takes_profile=True)
    host_limit = (
        int(HOST_SHARE * find_host_bytes())
        if options.host_memory == "auto"
        else parse_bytes(options.host_memory, "host_memory")
    )
    path = find_plan_path(options.precision)
    plan = read_plan(path) if path is not None else None
    found = find_named_source(options, display, with_weights=False)
    load_libraries(display)
    from stopdown.pipelines.loader import complete_source

    limit = _read_limit(options.memory, options.device or "auto", display)
    source = complete_source(found)
    made = fit_source(options, source, read, display, limit, host_limit, plan)
    return dataclasses.replace(made, elapsed_s=round(time.perf_counter() - begun, 3))


def _read_limit(text: str, name: str, display: Display) -> int:
    """Return the memory limit of a run in bytes: the given amount, but no more than the device has.

    A device of this machine has what a run would find free.

    Args:
        name: of the device or profile.
    """
    from stopdown.runtime.memory_limits import count_limit

    device, profile = find_device_target(name)
    is_here = not is_profile(name)
    there = count_limit(MemoryPlan("auto"), device) if is_here else profile.memory_bytes
    if text != "auto":
        given = parse_bytes(text)
        if profile.kind == "cpu" or not there or given <= there:
            return given
        display.announce(
            f"{profile.title} has {format_bytes(there)}{' free' * is_here}, less than the "
            f"{format_bytes(given)} of --memory, so that is the limit."
        )
        return there
    if not there:
        raise OptionError(
            f"Stopdown doesn't know how much memory {profile.title} has.",
            remedy="Give the amount, such as --memory 8GiB.",
        )
    return there


def print_fit(made: MemoryForecast, console: Console, *, verbose: bool = False) -> None:
    """Print the answer; with `verbose` also a table of strategies for each precision, and the reasons."""
    console.print(made.answer, soft_wrap=True)
    if made.command:
        if made.precision == "fp16 with a plan" and made.flag != "auto":
            plan = f"stopdown plan {made.source} -o {made.flag}"
            console.print(f"Make its plan: {plan}", soft_wrap=True)
        console.print(f"→ {made.command}", soft_wrap=True)
    if verbose:
        _print_tables(made, console)
    else:
        console.print("Add -v to compare memory strategies.", soft_wrap=True)


def _print_tables(plan: MemoryForecast, console: Console) -> None:
    formats = ", ".join(f"{name} {entry}" for name, entry in plan.precisions.items())
    console.print(f"\n{plan.source} on {plan.device}: {formats}", soft_wrap=True)
    for name, bits in plan.bits.items():
        rows = tuple(row for row in plan.rows if row.precision == name)
        shown = list_worthwhile(rows, plan.chosen if name == plan.precision else "")
        remark = plan.remarks.get(name, "")
        console.print(
            f"\n{name}: {bits} significant bits. {remark}".rstrip(),
            soft_wrap=True,
        )
        _print_rows(shown, plan, console)
    console.print(
        "\nStrategies that take longer without saving memory aren't shown; --json shows all. "
        "Numerical error isn't predicted. To measure it: "
        f"stopdown compare {plan.source}",
        soft_wrap=True,
    )
    console.print()
    for reason in plan.reasons:
        console.print(reason, soft_wrap=True)


def _print_rows(rows: Sequence[MemoryRow], plan: MemoryForecast, console: Console) -> None:
    from stopdown.app.progress import make_table

    reserves = any(row.reserved_bytes for row in rows)
    peaks = ("peak", "reserved") if reserves else ("peak",)
    right = (*peaks, "time", "moved")
    table = make_table("strategy", *peaks, "peak in", "time", "moved", right=right, no_wrap=True)
    for row in rows:
        is_chosen = (row.precision, row.strategy) == (plan.precision, plan.chosen)
        table.add_row(*_describe_row(row, reserves=reserves), style="bold" if is_chosen else "")
    console.print(table)


def list_worthwhile(rows: tuple[MemoryRow, ...], chosen: str) -> list[MemoryRow]:
    """Return the strategies that need less memory than every faster one, and the chosen strategy.

    Args:
        rows: strategies of one precision, fastest first.
        chosen: name of the chosen strategy.
    """
    shown: list[MemoryRow] = []
    for row in rows:
        is_less = not shown or _need(row) < min(map(_need, shown))
        if is_less or row.strategy == chosen:
            shown.append(row)
    return shown


def _need(row: MemoryRow) -> int:
    return max(row.peak_bytes, row.reserved_bytes)


def _describe_row(row: MemoryRow, *, reserves: bool) -> tuple[str, ...]:
    show: Callable[[int], str] = format_bytes
    return (
        row.strategy,
        show(row.peak_bytes),
        *([show(row.reserved_bytes)] if reserves else []),
        row.component or "between calls",
        "not measured" if row.time_ratio is None else f"x {row.time_ratio:.2f}",
        show(row.moved_bytes),
    )
