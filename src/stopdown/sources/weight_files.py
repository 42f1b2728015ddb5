"""Weight files of any program as one list of weights: safetensors and GGUF, quantised or not.

A weight knows how it is stored, where its bytes lie, and gives its values in fp32 piece by piece, so that
no more than some megabytes are in memory. Nothing is known of a model: names are those of the file.

**Catches** what `headers` and `gguf_files` catch: files that are cut off, padded or of another format.
**Does not catch** values: `dtype_rules.file_values` looks at those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stopdown.errors import ScalingError
from stopdown.number_formats import FORMATS
from stopdown.sources import gguf_files
from stopdown.sources.headers import StoredTensor, read_header, read_metadata
from stopdown.sources.quantised_weights import (
    MARKS,
    QuantisedWeight,
    find_quantised_weights,
    iterate_rows,
    read_methods,
    spread_scale,
)


@dataclass(frozen=True)
class FileWeight:
    """One weight of a file.

    Attributes:
        name: as in the file.
        shape: of its values.
        stored: how: `bf16`, `scaled fp8`, `GGUF Q8_0`.
        size_bytes: its scales included.
        read: gives its values in fp32 piece by piece; nothing where they cannot be unpacked.
        read_scales: gives its scales; None where it has none.
        is_scaled: it is codes that need a scale.
        quantised: the tensors that it is made of in a safetensors file; None for one that is one tensor.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    size_bytes: int
    read: Callable[[], Iterator[torch.Tensor]]
    read_scales: Callable[[], torch.Tensor] | None = None
    is_scaled: bool = False
    quantised: QuantisedWeight | None = None

    def load(self) -> torch.Tensor:
        """All values, in fp32.

        Raises:
            ScalingError: they cannot be unpacked here.
        """
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
        path: of the file.
        kind: `safetensors`, or `GGUF` with its architecture.
        metadata: the texts that it says of itself.
        weights: all of them.
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
    """The weights of a file by name; those that are codes and scales stand as one in fp32 each.

    Raises:
        DamagedFileError: it is not whole.
    """
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
    """The weights of a file as stored; those that are codes and scales in fp32.

    Raises:
        ScalingError: one of them cannot be unpacked.
    """
    file = open_weight_file(path)
    if not file.is_quantised:
        from safetensors.torch import load_file

        return load_file(path)
    return {weight.name: weight.load() for weight in file.weights}


def open_weight_file(path: Path) -> WeightFile:
    """A file's weights; only its header is read.

    Raises:
        DamagedFileError: it is not whole.
        OptionError: it is a GGUF file, and the package that reads them is not installed.
        OSError: it cannot be read.
    """
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    tensors, metadata = read_header(path), read_metadata(path)
    marks = [name for name in tensors if name.rpartition(".")[2] == "comfy_quant"]
    methods = read_methods(
        tensors, metadata, {name: bytes(_get(path, name).numpy()) for name in marks}
    )
    quantised = find_quantised_weights(tensors, methods)
    parts = {part for x in quantised for part in (x.codes, x.scale, *x.others, x.input_scale)}
    by_codes = {weight.codes: weight for weight in quantised}
    weights = []
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
        if name in by_codes:
            weights.append(_describe_quantised(path, tensors, by_codes[name]))
        elif name not in parts and not _is_mark(name):
            is_known = entry.dtype in FORMATS
            read: Any = partial(_read_plain, path, name) if is_known else partial(iter, ())
            weights.append(FileWeight(name, entry.shape, entry.dtype, entry.size_bytes, read))
    return WeightFile(path, "safetensors", metadata, tuple(weights))


def _is_mark(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in MARKS or last.startswith("bitsandbytes__")


def _describe_quantised(
    path: Path, tensors: Mapping[str, StoredTensor], weight: QuantisedWeight
) -> FileWeight:
    parts = [x for x in (weight.codes, weight.scale, *weight.others) if x]
    return FileWeight(
        weight.name,
        tensors[weight.codes].shape,
        weight.layout,
        sum(tensors[part].size_bytes for part in parts),
        partial(_read_quantised, path, weight),
        partial(_get, path, weight.scale) if weight.scale else None,
        is_scaled=True,
        quantised=weight,
    )


def _get(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return file.get_tensor(name)


def _read_plain(path: Path, name: str) -> Iterator[torch.Tensor]:
    tensor = _get(path, name)
    for rows in iterate_rows(tensor) if tensor.dim() else (...,):
        yield tensor[rows].float()


def _read_quantised(path: Path, weight: QuantisedWeight) -> Iterator[torch.Tensor]:
    """Values of a weight; of one whose scales are arranged otherwise, nothing."""
    codes, divisor = _get(path, weight.codes), weight.divisor
    scale = _get(path, weight.scale) if weight.scale else torch.ones(())
    is_packed = codes.dtype == torch.uint8 or any("weight_scale" in x for x in weight.others)
    factor = None if is_packed or scale.element_size() < 2 else spread_scale(codes, scale)
    if factor is None:
        return
    for rows in iterate_rows(codes):
        yield codes[rows].float() * (factor[rows] if factor.dim() else factor).float() / divisor


def _open_gguf(path: Path) -> WeightFile:
    reader = gguf_files.open_gguf(path)
    texts = gguf_files.read_texts(reader)
    architecture = texts.get("general.architecture", "")
    weights = tuple(map(_describe_block, sorted(reader.tensors, key=lambda x: x.data_offset)))
    return WeightFile(path, f"GGUF {architecture}".strip(), texts, weights)


def _describe_block(tensor: Any) -> FileWeight:
    kind = tensor.tensor_type.name
    is_scaled = kind not in gguf_files.PLAIN
    return FileWeight(
        str(tensor.name),
        tuple(int(size) for size in reversed(tensor.shape)),
        gguf_files.PLAIN.get(kind, kind),
        int(tensor.n_bytes),
        partial(gguf_files.unpack_rows, tensor),
        partial(gguf_files.read_scales, tensor) if kind in gguf_files.SCALES else None,
        is_scaled,
    )
