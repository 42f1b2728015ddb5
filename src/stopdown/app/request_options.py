"""What the options of a command ask of a pipeline, checked, with their files read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from stopdown.app.display import Display
from stopdown.app.flags import SourceOptions
from stopdown.devices.device_profiles import find_profile, is_profile
from stopdown.devices.environment import is_device_name
from stopdown.errors import OptionError
from stopdown.frames.media import read_image, read_video
from stopdown.number_formats import parse_bytes
from stopdown.pipelines.allowed_sizes import check_sizes, find_grid, read_configs
from stopdown.pipelines.loras_and_schedulers import resolve_whole
from stopdown.pipelines.requests import Request
from stopdown.plans.plan_files import read_plan
from stopdown.plans.precision import find_plan_path, parse_request
from stopdown.sources.sources import Source, refuse_ignored

LARGEST_SEED = 2**63 - 1


class RequestOptions(SourceOptions):
    """What options of several commands ask of a pipeline; None leaves the model's own default.

    The dataclass of a command is a subclass, and has those that it takes as fields, in the order of its
    help. What it does not take stays as it is here.
    """

    source: str
    device: str | None
    image: Path | None = None
    video: Path | None = None
    mask: Path | None = None
    control_image: Path | None = None
    strength: float | None = None
    steps: int | None = None
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    guidance: float | None = None
    revision: str | None = None
    config: str | None = None
    precision: str = "auto"
    memory: str | None = None
    allow: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()
    scheduler: str | None = None


def read_request(
    options: RequestOptions,
    *,
    prompt: str | None = None,
    negative: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    largest_seed: int = LARGEST_SEED,
    takes_profile: bool = False,
) -> Request:
    """The request, refused before anything heavy is done.

    Args:
        options: a command's.
        prompt, negative: texts.
        steps: of the runs, where `options.steps` are theirs; None leaves the model's own.
        seed, largest_seed: of the noise.
        takes_profile: nothing is run, so the device may be one that is not here.

    Raises:
        OptionError: a number is out of range, both a picture and a video were given, the device is a
            profile, or an option would be ignored with this source.
        InputError: a file cannot be read.
    """
    refuse_ignored(options.source, options.revision, options.config)
    refuse_unknown_device(options.device, takes_profile=takes_profile)
    read_limit(options.memory)
    parse_request(options.precision)
    if (plan := find_plan_path(options.precision)) is not None:
        read_plan(plan)
    check_counts(options)
    check_number("--guidance", options.guidance)
    _check_strength(options.strength)
    _check_seed(seed, largest_seed)
    if options.image is not None and options.video is not None:
        raise OptionError(
            "--image and --video were both given.", remedy="Give the one to start from."
        )
    return Request(
        prompt=prompt,
        negative=negative,
        image=read_image(options.image) if options.image else None,
        video=read_video(options.video, options.frames) if options.video else None,
        frames=options.frames,
        height=options.height,
        width=options.width,
        steps=steps,
        guidance=options.guidance,
        seed=seed,
        mask=read_image(options.mask) if options.mask else None,
        control_image=read_image(options.control_image) if options.control_image else None,
        strength=options.strength,
    )


def find_source(options: RequestOptions, display: Display, *, with_weights: bool = True) -> Source:
    """The model that a command names, with its variant, LoRAs and scheduler; nothing is loaded.

    Raises:
        SourceError: there is none, or it is damaged or refused.
        OptionError: a LoRA, the scheduler or a size is refused.
    """
    found = resolve_whole(options, with_weights=with_weights, progress=display.progress)
    frames = options.frames if options.video is None else None  # a video has its own
    grid = find_grid(read_configs(found.path))
    check_sizes(grid, frames=frames, height=options.height, width=options.width)
    return found


ALLOWABLE = {"smaller": "fewer frames or a smaller picture"}
"""What `--allow` lets change the picture."""


def read_allowed(allow: Sequence[str], memory: str | None) -> tuple[str, ...]:
    """What may change the picture, each once.

    Raises:
        OptionError: it is unknown, or there is no limit that it could help to keep.
    """
    for name in allow:
        if name not in ALLOWABLE:
            known = ", ".join(f"{name} ({what})" for name, what in ALLOWABLE.items())
            raise OptionError(
                f"--allow {name} is unknown.",
                expected=f"Known: {known}.",
                remedy=f"Use --allow {next(iter(ALLOWABLE))}.",
            )
    if allow and memory == "none":
        raise OptionError(
            f"--allow {allow[0]} was given with --memory none.",
            expected="It says what may change the picture so that a run stays within a limit.",
            remedy=f"Give a limit: --memory 8GiB --allow {allow[0]}.",
        )
    return tuple(dict.fromkeys(allow))


def read_limit(memory: str | None) -> int | None:
    """The bytes that `--memory` names; None for `none`, `auto` and no limit.

    Raises:
        OptionError: it is no amount of memory.
    """
    return None if memory in (None, "auto", "none") else parse_bytes(str(memory))


def refuse_unknown_device(device: str | None, *, takes_profile: bool = False) -> None:
    """Refuse a device that no machine has, before PyTorch is asked which there are here.

    Args:
        takes_profile: nothing is run, so one will do that is known from its maker's papers only.

    Raises:
        OptionError: it is unknown, or a profile where something is to run.
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
        f"--device {device} is a profile of the {find_profile(device).title}, not a device of this "
        "machine.",
        expected="The device of a run is auto, cuda, cuda:1, mps or cpu.",
        remedy="On a machine with this card, use --device cuda. Here, use stopdown check SOURCE --device "
        f"{device}, or stopdown fit SOURCE --device {device}.",
    )


def check_number(flag: str, value: float | None) -> None:
    """Refuse NaN and Inf.

    Raises:
        OptionError: it is one of them.
    """
    if value is not None and not math.isfinite(value):
        raise OptionError(f"{flag} {value} is not a number.", remedy=f"Use {flag} 6.")


_MOST_FPS = 1000.0


def check_rate(fps: float) -> None:
    """Refuse frames per second that no file has.

    Raises:
        OptionError: it is not above 0, or too many.
    """
    if not 0 < fps <= _MOST_FPS:  # NaN is neither
        raise OptionError(
            f"--fps {fps:g} is not above 0 and up to {_MOST_FPS:g}.", remedy="Use --fps 8."
        )


def _check_strength(value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise OptionError(
            f"--strength {value} is not above 0 and up to 1.",
            expected="It is the share of the denoising steps that are run.",
            remedy="Use --strength 0.8.",
        )


def check_counts(options: object) -> None:
    """Refuse counts below 1.

    Raises:
        OptionError: naming the option.
    """
    for name in ("steps", "frames", "height", "width"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise OptionError(
                f"--{name} {value} is less than 1.", remedy=f"Use --{name} 1 or more."
            )


def _check_seed(seed: int, largest: int) -> None:
    if not 0 <= seed <= largest:
        power = (largest + 1).bit_length() - 1
        raise OptionError(
            f"--seed {seed} is not a seed.",
            expected=f"A seed is a whole number from 0 to 2**{power} - 1.",
            remedy="Use --seed 0.",
        )
