"""Which pipeline class serves a request from a source, known before anything is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stopdown.pipelines.default_sizes import check_sizes, find_grid, read_configs
from stopdown.pipelines.hub import Progress
from stopdown.pipelines.loader import complete_source, find_class
from stopdown.pipelines.requests import Request, choose_class, name_arguments
from stopdown.pipelines.sources import Source


@dataclass(frozen=True)
class Selection:
    """A source with the class that serves a request.

    Attributes:
        source: its pipeline class is the one that was chosen.
        folder: describes it; for a single file another one's.
        configs: of its components, by name.
    """

    source: Source
    folder: Path
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


def select_pipeline(
    source: Source,
    request: Request,
    *,
    config: str | Path | None = None,
    progress: Progress | None = None,
) -> Selection:
    """The class that serves a request, and what describes it.

    Args:
        source: what `resolve_source` gave.
        config: for a single file, a Diffusers folder or Hub id with its configs.
        progress: called with the bytes received.

    Raises:
        SourceError: a single file cannot be identified, or its configuration cannot be read.
        OptionError: as `Selection.check_request`.
    """
    found, folder = complete_source(source, config=config, progress=progress)
    chosen = choose_class(found.pipeline_class, request)
    found = dataclasses.replace(found, pipeline_class=chosen)
    configs = read_configs(folder)
    known = {name: configs[name] for name in found.components if name in configs}
    selection = Selection(found, folder, known)
    selection.check_request(request)
    return selection
