"""One weight in a file: its storage format and size, and its values, read in fp32 piece by piece.

Only some megabytes are in memory at a time. Weights have the names in the file; nothing is known of the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stopdown.errors import ScalingError
from stopdown.number_formats import FORMATS
from stopdown.sources.headers import StoredTensor


@dataclass(frozen=True)
class FileWeight:
    """One weight of a file.

    Attributes:
        stored: storage format: `bf16`, `scaled fp8`, `GGUF Q8_0`.
        read: yields its values in fp32 piece by piece; yields nothing if they cannot be unpacked.
        read_scales: returns its scales; None if it has none.
        is_scaled: whether it is stored as codes and scales.
        quantised: names of its tensors in a safetensors file, as a `QuantisedWeight`; None if it is stored
            as one tensor.
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
                f"The values of {self.name} can't be unpacked: it is stored as {self.stored}.",
                remedy="Use scaled fp8, int8, GGUF, or weights of 16 bits.",
            )
        return torch.cat([x.reshape(-1) for x in pieces]).reshape(self.shape)


def describe_plain(path: Path, name: str, entry: StoredTensor) -> FileWeight:
    """Return the `FileWeight` of a weight stored as one tensor of a safetensors file."""
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
    """Yield slices of rows, each of at most 4 M values or one row."""
    rows = max(1, 2**22 // max(1, codes[:1].numel()))
    for start in range(0, len(codes), rows):
        yield slice(start, min(start + rows, len(codes)))
