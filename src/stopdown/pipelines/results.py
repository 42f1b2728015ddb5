"""Kind of a pipeline's output (pictures, a video or sound), from its class, and reading of that output.

The kind is inferred from the output classes in the pipeline's module, without loading anything.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stopdown.errors import OptionError
from stopdown.frames.media import PICTURES, SOUNDS, check_sides, choose_format, require_encoder
from stopdown.pipelines.requests import Request, find_frames, find_pipeline_argument

if TYPE_CHECKING:
    import numpy as np

OutputKind = Literal["video", "picture", "sound", ""]

_VIDEO, _PICTURE = ("frames", "video"), ("images", "image", "prediction")
_SOUND, _TRACK = ("audios",), ("audio", "sound")
"""Fields of output classes with sound alone, and with the sound track of a video."""

_RATE_OWNERS = ("vocoder", "", "sound_tokenizer", "audio_vae", "vae")
_RATE_NAMES = ("output_sampling_rate", "sampling_rate", "sample_rate", "audio_sample_rate")
"""Parts of a pipeline, and their fields with the sample rate, in the order in which they are read.
A vocoder comes first, as an autoencoder before it may have another rate."""


@dataclass(frozen=True)
class Result:
    """Output of a pipeline as arrays.

    Attributes:
        frames: `[T, H, W, 3]` or `[T, H, W, 4]`, floating in [0, 1] (NaN possible); None for sound alone.
        samples: `[channels, samples]` or `[samples]` floating; None without sound.
        rate: samples per second; 0 without sound.
        fps: frames per second for which they were made: those that match the sound, else those of
            `find_frame_rate`; None if the pipeline states none.
    """

    frames: np.ndarray[Any, Any] | None
    samples: np.ndarray[Any, Any] | None = None
    rate: int = 0
    fps: float | None = None


def find_output_kind(pipeline_class: type) -> OutputKind:
    """Return the kind of a pipeline's output; "" for outputs such as embeddings."""
    if any(find_pipeline_argument(name, pipeline_class) for name in ("frames", "video")):
        return "video"
    if "frame_size" in inspect.signature(pipeline_class.__call__).parameters:
        return "video"  # ShapE turns its object
    if hasattr(pipeline_class, "n_targets"):
        return "video"  # Marigold takes a picture apart: several pictures
    found = next(filter(None, map(_list_output_fields, pipeline_class.__mro__)), set[str]())
    if found & {*_VIDEO}:
        return "video"
    if found & {*_PICTURE}:
        return "picture"
    if found & {*_SOUND}:
        return "sound"
    return "" if found else "picture"


def _list_output_fields(pipeline_class: type) -> set[str]:
    """List the fields of the output classes in a pipeline's module; empty for Diffusers' base class."""
    from diffusers.utils import BaseOutput

    module = pipeline_class.__module__
    if module.endswith("pipeline_utils") or module not in sys.modules:
        return set()
    kinds = [
        x
        for x in vars(sys.modules[module]).values()
        if isinstance(x, type)
        and issubclass(x, BaseOutput)
        and dataclasses.is_dataclass(x)
        and ".pipelines." in x.__module__
    ]
    return {entry.name for kind in kinds for entry in dataclasses.fields(kind)}


def choose_suffix(pipeline_class: type, request: Request) -> str:
    """Choose the suffix for an output without a name: `.png`, `.mp4` or `.wav`."""
    kind = find_output_kind(pipeline_class)
    if kind == "sound":
        return ".wav"
    return ".mp4" if kind == "video" and request.frames != 1 else ".png"


def check_format(pipeline_class: type, request: Request, output: str) -> None:
    """Refuse an output format that doesn't suit a pipeline's result, has no encoder or no room for the
    requested sides; refuse pipelines that make no media.
    """
    kind = find_output_kind(pipeline_class)
    if not kind:
        fields = sorted(_list_output_fields(pipeline_class))
        raise OptionError(
            f"{pipeline_class.__name__} makes no picture, video or sound.",
            expected=f"Its result has {', '.join(fields)}.",
            remedy="Give the model that makes the picture, or call this one from Python: "
            "stopdown.load(SOURCE).",
        )
    if kind == "video":
        _refuse_several_videos(pipeline_class, request)
        given = None if request.video is None else len(request.video)
        frames, suffix = request.frames or given, Path(output).suffix.lower()
        if frames is None and suffix in PICTURES:
            stem = Path(output).with_suffix("")
            raise OptionError(
                f"The output {output} is a single picture, and {pipeline_class.__name__} makes a video.",
                expected=f"A {suffix} file holds one frame.",
                remedy=f"Use -o {stem}.mp4, -o {stem}/ for a folder of frames, or frames=1.",
            )
        frames = frames or (2 if suffix in SOUNDS else None)
    else:
        frames = count_results(pipeline_class, request.arguments) if kind == "picture" else 0
    chosen = choose_format(output, frames)
    require_encoder(chosen)
    check_sides(chosen, request.height, request.width)


def count_results(pipeline_class: type, arguments: Mapping[str, Any]) -> int:
    """Return how many pictures or videos a call makes at a time: those for each prompt, of all prompts.

    Pipelines that take a picture apart into layers make one picture for each layer.
    """
    names = ("num_images_per_prompt", "num_videos_per_prompt")
    each, prompts = next(filter(None, map(arguments.get, names)), 1), arguments.get("prompt")
    taken = inspect.signature(pipeline_class.__call__).parameters
    layers = arguments.get("layers") or (taken["layers"].default if "layers" in taken else 1)
    return int(each) * int(layers) * (len(prompts) if isinstance(prompts, list) else 1)


def _refuse_several_videos(pipeline_class: type, request: Request) -> None:
    """Refuse a request for several videos at a time, of which only the first would be written."""
    asked = request.arguments.get("num_videos_per_prompt")
    if asked not in (None, 1):
        raise OptionError(
            f"{pipeline_class.__name__} was asked for num_videos_per_prompt={asked} at a time.",
            expected="One of them is written for each prompt.",
            remedy="Leave num_videos_per_prompt out, and make each video with a seed of its own.",
        )


def count_frames(pipe: Any, arguments: Mapping[str, Any]) -> int | None:
    """Return the number of frames or pictures that a call will make; 0 for sound, None if unknown."""
    pipeline_class = type(pipe)
    kind = find_output_kind(pipeline_class)
    if kind == "sound":
        return 0
    if kind == "picture":
        return count_results(pipeline_class, arguments)
    is_told = any(find_pipeline_argument(name, pipeline_class) for name in ("frames", "video"))
    return find_frames(pipe, dict(arguments)) if is_told else None


def read_frames(output: Any) -> np.ndarray[Any, Any]:
    """Return a pipeline's numpy output as `[T, H, W, 3]`, floating in [0, 1] (NaN possible).

    A picture taken apart is `[T, H, W, 4]`, with the lowest layer first.
    """
    import numpy as np

    found = _take(output, _VIDEO)
    if found is not None:
        return np.asarray(found[0])
    pictures = np.asarray(_take(output, _PICTURE))
    if "Normals" in type(output).__name__:  # of Marigold: directions, each coordinate in [-1, 1]
        pictures = (pictures + 1) / 2
    if pictures.ndim == 5:  # of ShapE: views of an object from all sides; of Qwen-Image: layers
        pictures = pictures[0]
    return np.repeat(pictures, 3, -1) if pictures.shape[-1:] == (1,) else pictures


def read_result(pipe: Any, arguments: Mapping[str, Any], output: Any) -> Result:
    """Return the first video or sound in the output of a pipeline's call."""
    alone = _take(output, _SOUND)
    if alone is not None:
        return Result(None, _to_array(alone[0]), find_sound_rate(pipe))
    frames, track = read_frames(output), _take(output, _TRACK)
    if track is None:
        return Result(frames, fps=find_frame_rate(type(pipe), arguments))
    samples, rate = _to_array(track[0]), find_sound_rate(pipe)
    fps = _read_rate(type(pipe), arguments) or len(frames) * rate / max(1, samples.shape[-1])
    return Result(frames, samples, rate, fps)


def find_sound_rate(pipe: Any) -> int:
    """Return the sample rate of a pipeline's sound, in Hz."""
    for owner in (getattr(pipe, name, None) if name else pipe for name in _RATE_OWNERS):
        for name in _RATE_NAMES:
            for place in (getattr(owner, "config", None), owner):
                found = (
                    place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
                )
                if isinstance(found, (int, float)) and found > 0:
                    return int(found)
    raise OptionError(
        f"{type(pipe).__name__} doesn't say how many samples a second of its sound has.",
        expected=f"A part of it, or its config, has {' or '.join(_RATE_NAMES)}.",
        remedy="Call it from Python: stopdown.load(SOURCE).",
    )


def iterate_sounds(output: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the samples of each sound in a pipeline's output."""
    found = _take(output, (*_SOUND, *_TRACK))
    for one in found if hasattr(found, "__len__") else ():
        samples = _to_array(one)
        if samples.dtype.kind == "f" and samples.ndim in (1, 2):
            yield samples


def find_frame_rate(pipeline_class: type, arguments: Mapping[str, Any]) -> float | None:
    """Return the frames per second for which a pipeline makes a video; None if it states none.

    It is the rate that the call is given or has as a default (LTX, SVD), else that of the example in the
    call's docstring (Wan, HunyuanVideo).
    """
    found = _EXAMPLE_RATE.search(inspect.getdoc(pipeline_class.__call__) or "")
    return _read_rate(pipeline_class, arguments) or (float(found[1]) if found else None)


_EXAMPLE_RATE = re.compile(r"export_to_video\(.*\bfps=(\d+)")


def _read_rate(pipeline_class: type, arguments: Mapping[str, Any]) -> float | None:
    """Return the frames per second in a call's arguments or their defaults; None if there are none."""
    taken = inspect.signature(pipeline_class.__call__).parameters
    for name in ("frame_rate", "fps"):
        given = arguments.get(name) or (taken[name].default if name in taken else None)
        if isinstance(given, (int, float)) and given > 0:
            return float(given)
    return None


def _take(output: Any, names: tuple[str, ...]) -> Any:
    found = (getattr(output, name, None) for name in names)
    return next((x for x in found if x is not None), None)


def _to_array(samples: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    if hasattr(samples, "detach"):
        samples = samples.detach().float().cpu()
    return np.asarray(samples)
