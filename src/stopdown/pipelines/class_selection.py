"""Which pipeline class serves a request from a source, known before anything is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from stopdown.pipelines.allowed_sizes import check_sizes, find_grid, read_configs
from stopdown.pipelines.component_classes import find_class
from stopdown.pipelines.hub import Progress
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.requests import Request, name_arguments
from stopdown.pipelines.sources import Source

VIDEO_TO_VIDEO = {
    "CogVideoXPipeline": "CogVideoXVideoToVideoPipeline",
    "WanPipeline": "WanVideoToVideoPipeline",
}
"""Pipelines whose checkpoint also serves another class, which takes a video."""

IMAGE_TO_IMAGE = {
    "StableDiffusionPipeline": "StableDiffusionImg2ImgPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusion3Pipeline": "StableDiffusion3Img2ImgPipeline",
    "FluxPipeline": "FluxImg2ImgPipeline",
}
"""Pipelines whose checkpoint also serves another class, which takes a picture."""

INPAINTING = {
    "StableDiffusionPipeline": "StableDiffusionInpaintPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLInpaintPipeline",
    "StableDiffusion3Pipeline": "StableDiffusion3InpaintPipeline",
    "FluxPipeline": "FluxInpaintPipeline",
}
"""Pipelines whose checkpoint also serves another class, which takes a picture and a mask."""


@dataclass(frozen=True)
class Selection:
    """A source with the class that serves a request.

    Attributes:
        source: its pipeline class is the one that was chosen.
        configs: of its components, by name.
    """

    source: Source
    configs: dict[str, dict[str, Any]]

    def check_request(self, request: Request) -> None:
        """Refuse arguments and sizes that the pipeline does not take.

        Raises:
            OptionError: the pipeline does not take the request, or lacks something.
        """
        name_arguments(find_class("diffusers", self.source.pipeline_class), request)
        frames = request.frames if request.video is None else len(request.video)
        check_sizes(
            find_grid(self.configs), frames=frames, height=request.height, width=request.width
        )


def choose_class(class_name: str, request: Request) -> str:
    """The class that serves a request from a checkpoint: its own, or a sister for video or image."""
    if request.mask is not None:
        return INPAINTING.get(class_name, class_name)
    if request.video is not None:
        return VIDEO_TO_VIDEO.get(class_name, class_name)
    if request.image is not None:
        return IMAGE_TO_IMAGE.get(class_name, class_name)
    return class_name


def select_pipeline(
    source: Source,
    request: Request,
    *,
    progress: Progress | None = None,
) -> Selection:
    """The class that serves a request, and what describes it.

    Args:
        source: what `resolve_source` gave.
        progress: called with the bytes received.

    Raises:
        SourceError: a single file cannot be identified, or its configuration cannot be read.
        OptionError: as `Selection.check_request`.
    """
    found = complete_source(source, progress=progress)
    chosen = choose_class(found.pipeline_class, request)
    found = dataclasses.replace(found, pipeline_class=chosen)
    configs = read_configs(found.described)
    known = {name: configs[name] for name in found.components if name in configs}
    selection = Selection(found, known)
    selection.check_request(request)
    return selection
