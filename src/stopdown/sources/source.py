"""A model that was found: its components and its weight files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from stopdown.sources import hub
from stopdown.sources.headers import (
    WEIGHT_FILES,
    find_weights,
)

OPTIONAL_COMPONENTS = ("safety_checker", "feature_extractor", "image_encoder")
"""Components that a pipeline may be published without, although its index names them."""


@dataclass(frozen=True)
class Part:
    """A component that a single file holds without the rest of its pipeline.

    Attributes:
        prefix: what the names of its tensors begin with in the file; "" where nothing is in front.
        seen_as: what Diffusers' converter of this class wants there instead.
        laid_out: `single_file_names` has its names, so no converter is asked.
    """

    name: str
    prefix: str = ""
    seen_as: str = ""
    laid_out: bool = False


@dataclass(frozen=True)
class Source:
    """A model that was found, as its `model_index.json` describes it.

    Attributes:
        name: as it was asked for.
        path: folder, or single file.
        kind: where it comes from; `component` where it describes a file with one component, by the folder
            of that component alone.
        pipeline_class: name of its Diffusers class; empty for a single file.
        components: name → (library, class); empty for a single file.
        revision: commit on the Hub; empty otherwise.
        config: of a single file: Diffusers folder or Hub id with its configurations; None for the one
            that Diffusers knows for this kind of checkpoint.
        variant: of the weights, where a component has it: `fp16`; "" for those without one.
        loras: files or Hub ids with their weights, put on when it is loaded.
        scheduler: class that takes the place of its own; "" for its own.
        parts: of a single file without the whole pipeline: what it holds, once `complete_source` looked.
    """

    name: str
    path: Path
    kind: Literal["bundled", "folder", "hub", "file", "component"]
    pipeline_class: str = ""
    components: dict[str, tuple[str, str]] = field(default_factory=dict)
    revision: str = ""
    config: str | Path | None = None
    variant: str = ""
    loras: tuple[tuple[str, float], ...] = ()
    scheduler: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def described(self) -> Path:
        """Folder of its configurations; of a single file, once `complete_source` has found it."""
        return Path(self.config) if self.kind == "file" and self.config else self.path

    def list_folders(self, name: str) -> list[Path]:
        """List the folders of a component: `controlnet_1` is a further one of `controlnet`."""
        found, number = [self.described / name], 1
        while (key := f"{name}_{number}") not in self.components and (
            self.described / key
        ).is_dir():
            found.append(self.described / key)
            number += 1
        return found

    def has_weights(self, name: str) -> bool:
        """Return whether a component is a model, and not a tokenizer, processor or scheduler.

        This follows from its library and class, and for other classes from the content of its folder.
        """
        library, class_name = self.components[name]
        endings = _SIDE_OF_TRANSFORMERS if library == "transformers" else _SIDE
        if any(map(class_name.endswith, endings)):
            return False
        folder = self.described / name
        has_model = not folder.is_dir() or any(map(_is_of_model, os.listdir(folder)))
        return has_model or not any((folder / x).exists() for x in _SIDE_CONFIGURATIONS)


_SIDE = ("Scheduler", "Processor", "Guidance")
_SIDE_OF_TRANSFORMERS = (
    *("Tokenizer", "TokenizerFast", "Processor", "Extractor", "ImageProcessorFast"),
    *("ImageProcessorPil", "Backend"),  # transformers 5 names generic tokenizers by what runs them
)
"""Endings of classes without weights. A `Tokenizer` of Diffusers is a model that turns sound into codes."""

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "spiece.model")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SIDE_CONFIGURATIONS = (*TOKENIZER_FILES, *PROCESSOR_FILES, "scheduler_config.json")


def _is_of_model(file_name: str) -> bool:
    """Check whether a file belongs to a model: its configuration, weights or their index."""
    is_weights = file_name.endswith((*WEIGHT_FILES, *hub.PICKLES, ".index.json"))
    return is_weights or file_name == "config.json"


PYTHON_NAME = re.compile(r"[A-Za-z]\w{,99}", re.ASCII)
"""Components and classes are Python's names; a system's names of files end at 255 bytes."""


def list_weight_files(source: Source) -> dict[str, list[Path]]:
    """List the safetensors files of each component with weights; a single file is `checkpoint`."""
    if source.kind == "file":
        return {"checkpoint": [source.path]}
    return {
        name: [
            path
            for folder in source.list_folders(name)
            for path in find_weights(folder, source.variant)[1]
        ]
        for name in source.components
        if source.has_weights(name) and (source.path / name).is_dir()
    }


def narrow_source(source: Source, names: Collection[str]) -> Source:
    """Return the source with only these components, or all of them without names."""
    if not names:
        return source
    return replace(source, components={name: source.components[name] for name in names})
