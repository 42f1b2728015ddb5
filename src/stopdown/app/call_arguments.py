"""Parsing of `--arg NAME=VALUE`, for pipeline arguments that have no option of their own."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from stopdown.diagnosis.explained import PICTURES, SOUNDS, VIDEOS
from stopdown.errors import InputError, OptionError, take_first_line
from stopdown.frames.media import read_image, read_video
from stopdown.frames.sound import read_sound

_OURS = {
    "output_type": "Stopdown takes the output as numbers, in which it looks for NaN.",
    "return_dict": "Stopdown reads the output by the names of its fields.",
    "generator": "The noise is drawn from `seed`.",
}
"""Arguments that users cannot set because Stopdown sets them, with the reason."""

_NAME = re.compile(r"[A-Za-z_]\w{0,99}", re.ASCII)


@functools.lru_cache(maxsize=8)
def read_arguments(given: tuple[str, ...]) -> dict[str, Any]:
    """Return extra arguments of a pipeline's call, by name.

    JSON is decoded, a picture is read as a PIL image, a video as a list of them, sound as a tensor. Other
    text stays text.

    Args:
        given: texts such as `class_labels=[207]`, `pose_video=pose.mp4` and `image=["a.png", "b.png"]`. A
            file is recognised by its suffix. A text in double quotes is never a file, except in a list.
    """
    arguments: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not _NAME.fullmatch(name):
            raise OptionError(
                f"--arg {text} has no name and value.",
                expected="It names an argument of the pipeline's call.",
                remedy="For example: --arg class_labels=[207].",
            )
        if name in arguments:
            raise OptionError(
                f"--arg {name} was given twice.",
                remedy=f"Give several values as a list: --arg '{name}=[1, 2]'.",
            )
        if name in _OURS:
            raise OptionError(
                f"--arg {name} was given.", expected=_OURS[name], remedy=f"Leave --arg {name} out."
            )
        arguments[name] = _read_value(name, value)
    return arguments


def list_argument_files(given: tuple[str, ...]) -> list[str]:
    """List the texts in extra arguments that may be files: each value, and each text in a list."""
    values = [text.partition("=")[2] for text in given]
    return [name for value in values for name in (value, *re.findall('"([^"]+)"', value)) if name]


def _read_value(name: str, text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        if text[:1] in tuple('[{"'):
            raise OptionError(
                f"--arg {name}={text} isn't JSON: {take_first_line(error)}.",
                expected="A value that begins with a bracket, a brace or a quote is JSON.",
                remedy=f"For example: --arg '{name}=[\"a\", 2]'.",
            ) from error
    else:
        return _read_listed_pictures(value) if isinstance(value, list) else value
    suffix = Path(text).suffix.lower()
    try:
        if suffix in PICTURES:
            return _make_picture(read_image(text))
        if suffix in VIDEOS or (text.endswith("/") and Path(text).is_dir()):
            return [_make_picture(frame) for frame in read_video(text)]
        if suffix in SOUNDS:
            import torch

            return torch.from_numpy(read_sound(text).samples)
    except InputError as error:
        remedy = f"{error.remedy} If it is a text, write --arg '{name}=\"{text}\"'."
        raise type(error)(error.what, expected=error.expected, remedy=remedy) from error
    return text


def _read_listed_pictures(value: Any) -> Any:
    """Return a list, or nested lists, with each file name of a picture replaced by its PIL image."""
    if isinstance(value, list):
        return [_read_listed_pictures(entry) for entry in value]
    if isinstance(value, str) and Path(value).suffix.lower() in PICTURES:
        return _make_picture(read_image(value))
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _make_picture(frame: Any) -> Any:
    from PIL import Image

    return Image.fromarray(frame)
