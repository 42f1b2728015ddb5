"""Uniform access to the weights in a file of any program, including quantised ones and GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stopdown.sources.file_weights import FileWeight
from stopdown.sources.gguf_files import list_blocks, open_gguf, read_texts
from stopdown.sources.headers import StoredTensor, read_header, read_metadata
from stopdown.sources.quantised_weights import list_weights


@dataclass(frozen=True)
class WeightFile:
    """A weight file and its weights, in the order of their offsets.

    Attributes:
        kind: `safetensors`, or `GGUF` with its architecture.
        metadata: text entries of the file's metadata.
    """

    path: Path
    kind: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[FileWeight, ...] = ()

    @property
    def is_quantised(self) -> bool:
        """Whether a weight is stored as codes and scales; GGUF files always count as quantised."""
        return self.kind != "safetensors" or any(weight.is_scaled for weight in self.weights)


def read_shapes(path: Path) -> dict[str, StoredTensor]:
    """Read the dtypes and shapes of a file's weights by name; a quantised weight counts as one in fp32."""
    file = open_weight_file(path)
    if not file.is_quantised:
        return read_header(path)
    return {
        weight.name: StoredTensor(
            "fp32" if weight.is_scaled else weight.stored, weight.shape, weight.size_bytes
        )
        for weight in file.weights
    }


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Load all weights of a file by name: as stored, or dequantised to fp32."""
    file = open_weight_file(path)
    if not file.is_quantised:
        from safetensors.torch import load_file

        return load_file(path)
    return {weight.name: weight.load() for weight in file.weights}


def open_weight_file(path: Path) -> WeightFile:
    """Open a safetensors or GGUF file; the values of its weights are read later."""
    if path.suffix.lower() == ".gguf":
        reader = open_gguf(path)
        texts = read_texts(reader)
        kind = f"GGUF {texts.get('general.architecture', '')}".strip()
        return WeightFile(path, kind, texts, tuple(list_blocks(reader)))
    metadata = read_metadata(path)
    return WeightFile(path, "safetensors", metadata, tuple(list_weights(path, metadata)))
