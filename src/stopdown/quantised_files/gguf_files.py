"""GGUF files: what they hold, their values, and the scales of their blocks.

The `gguf` package reads the header and knows how each type is unpacked; here is where the fp16 scales
lie in a block, which it does not tell. A block's values are proportional to them, so a power of two is
folded in by multiplying them alone, as far as fp16 holds that.

Not covered: a type whose scales are spread over its block (IQ1_M): it has no entry here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stopdown.devices.environment import require_package
from stopdown.errors import ScalingError, take_one_line
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
"""Type → the bytes of a block at which its fp16 scales begin (ggml's `ggml-common.h`)."""

PLAIN = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64"}
"""Types that are no blocks → our name."""

_MOST_VALUES = 2**20


def require_gguf() -> Any:
    require_package("gguf", "gguf", "A GGUF file")
    import gguf

    return gguf


def open_gguf(path: Path, mode: str = "r") -> Any:
    """A reader over a GGUF file, whose values stay on disk.

    Args:
        mode: `r`, or `r+` to write through what it gives.
    """
    gguf = require_gguf()
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise DamagedFileError("it does not begin with the letters GGUF")
        return gguf.GGUFReader(path, mode)
    except DamagedFileError:
        raise
    except Exception as error:  # the reader says nothing of its own about what is cut off
        raise DamagedFileError(
            f"its header or a tensor is not whole ({take_one_line(error, 120)})"
        ) from error


def read_texts(reader: Any) -> dict[str, str]:
    """The texts among a file's metadata."""
    gguf = require_gguf()
    texts = {}
    for name, entry in reader.fields.items():
        if entry.types and entry.types[0] == gguf.GGUFValueType.STRING:
            texts[name] = bytes(entry.parts[entry.data[0]]).decode("utf-8", "replace")
    return texts


def unpack_rows(tensor: Any) -> Iterator[torch.Tensor]:
    """The values of a tensor in fp32, some rows at a time; nothing where the package cannot unpack it."""
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
    """The scales of a tensor's blocks, `[blocks, scales]` fp16; no blocks for a type without an entry."""
    gguf = require_gguf()
    _, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    blocks = tensor.data.reshape(tensor.data.size // size, size)
    parts = [
        torch.from_numpy(blocks[:, at : at + 2].copy()).view(torch.float16)
        for at in SCALES.get(tensor.tensor_type.name, ())
    ]
    return torch.cat(parts, 1) if parts else torch.empty(0, 1, dtype=torch.float16)


def copy_with_texts(source: Path, target: Path, texts: Mapping[str, str]) -> None:
    """Write a file again with texts more in its metadata, and every other byte as it was."""
    reader = open_gguf(source)
    with source.open("rb") as file:
        header = file.read(int(_find_end(reader)))
    entries = b"".join(
        _encode(name) + _STRING.to_bytes(4, "little") + _encode(text)
        for name, text in texts.items()
    )
    count = int.from_bytes(header[16:24], "little") + len(texts)
    header = header[:16] + count.to_bytes(8, "little") + entries + header[24:]
    with source.open("rb") as old, target.open("wb") as new:
        new.write(header + bytes(-len(header) % reader.alignment))
        old.seek(reader.data_offset)
        shutil.copyfileobj(old, new, 2**22)


_STRING = 8
"""The type of a text in metadata."""


def _encode(text: str) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode()


def _find_end(reader: Any) -> int:
    """Where the header ends, padding aside: behind the description of the last tensor."""
    fields = [tensor.field for tensor in reader.tensors] or list(reader.fields.values())
    return max(entry.offset + sum(part.nbytes for part in entry.parts) for entry in fields)


def fold_tensor(tensor: Any, rows: torch.Tensor) -> None:
    """Multiply the rows of a tensor by powers of two in place.

    Args:
        tensor: of a reader in the mode `r+`.
        rows: exponents, `[R]`, or one for all.
    """
    kind, data = tensor.tensor_type.name, tensor.data
    if kind not in PLAIN and kind not in SCALES:
        raise ScalingError(f"{tensor.name} is stored as {kind}, whose scales are not folded.")
    _, size = require_gguf().GGML_QUANT_SIZES[tensor.tensor_type]
    parts = SCALES.get(kind, (0,))
    width = {"F32": 4, "F64": 8}.get(kind, 2)
    dtype = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16}
    stored = data.view("uint8").reshape(data.shape[0], -1, size)
    for at in parts:
        raw = torch.from_numpy(stored[:, :, at : at + width].copy())
        scales = raw.view(dtype.get(kind, torch.float16))
        folded = torch.ldexp(scales.double(), rows.reshape(-1, 1, 1)).to(scales.dtype)
        stored[:, :, at : at + width] = folded.view(torch.uint8).numpy()
