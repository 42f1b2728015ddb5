"""`stopdown bench`: what this device makes of each precision, as a table that can be sent in."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stopdown.app.display import Display, load_libraries
from stopdown.app.flags import DeviceOption, ForceOption, SizeOptions
from stopdown.app.request_options import refuse_unknown_device
from stopdown.bench.records import Benchmark, render
from stopdown.devices.environment import Device, choose_device
from stopdown.errors import InputError, OptionError
from stopdown.files.outputs import check_suffix, check_target, written_beside
from stopdown.number_formats import parse_bytes
from stopdown.pipelines.requests import Request, check_values, list_needed_fields, name_arguments
from stopdown.records import describe_other, read_record, to_json
from stopdown.sources.sources import resolve_source, verify_source

if TYPE_CHECKING:
    from stopdown.bench.ways import Subject


@dataclass(frozen=True)
class BenchOptions(SizeOptions):
    """Measure time, memory and error of each precision on this device.

    Runs a model and generated weights in fp32, bf16 and fp16, rescaled, guarded, offloaded and
    compiled. Shows the time, the measured and the predicted peak memory, the error against fp32, and
    how often the host waits for the device. The JSON file and the page contain no user names, host
    names or paths, so you can attach them to an issue. If the command was interrupted, type it again
    to continue.

    Examples:
      stopdown bench
      stopdown bench --size 10GiB --minutes 30
    """

    source: Annotated[
        str,
        typer.Argument(
            metavar="[SOURCE]",
            help="Model to run in addition to the generated weights: Hub id, Diffusers folder, "
            "or the bundled model.",
        ),
    ] = "shapes"
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="JSON file to write; the page is written next to it. By "
            "default named after the device.",
        ),
    ] = None
    force: ForceOption = False
    device: DeviceOption = "auto"
    size: Annotated[
        str,
        typer.Option(
            help="Size of the generated weights in fp16, such as 10GiB. auto: the "
            "largest that fits. none: only SOURCE."
        ),
    ] = "auto"
    minutes: Annotated[
        float, typer.Option(help="Time limit in minutes. The result names what is missing.")
    ] = 15.0
    steps: Annotated[int, typer.Option(help="Denoising steps of each run.")] = 2
    ways: Annotated[
        tuple[str, ...],
        typer.Option("--way", help="Only run this way. Repeat for several. By default all."),
    ] = ()


def main(options: BenchOptions) -> int:
    """Run the command, with progress and the page; 1 when something is missing, or nothing could be run."""
    from stopdown.app.progress import open_display, print_result

    with open_display(options) as display:
        made, path = bench(options, display)

    text = f"{render(made)}\nWrote {path} and {path.with_suffix('.md')}\n"
    print_result(options, made, lambda _: sys.stdout.write(text), name=path)
    return 0 if made.is_complete and any(x.time_s is not None for x in made.rows) else 1


def bench(options: BenchOptions, display: Display) -> tuple[Benchmark, Path]:
    """Measure, and write the record and its page after each row: the record, and where it is."""
    _check_options(options)
    load_libraries(display)
    from stopdown.bench.session import begin, go_on

    device = choose_device(options.device)
    slug = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-") or "device"
    path = options.output or Path(f"stopdown-bench-{slug}.json")
    made = begin(
        device,
        subjects := list_subjects(options, device),
        _list_ways(options),
        {"size": options.size, "steps": options.steps, **_list_sizes(options)},
    )
    if path.exists() and not options.force:
        made = _take_up(path, made)

    def keep(found: Benchmark) -> None:
        with written_beside(path, replaces=_describe_other) as part:
            part.write_text(to_json(found), encoding="utf-8")
        with written_beside(path.with_suffix(".md")) as part:
            part.write_text(render(found), encoding="utf-8")

    made = go_on(
        made, device, subjects, minutes=options.minutes, keep=keep, progress=display.progress
    )
    keep(made)
    return made, path


_SIZES = ("frames", "height", "width")


def _list_sizes(options: BenchOptions) -> dict[str, Any]:
    return {name: x for name in _SIZES if (x := getattr(options, name)) is not None}


def _check_options(options: BenchOptions) -> None:
    refuse_unknown_device(options.device)
    check_values(vars(options))
    if options.size not in ("auto", "none"):
        parse_bytes(options.size)
    if options.steps < 1 or not 0 < options.minutes < 1e6:
        raise OptionError(
            f"--steps {options.steps} --minutes {options.minutes:g} is no run.",
            expected="Both must be above 0.",
            remedy="Use --steps 2 --minutes 15.",
        )
    if options.output is not None:
        check_suffix(options.output, ".json")
        check_target(options.output, noun="record", replaces=_describe_other, force=True)


_describe_other = functools.partial(describe_other, "benchmark")


def _list_ways(options: BenchOptions) -> list[str]:
    from stopdown.bench.ways import WAYS

    unknown = [name for name in options.ways if name not in WAYS]
    if unknown:
        raise OptionError(
            f"The way {unknown[0]!r} is unknown.",
            expected=f"Known values are {', '.join(WAYS)}.",
            remedy='Use --way fp32 --way "fp32 residual".',
        )
    return [name for name in WAYS if not options.ways or name in options.ways]


def list_subjects(options: BenchOptions, device: Device) -> list[Subject]:
    """The model that was named, and generated weights of the size that was asked for or fits."""
    from stopdown.bench.ways import make_generated, make_real
    from stopdown.pipelines.allowed_sizes import check_sizes, find_grid, read_configs
    from stopdown.pipelines.loader import complete_source
    from stopdown.sources.component_classes import find_class

    source = resolve_source(options.source, variant=options.variant)
    verify_source(source)
    sizes = _list_sizes(options)
    request = Request(steps=options.steps, **sizes)
    source = complete_source(source)
    kind = find_class("diffusers", source.pipeline_class)
    drawn: dict[str, Any] = dict.fromkeys(list_needed_fields(kind), "")  # each row draws its own
    name_arguments(kind, dataclasses.replace(request, **drawn))
    check_sizes(find_grid(read_configs(source.path)), **sizes)
    subjects = [make_real(source, device, request)]
    if options.size != "none":
        size = find_size(device) if options.size == "auto" else parse_bytes(options.size)
        subjects.append(make_generated(size, device, options.steps))
    return subjects


def find_size(device: Device) -> int:
    """Bytes in fp16 of the largest weights that fit in fp32, and on a CPU of those that take seconds."""
    from stopdown.bench.ways import FP32_SHARE

    fits = int(FP32_SHARE * device.memory_bytes / 2)
    return min(fits, _MOST_ON_CPU) if device.type == "cpu" else fits


_MOST_ON_CPU = 2**24
"""Where a format is emulated, a call takes seconds even so."""


def _take_up(path: Path, begun: Benchmark) -> Benchmark:
    found = read_record(path, Benchmark)
    if dataclasses.replace(begun, memory_bytes=0) != dataclasses.replace(
        found,
        rows=(),
        attention=(),
        elapsed_s=0.0,
        is_complete=False,
        memory_source="",
        memory_bytes=0,
    ):
        raise InputError(
            f"{path} holds a benchmark of another device, version or option.",
            expected="The command continues an interrupted benchmark only with the same device, "
            "versions and options.",
            remedy="Name another file with -o, or replace it with --force.",
        )
    return found
