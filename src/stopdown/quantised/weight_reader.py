"""Weight files with codes and scales: safetensors in any program's layout, and GGUF.

**Catches** what `headers` and `gguf_files` catch: files that are cut off, padded or of another format.
**Does not catch** values: `file_values` looks at those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stopdown.quantised import gguf_files
from stopdown.quantised.quantised_weights import (
    MARKS,
    QuantisedWeight,
    find_quantised_weights,
    read_methods,
    spread_scale,
)
from stopdown.sources.headers import StoredTensor, read_header, read_metadata
from stopdown.sources.weight_files import (
    FileWeight,
    WeightFile,
    describe_plain,
    get_tensor,
    iterate_rows,
)


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
        tensors, metadata, {name: bytes(get_tensor(path, name).numpy()) for name in marks}
    )
    quantised = find_quantised_weights(tensors, methods)
    parts = {part for x in quantised for part in (x.codes, x.scale, *x.others, x.input_scale)}
    by_codes = {weight.codes: weight for weight in quantised}
    weights = []
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
        if name in by_codes:
            weights.append(_describe_quantised(path, tensors, by_codes[name]))
        elif name not in parts and not _is_mark(name):
            weights.append(describe_plain(path, name, entry))
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
        partial(get_tensor, path, weight.scale) if weight.scale else None,
        is_scaled=True,
        quantised=weight,
    )


def _read_quantised(path: Path, weight: QuantisedWeight) -> Iterator[torch.Tensor]:
    """Values of a weight; of one whose scales are arranged otherwise, nothing."""
    codes, divisor = get_tensor(path, weight.codes), weight.divisor
    scale = get_tensor(path, weight.scale) if weight.scale else torch.ones(())
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
