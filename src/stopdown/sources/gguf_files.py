"""Reading of GGUF files: metadata, weights, and the scales of quantisation blocks.

The `gguf` package reads the header and unpacks most types. It does not tell where the fp16 scales are in a
block, so `SCALES` lists that.

Not covered: a type whose scales are spread over its block (IQ1_M), which has no entry here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stopdown.devices.environment import require_package
from stopdown.errors import take_one_line
from stopdown.sources.file_weights import FileWeight
from stopdown.sources.headers import DamagedFileError

SCALES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Byte offsets of the fp16 scales in a block, by quantisation type (ggml's `ggml-common.h`)."""

PLAIN = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64"}
"""Stopdown's names of GGUF types that are not quantised in blocks."""

_MOST_VALUES = 2**20


def require_gguf() -> Any:
    require_package("gguf", "gguf", "A GGUF file")
    import gguf

    return gguf


def open_gguf(path: Path) -> Any:
    """Open a GGUF file with a memory-mapped reader.

    Raises:
        DamagedFileError: the file is not GGUF, or is cut off.
    """
    gguf = require_gguf()
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise DamagedFileError("it doesn't begin with the letters GGUF")
        return gguf.GGUFReader(path)
    except DamagedFileError:
        raise
    except Exception as error:  # the reader says nothing of its own about what is cut off
        raise DamagedFileError(
            f"its header or a tensor isn't whole ({take_one_line(error, 120)})"
        ) from error


def read_texts(reader: Any) -> dict[str, str]:
    """Return the text fields of a file's metadata."""
    gguf = require_gguf()
    texts = {}
    for name, entry in reader.fields.items():
        if entry.types and entry.types[0] == gguf.GGUFValueType.STRING:
            texts[name] = bytes(entry.parts[entry.data[0]]).decode("utf-8", "replace")
    return texts


def unpack_rows(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor's values in fp32, some rows at a time; nothing if gguf cannot unpack its type."""
    gguf = require_gguf()
    name, data = tensor.tensor_type.name, tensor.data
    if not data.size:
        return
    rows = data.reshape(-1, data.shape[-1]) if data.ndim else data.reshape(1, 1)
    step = max(1, _MOST_VALUES // max(1, rows.shape[-1]))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if name not in PLAIN or name == "BF16":
            try:
                part = gguf.quants.dequantize(part, tensor.tensor_type)
            except NotImplementedError:
                return
        yield torch.from_numpy(part.astype("float32"))


def read_scales(tensor: Any) -> torch.Tensor:
    """Read the scales of a quantised tensor's blocks, `[blocks, scales]` fp16.

    The result is empty for quantisation types that `SCALES` doesn't list.
    """
    gguf = require_gguf()
    _, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    blocks = tensor.data.reshape(tensor.data.size // size, size)
    parts = [
        torch.from_numpy(blocks[:, at : at + 2].copy()).view(torch.float16)
        for at in SCALES.get(tensor.tensor_type.name, ())
    ]
    return torch.cat(parts, 1) if parts else torch.empty(0, 1, dtype=torch.float16)


def list_blocks(reader: Any) -> Iterator[FileWeight]:
    """Yield the weights of a GGUF file in the order of their offsets."""
    for tensor in sorted(reader.tensors, key=lambda x: x.data_offset):
        kind = tensor.tensor_type.name
        yield FileWeight(
            str(tensor.name),
            tuple(int(size) for size in reversed(tensor.shape)),
            PLAIN.get(kind, kind),
            int(tensor.n_bytes),
            partial(unpack_rows, tensor),
            partial(read_scales, tensor) if kind in SCALES else None,
            kind not in PLAIN,
        )
