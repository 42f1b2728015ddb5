"""From what a user asks for to the arguments of a pipeline's call, and from its output to frames.

Arguments are found by name in the signature of the pipeline's `__call__`, so a pipeline that nobody
here has heard of works too. Families differ in a few names only; those stand in tables.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stopdown.errors import OptionError

VIDEO_TO_VIDEO = {
    "CogVideoXPipeline": "CogVideoXVideoToVideoPipeline",
    "WanPipeline": "WanVideoToVideoPipeline",
}
"""Pipelines whose checkpoint also serves another class, which takes a video."""

IMAGE_TO_IMAGE = {
    "StableDiffusionPipeline": "StableDiffusionImg2ImgPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLImg2ImgPipeline",
    "FluxPipeline": "FluxImg2ImgPipeline",
}
"""Pipelines whose checkpoint also serves another class, which takes a picture."""

_NAMES = {
    "prompt": ("prompt",),
    "negative": ("negative_prompt",),
    "image": ("image", "images"),
    "video": ("video",),
    "steps": ("num_inference_steps",),
    "frames": ("num_frames", "video_length"),
    "height": ("height",),
    "width": ("width",),
    "guidance": ("guidance_scale", "max_guidance_scale"),
}
_FLAGS = {name: f"--{name}" for name in _NAMES} | {"prompt": "PROMPT"}


@dataclass(frozen=True)
class Request:
    """What a user asks of a pipeline; None leaves the pipeline's own default.

    Attributes:
        prompt, negative: texts.
        image: `[H, W, 3]` uint8.
        video: `[T, H, W, 3]` uint8.
        frames, height, width: size of the output, in frames and pixels.
        steps: denoising steps.
        guidance: guidance scale.
        seed: of the noise, drawn on the CPU so that it is the same on every device.
    """

    prompt: str | None = None
    negative: str | None = None
    image: np.ndarray[Any, Any] | None = None
    video: np.ndarray[Any, Any] | None = None
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0


def choose_class(class_name: str, request: Request) -> str:
    """The class that serves a request from a checkpoint: its own, or a sister for video or image."""
    if request.video is not None:
        return VIDEO_TO_VIDEO.get(class_name, class_name)
    if request.image is not None:
        return IMAGE_TO_IMAGE.get(class_name, class_name)
    return class_name


def name_arguments(pipeline_class: type, request: Request) -> dict[str, Any]:
    """What was asked for, by the names that a pipeline class has for it; nothing need be loaded.

    Raises:
        OptionError: something was asked for that this pipeline does not take, or something that it
            needs is missing.
    """
    taken = inspect.signature(pipeline_class.__call__).parameters
    arguments: dict[str, Any] = {}
    for name, candidates in _NAMES.items():
        value = getattr(request, name)
        target = next((candidate for candidate in candidates if candidate in taken), None)
        if value is None or (target is None and _is_in_media(name, request)):
            continue
        if target is None:
            raise _describe_unwanted(pipeline_class.__name__, name, taken)
        arguments[target] = value
    _check_needed(pipeline_class.__name__, arguments, taken)
    return arguments


def build_arguments(pipe: Any, request: Request) -> dict[str, Any]:
    """Keyword arguments for the pipeline's call.

    Raises:
        OptionError: as `name_arguments`.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    arguments = name_arguments(type(pipe), request)
    arguments |= _prepare_media(arguments, request)
    if "generator" in taken:
        arguments["generator"] = torch.Generator("cpu").manual_seed(request.seed)
    if "output_type" in taken:
        arguments["output_type"] = "np"
    return arguments | _match_text_length(pipe, taken)


def _is_in_media(name: str, request: Request) -> bool:
    """Whether a size is that of the picture or video to start from, which is brought to it."""
    if name == "frames":
        return request.video is not None
    return name in ("height", "width") and request.image is not None


def _match_text_length(pipe: Any, taken: Any) -> dict[str, int]:
    """CogVideoX asks for as many text tokens as its transformer was made for; pass that number on."""
    config = getattr(getattr(pipe, "transformer", None), "config", {})
    length = config.get("max_text_seq_length") if hasattr(config, "get") else None
    if not length or "max_sequence_length" not in taken:
        return {}
    return {"max_sequence_length": length}


def _describe_unwanted(pipeline: str, name: str, taken: Any) -> OptionError:
    flags = [_FLAGS[other] for other, names in _NAMES.items() if any(n in taken for n in names)]
    return OptionError(
        f"{pipeline} does not take {_FLAGS[name]}.",
        expected=f"It takes {', '.join(flags)}.",
        remedy=f"Leave {_FLAGS[name]} away, or use a model that takes it.",
    )


def _check_needed(pipeline: str, arguments: dict[str, Any], taken: Any) -> None:
    needs_image = "image" in taken and taken["image"].default is inspect.Parameter.empty
    needs = {"image": needs_image, "video": "video" in taken and "image" not in taken}
    needs["prompt"] = "prompt" in taken
    for name, is_needed in needs.items():
        if is_needed and name not in arguments:
            flag = {"prompt": "a PROMPT"}.get(name, f"--{name} FILE")
            is_text = name == "prompt"
            raise OptionError(
                f"{pipeline} needs {flag}, and there is none.",
                remedy='Write it after SOURCE: stopdown generate SOURCE "a red circle".'
                if is_text
                else f"Add {flag} to the command.",
            )


def _prepare_media(arguments: dict[str, Any], request: Request) -> dict[str, Any]:
    """Pictures as PIL images, resized to the size asked for."""
    from PIL import Image

    prepared: dict[str, Any] = {}
    for name in ("image", "images"):
        if name in arguments:
            picture = Image.fromarray(arguments[name])
            size = (request.width or picture.width, request.height or picture.height)
            prepared[name] = picture if size == picture.size else picture.resize(size)
    if "video" in arguments:
        prepared["video"] = [Image.fromarray(frame) for frame in arguments["video"]]
    return prepared


def read_frames(output: Any) -> np.ndarray[Any, Any]:
    """`[T, H, W, 3]` floating in [0, 1] (NaN possible), from what a pipeline returned as numpy."""
    found = getattr(output, "frames", None)
    if found is None:
        return np.asarray(output.images)
    return np.asarray(found[0])


def find_frames(pipe: Any, arguments: dict[str, Any]) -> int:
    """How many frames a call will make, as far as its arguments and the pipeline's defaults say."""
    if "video" in arguments:
        return len(arguments["video"])
    parameters = inspect.signature(type(pipe).__call__).parameters
    for name in _NAMES["frames"]:
        if name in parameters:
            asked = arguments.get(name) or parameters[name].default
            unet = getattr(getattr(pipe, "unet", None), "config", None)
            transformer = getattr(getattr(pipe, "transformer", None), "config", None)
            made_for = getattr(unet, "num_frames", None) or getattr(
                transformer, "sample_frames", None
            )
            return int(asked or made_for or 2)
    return 1


def find_steps(pipe: Any, arguments: dict[str, Any]) -> int:
    """How many denoising steps a call will make, as far as its arguments and the defaults say."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    for name in _NAMES["steps"]:
        if name in parameters:
            return int(arguments.get(name) or parameters[name].default or 1)
    return 1
