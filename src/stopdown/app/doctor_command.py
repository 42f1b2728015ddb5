"""Implementation of `stopdown doctor`: report the health of this machine, or of a device profile."""

from __future__ import annotations

import functools
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from stopdown.app.display import load_libraries
from stopdown.app.flags import CommandOptions
from stopdown.devices.device_profiles import find_device_target, format_profile
from stopdown.doctor import examine
from stopdown.errors import OptionError
from stopdown.number_formats import format_bytes, format_figure, format_range
from stopdown.records import DeviceHealth, MachineHealth, group_components

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class DoctorOptions(CommandOptions):
    """Show which precisions and models suit this machine.

    The answer comes first; costs and known problems follow.

    Examples:
      stopdown doctor
      stopdown doctor --device v100
    """

    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cuda:1, mps or cpu; a profile such as v100, t4, a100 or mps-m1; or your "
            "own profile, mine.toml. By default every device in this machine."
        ),
    ] = None
    toml: Annotated[
        bool,
        typer.Option(
            "--toml", help="Print the device's profile as TOML, a starting point for your own."
        ),
    ] = False


def run_doctor_command(options: DoctorOptions) -> int:
    """Run the command and print its report, or a device profile with `--toml`.

    Returns 1 if PyTorch cannot compute on a device.
    """
    from stopdown.app.progress import open_display, print_result

    if options.toml:
        sys.stdout.write(write_profile(options.device))
        return 0
    with open_display(options, is_short=True) as display:
        load_libraries(display, has_pipelines=False)
        health = examine(options.device)
    print_result(
        options,
        health,
        functools.partial(print_health, health, asked=options.device),
        highlight=False,
    )
    return int(any(device.missing for device in health.devices))


def write_profile(device: str | None) -> str:
    """Return a device's profile as TOML, a starting point for a custom profile."""
    if device is None:
        raise OptionError(
            "A profile is written for one device, and none was named.",
            remedy="Use stopdown doctor --device v100 --toml, or --device cuda for this machine's card.",
        )
    return format_profile(find_device_target(device, needs_kernels=False)[1])


def print_health(health: MachineHealth, console: Console, *, asked: str | None = None) -> None:
    """Print each device: formats, attention, faults, and the choices of `auto`.

    Args:
        asked: value of `--device`, for the command that is suggested.
    """
    for number, device in enumerate(health.devices):
        if number:
            console.print()
        _print_device(device, console, f" --device {shlex.quote(asked)}" if asked else "")
    _print_switches(health, console)
    settings = tuple(f"{name}={value}" for name, value in health.settings.items())
    _print_list("Environment variables that affect results or speed", settings, console)
    _print_list("Known problems with these versions", health.faults, console)
    versions = health.machine["versions"]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    console.print(f"\nPython {health.machine['python']}, {shown}", soft_wrap=True)


def _print_device(device: DeviceHealth, console: Console, option: str) -> None:
    from rich.text import Text

    from stopdown.app.progress import print_prose

    memory = f", {device.memory_bytes / 2**30:.1f} GiB of memory" if device.memory_bytes else ""
    capability = f", compute capability {device.capability}" if device.capability else ""
    where = "" if device.missing else "from its profile; "
    origin = "" if device.tried else f" ({where}nothing was measured)"
    title = Text.assemble((device.device, "bold"), f"{capability}{memory}{origin}")
    console.print(title, soft_wrap=True)
    if device.missing:
        print_prose(console, f"  {device.missing}")
    if device.answer:
        print_prose(console, f"  {device.answer}")
    _print_fits(device, console, option)
    for entry in device.formats:
        ratio = None if entry.name == "fp32" else entry.time_ratio
        console.print(f"  {entry.name:5} {entry.state:9} {word_ratio(ratio)}".rstrip())
        if (entry.name, entry.state) != ("fp32", "native"):  # as everywhere
            known = f"{device.device}: {entry.name} is {entry.state}. "
            print_prose(console, f"        {entry.reason.removeprefix(known)}")
    kernels = ", ".join(f"{name} ({', '.join(fmt)})" for name, fmt in device.attention.items())
    print_prose(console, f"  attention kernels: {kernels or 'none known'}")
    _print_list("Known problems with this device", device.faults, console)
    _print_list("Measured on such a device by stopdown bench", device.measured, console)
    _print_outlook(device, console)


def word_ratio(ratio: float | None) -> str:
    """Return a time ratio in words: `8.3× faster than fp32` for 0.12; "" if nothing was timed."""
    if ratio is None:
        return ""
    if 0.95 < ratio < 1.05:
        return "as fast as fp32"
    if ratio > 1:
        return f"takes {format_figure(ratio)} times as long as fp32"
    return f"{format_figure(1 / ratio)}× faster than fp32"


def _print_fits(device: DeviceHealth, console: Console, option: str) -> None:
    """Print a line for each well-known model: whether it fits, and by which strategy."""
    from stopdown.app.progress import print_prose

    has = format_bytes(device.memory_bytes)
    for fit in device.fits:
        peak = format_bytes(fit.peak_bytes)
        host = f", and {format_bytes(fit.host_bytes)} of host memory" if fit.host_bytes else ""
        told = f"fits in {fit.precision}."
        if fit.seconds:
            told += f" 50 steps take {format_range(*fit.seconds)}."
        told += f" Memory: about {peak} of {has}{host} (strategy {fit.strategy})."
        if not fit.strategy:
            told = f"doesn't fit: {fit.precision} takes at least {peak}, and the device has {has}."
        print_prose(console, f"  {fit.model}, {fit.size}: {told}")
    if device.fits:
        print_prose(console, f"  For any other model: stopdown fit MODEL{option}")
    console.print()


def _print_outlook(device: DeviceHealth, console: Console) -> None:
    """Print the precisions that `auto` would choose: each reason once, with the components it holds for."""
    from stopdown.app.progress import print_prose

    console.print("\nWhat --precision auto would choose", style="bold")
    told: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for x in device.outlooks:
        told.setdefault((x.precision, x.reason), []).append((x.component, x.model))
    for (precision, reason), named in told.items():
        for entry in device.formats:
            reason = reason.replace(entry.reason, f"{entry.name} is {entry.state} on this device.")
        print_prose(console, f"  {precision}: {reason}")
        for components, model in group_components(named):
            console.print(f"    {model}: {components}", soft_wrap=True)


def _print_switches(health: MachineHealth, console: Console) -> None:
    from stopdown.app.progress import print_prose

    for number, switch in enumerate(health.switches):
        if not number:
            console.print("\nSettings that lower precision", style="bold")
        print_prose(console, f"  {switch.name} = {switch.value}. {switch.meaning}")


def _print_list(title: str, entries: tuple[str, ...], console: Console) -> None:
    from stopdown.app.progress import print_prose

    if entries:
        console.print(f"\n{title}", style="bold")
    for entry in entries:
        print_prose(console, f"  - {entry}")
