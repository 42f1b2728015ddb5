"""`Source`: a model that was found, with its components and weight files."""

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
"""Components that may be missing although the pipeline's index names them."""


@dataclass(frozen=True)
class Part:
    """A component in a single file that lacks the rest of its pipeline.

    Attributes:
        name: name of the component.
        prefix: prefix of its tensor names in the file; "" for none.
        seen_as: prefix that Diffusers' converter for this class expects instead.
        laid_out: whether `single_file_names` has its names, so that no converter is needed.
    """

    name: str
    prefix: str = ""
    seen_as: str = ""
    laid_out: bool = False


@dataclass(frozen=True)
class Source:
    """A model that was found, as its `model_index.json` describes it.

    Attributes:
        name: name that the user gave.
        path: folder, or single file.
        kind: type of source; `component` for the folder of a single component.
        pipeline_class: name of its Diffusers class; empty for a single file.
        components: (library, class) by component; empty for a single file.
        revision: commit on the Hub; empty otherwise.
        config: for a single file, a Diffusers folder or Hub id with its configurations; None for the one
            that Diffusers knows for this kind of checkpoint.
        variant: variant of the weights to use if a component has it: `fp16`; "" for none.
        loras: LoRA files or Hub ids with their weights, applied when the model is loaded.
        scheduler: class used instead of the model's own scheduler; "" for its own.
        parts: components in a single file without the whole pipeline, filled in by `complete_source`.
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
        """Folder of the configurations; for a single file only after `complete_source` has found it."""
        return Path(self.config) if self.kind == "file" and self.config else self.path

    def list_folders(self, name: str) -> list[Path]:
        """List the folders of a component, such as `controlnet` and `controlnet_1` for two ControlNets."""
        found, number = [self.described / name], 1
        while (key := f"{name}_{number}") not in self.components and (
            self.described / key
        ).is_dir():
            found.append(self.described / key)
            number += 1
        return found

    def has_weights(self, name: str) -> bool:
        """Return whether a component is a model, and not a tokenizer, processor or scheduler.

        The name of its class decides, or else the files in its folder.
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
"""Endings of classes without weights. In Diffusers, a `Tokenizer` is a model that encodes sound."""

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "spiece.model")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SIDE_CONFIGURATIONS = (*TOKENIZER_FILES, *PROCESSOR_FILES, "scheduler_config.json")


def _is_of_model(file_name: str) -> bool:
    """Return whether a file is a model's configuration, weights or index of shards."""
    is_weights = file_name.endswith((*WEIGHT_FILES, *hub.PICKLES, ".index.json"))
    return is_weights or file_name == "config.json"


PYTHON_NAME = re.compile(r"[A-Za-z]\w{,99}", re.ASCII)
"""Valid name of a component or class: a Python identifier of at most 100 characters."""


def list_weight_files(source: Source) -> dict[str, list[Path]]:
    """List the weight files of each component that has weights; a single file is listed as `checkpoint`."""
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
    """Return the source with only these components; unchanged if `names` is empty."""
    if not names:
        return source
    return replace(source, components={name: source.components[name] for name in names})
