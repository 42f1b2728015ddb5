"""Conversion of a command's options into a request to a pipeline, with all checks and input files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stopdown.app.call_arguments import read_arguments
from stopdown.app.display import Display
from stopdown.devices.device_choice import is_device_name
from stopdown.devices.device_profiles import find_profile, is_profile
from stopdown.errors import InputError, OptionError
from stopdown.frames.media import read_image, read_video
from stopdown.number_formats import parse_bytes
from stopdown.pipelines.allowed_sizes import check_sizes, find_grid, read_configs
from stopdown.pipelines.loras_and_schedulers import resolve_whole
from stopdown.pipelines.requests import FIELDS, MEDIA, Request, check_values
from stopdown.plans.plan_files import read_plan
from stopdown.plans.precision import find_plan_path, parse_request
from stopdown.sources.source import Source
from stopdown.sources.sources import refuse_ignored


def read_request(
    options: Any, *, prompt: str | None = None, takes_profile: bool = False
) -> Request:
    """Return the request that a command's options describe; errors are raised before any costly work.

    Args:
        options: options of a command that inherits from `RunOptions`.
        takes_profile: accept a device profile, as nothing is run on the device.
    """
    refuse_ignored(options.source, options.revision, options.config)
    refuse_unknown_device(options.device, takes_profile=takes_profile)
    read_limit(options.memory)
    parse_request(options.precision)
    if (plan := find_plan_path(options.precision)) is not None:
        read_plan(plan)
    check_pairs(options)
    values = {x.name: getattr(options, x.name) for x in FIELDS if x.name != "prompt"}
    check_values(values)
    _refuse_missing({name: values[name] for name in MEDIA if values[name] is not None})
    for name in MEDIA:
        if (place := values[name]) is not None:
            is_video = name == "video"
            values[name] = read_video(place, options.frames) if is_video else read_image(place)
    return Request(prompt=prompt, **values, arguments=read_arguments(options.arg))


def _refuse_missing(places: Mapping[str, str | Path]) -> None:
    """Refuse input files that don't exist, all of them in one error, each with its option."""
    gone = [(name, place) for name, place in places.items() if not os.path.exists(place)]
    if not gone:
        return
    said = " and ".join(f"{place} (--{name.replace('_', '-')})" for name, place in gone)
    raise InputError(
        f"The file {said} doesn't exist." if len(gone) == 1 else f"The files {said} don't exist.",
        expected=f"Relative paths start from {Path.cwd()}.",
        remedy=f"To see what is there: ls {Path(gone[0][1]).parent}",
    )


@dataclass(frozen=True)
class Pair:
    """Two options that exclude each other, or of which the first requires the second.

    Attributes:
        option, other: names of fields of a command's options.
        needed: whether the first requires the other, and does not exclude it.
    """

    option: str
    other: str
    expected: str
    remedy: str
    needed: bool = False


PAIRS = (
    Pair("image", "video", "", "Give the one to start from."),
    Pair(
        "num",
        "journal",
        "A journal belongs to a single run.",
        "Leave one of them out.",
    ),
    Pair(
        "output",
        "fix",
        "It names the folder for the repaired model.",
        "Add --fix, or leave -o out.",
        needed=True,
    ),
)
"""Every such pair; each applies to the commands that have both options."""


def check_pairs(options: Any) -> None:
    """Refuse options that exclude each other, or that require an option that is missing."""
    defaults = {entry.name: entry.default for entry in dataclasses.fields(options)}
    for pair in PAIRS:
        if not {pair.option, pair.other} <= defaults.keys():
            continue
        value, other = getattr(options, pair.option), getattr(options, pair.other)
        if value == defaults[pair.option]:
            continue
        if (other != defaults[pair.other]) is pair.needed:
            continue
        preposition = "without" if pair.needed else "with"
        raise OptionError(
            f"{_name_flag(pair.option, value)} was given {preposition} {_name_flag(pair.other)}.",
            expected=pair.expected,
            remedy=pair.remedy,
        )


def _name_flag(name: str, value: object = None) -> str:
    flag = "-o" if name == "output" else f"--{name.replace('_', '-')}"
    first = value[0] if isinstance(value, tuple) and value else value
    has_value = isinstance(first, (int, str)) and not isinstance(first, bool)
    return f"{flag} {first}" if has_value and name != "output" else flag


def find_named_source(options: Any, display: Display, *, with_weights: bool = True) -> Source:
    """Find a command's model, with its variant, LoRAs and scheduler, and check the size asked of it.

    No weights are loaded.
    """
    found = resolve_whole(options, with_weights=with_weights, progress=display.progress)
    frames = options.frames if options.video is None else None  # a video has its own
    grid = find_grid(read_configs(found.path))
    check_sizes(grid, frames=frames, height=options.height, width=options.width)
    return found


def read_limit(memory: str | None) -> int | None:
    """Return the bytes that `--memory` names; None for `none`, `auto` or no limit."""
    return None if memory in (None, "auto", "none") else parse_bytes(str(memory))


def refuse_unknown_device(device: str | None, *, takes_profile: bool = False) -> None:
    """Refuse a device that is not the name of one, without importing PyTorch.

    Args:
        takes_profile: also accept a device profile, as nothing is run on the device.
    """
    if device is None or is_device_name(device):
        return
    if not is_profile(device) and not takes_profile:
        raise OptionError(
            f"The device {device!r} is unknown.",
            expected="The device of a run is auto, cuda, cuda:1, mps or cpu.",
            remedy="Use --device auto.",
        )
    if takes_profile:
        find_profile(device)
        return
    raise OptionError(
        f"--device {device} is a profile of the {find_profile(device).title} for forecasts. A model can't "
        "run on it.",
        expected="The device of a run is auto, cuda, cuda:1, mps or cpu.",
        remedy="To run on a card in this machine, use --device cuda. For a forecast, use stopdown check "
        f"SOURCE --device {device}, or stopdown fit SOURCE --device {device}.",
    )


_LEAST_FPS, _MOST_FPS = 0.01, 1000.0


def check_rate(fps: float | None) -> None:
    """Refuse frames per second beyond the limits of video files; a gif shows a frame for 655 s at most."""
    if fps is not None and not _LEAST_FPS <= fps <= _MOST_FPS:  # NaN is neither
        raise OptionError(
            f"--fps {fps:g} isn't between {_LEAST_FPS:g} and {_MOST_FPS:g}.", remedy="Use --fps 8."
        )
