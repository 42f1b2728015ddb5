"""Selection of the pipeline class for a request, before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from stopdown.pipelines.allowed_sizes import check_sizes, find_grid, read_configs
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.requests import Request, find_pipeline_argument, name_pipeline_arguments
from stopdown.sources.component_classes import find_class
from stopdown.sources.hub import Progress
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.needed_packages import refuse_missing_packages
from stopdown.sources.source import Source

_SISTERS = {"video": {"CogVideoXPipeline": "CogVideoXVideoToVideoPipeline"}}
"""By input of a request: classes, and those for that input with the same weights, that Diffusers' tables
lack."""


def prepare_check(source: Source) -> Callable[[Request], None]:
    """Read a source's configs; return a function that refuses requests its pipeline does not accept."""
    configs = read_configs(source.described)
    grid = find_grid({name: configs[name] for name in source.components if name in configs})
    pipeline_class = find_class("diffusers", source.pipeline_class)

    def check(request: Request) -> None:
        name_pipeline_arguments(pipeline_class, request)
        frames = request.frames if request.video is None else len(request.video)
        check_sizes(
            grid,
            frames=frames,
            height=request.height,
            width=request.width,
            is_whole_video=request.video is not None and request.frames != frames,
        )

    return check


def select_class(source: Source, request: Request | None) -> Source:
    """Return a source with the pipeline class that suits the inputs of a request."""
    chosen = choose_class(source.pipeline_class, request or Request())
    return dataclasses.replace(source, pipeline_class=chosen)


def choose_class(class_name: str, request: Request) -> str:
    """Choose the pipeline class for a request: the checkpoint's own, or one for pictures, masks or video.

    A class that takes a picture itself, such as one with a ControlNet, is kept.
    """
    given = (name for name in ("mask", "video", "image") if getattr(request, name) is not None)
    asked = next(given, None)
    return class_name if asked is None else _list_sisters(asked).get(class_name, class_name)


@functools.cache
def _list_sisters(asked: str) -> dict[str, str]:
    """Map each class without a picture input to Diffusers' class with the same weights for that input.

    Args:
        asked: the input: `mask`, `video` or `image`.
    """
    with quiet_libraries():  # the table imports every pipeline
        from diffusers.pipelines import auto_pipeline as tables

    tasks = {
        "mask": ("AUTO_INPAINT",),
        "video": ("AUTO_VIDEO2VIDEO",),
        "image": ("AUTO_IMAGE2IMAGE", "AUTO_IMAGE2VIDEO"),
    }
    plain = [
        *tables.AUTO_TEXT2IMAGE_PIPELINES_MAPPING.items(),
        *tables.AUTO_TEXT2VIDEO_PIPELINES_MAPPING.items(),
    ]
    found = dict(_SISTERS.get(asked, {}))
    for task in tasks[asked]:
        sisters = getattr(tables, f"{task}_PIPELINES_MAPPING")
        for key, own in plain:
            if key in sisters and find_pipeline_argument("image", own) is None:
                found[own.__name__] = sisters[key].__name__
    return found


def select_pipeline(
    source: Source,
    request: Request,
    *,
    progress: Progress | None = None,
) -> Source:
    """Complete a source, select the pipeline class for a request, and check that the class accepts it."""
    found = select_class(complete_source(source, progress=progress), request)
    refuse_missing_packages(found)
    prepare_check(found)(request)
    return found
