"""Weight files of any program as one list of weights.

A weight knows how it is stored, where its bytes lie, and gives its values in fp32 piece by piece, so that
no more than some megabytes are in memory. Nothing is known of a model: names are those of the file.
Quantised files and GGUF are read by the package `quantised`, and refused without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stopdown.errors import ScalingError
from stopdown.extensions import find_offer, require_offer
from stopdown.number_formats import FORMATS
from stopdown.sources.headers import StoredTensor, read_header, read_metadata


@dataclass(frozen=True)
class FileWeight:
    """One weight of a file.

    Attributes:
        stored: how: `bf16`, `scaled fp8`, `GGUF Q8_0`.
        read: gives its values in fp32 piece by piece; nothing where they cannot be unpacked.
        read_scales: gives its scales; None where it has none.
        quantised: the tensors that it is made of in a safetensors file, a `QuantisedWeight`; None for one
            that is one tensor.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    size_bytes: int
    read: Callable[[], Iterator[torch.Tensor]]
    read_scales: Callable[[], torch.Tensor] | None = None
    is_scaled: bool = False
    quantised: Any = None

    def load(self) -> torch.Tensor:
        pieces = list(self.read())
        if not pieces:
            raise ScalingError(
                f"The values of {self.name} cannot be unpacked: it is stored as {self.stored}.",
                remedy="Use scaled fp8, int8, GGUF, or weights of 16 bits.",
            )
        return torch.cat([x.reshape(-1) for x in pieces]).reshape(self.shape)


@dataclass(frozen=True)
class WeightFile:
    """A file as a list of weights, in the order of their bytes.

    Attributes:
        kind: `safetensors`, or `GGUF` with its architecture.
    """

    path: Path
    kind: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[FileWeight, ...] = ()

    @property
    def is_quantised(self) -> bool:
        """Whether a weight of it is codes and scales; GGUF is taken as such, whatever its types are."""
        return self.kind != "safetensors" or any(weight.is_scaled for weight in self.weights)


def read_shapes(path: Path) -> dict[str, StoredTensor]:
    """The weights of a file by name; those that are codes and scales stand as one in fp32 each."""
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
    """The weights of a file as stored; those that are codes and scales in fp32."""
    file = open_weight_file(path)
    if not file.is_quantised:
        from safetensors.torch import load_file

        return load_file(path)
    return {weight.name: weight.load() for weight in file.weights}


def open_weight_file(path: Path) -> WeightFile:
    if (opened := find_offer("open_weight_file")) is not None:
        found: WeightFile = opened(path)
        return found
    is_gguf = path.suffix.lower() == ".gguf"
    tensors = {} if is_gguf else read_header(path)
    if is_gguf or any(x.dtype in _CODES and len(x.shape) > 1 for x in tensors.values()):
        require_offer("open_weight_file", f"{path} has quantised weights")
    weights = [describe_plain(path, name, entry) for name, entry in tensors.items()]
    return WeightFile(path, "safetensors", read_metadata(path), tuple(weights))


_CODES = ("fp8-e4m3", "fp8-e5m2", "int8", "uint8")
"""dtypes of what may be codes: values only with scales, which a plain reader does not know."""


def describe_plain(path: Path, name: str, entry: StoredTensor) -> FileWeight:
    """Return a weight that is one tensor of a safetensors file."""
    is_known = entry.dtype in FORMATS
    read: Any = partial(_read_plain, path, name) if is_known else partial(iter, ())
    return FileWeight(name, entry.shape, entry.dtype, entry.size_bytes, read)


def get_tensor(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return file.get_tensor(name)


def _read_plain(path: Path, name: str) -> Iterator[torch.Tensor]:
    tensor = get_tensor(path, name)
    for rows in iterate_rows(tensor) if tensor.dim() else (...,):
        yield tensor[rows].float()


def iterate_rows(codes: torch.Tensor) -> Iterator[slice]:
    """Slices of rows with 4 M values at most."""
    rows = max(1, 2**22 // max(1, codes[:1].numel()))
    for start in range(0, len(codes), rows):
        yield slice(start, min(start + rows, len(codes)))
