"""Reading of safetensors headers without torch: names, dtypes, shapes and sizes of tensors.

A file begins with eight bytes (the header's length, little-endian), followed by the header in JSON and the
values. Only the header is read. Its offsets must fill the rest of the file exactly. A truncated file is
therefore detected without reading the values.

**Catches** truncated, padded, empty and foreign files, overlapping or missing ranges, sizes that do not fit
the shapes, missing shards, and shards without a tensor of the index.
**Does not catch** wrong values, as the format has no checksums.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

from stopdown.errors import SourceError
from stopdown.files.json_files import (
    UnreadableError,
    open_regular_file,
    parse_json,
    read_json_table,
)
from stopdown.number_formats import find_format

LARGEST_HEADER_BYTES = 32 * 2**20
"""Size limit of a header; safetensors allows 100 MB, and the largest of a published model has 5 MB."""

RESCALED_ENTRY = "stopdown.rescaled"
"""Metadata key that marks weights multiplied by powers of two; its value describes this to users."""

EXPONENTS_ENTRY = "stopdown.exponents"
"""Metadata key of those exponents, as JSON by fold name (`fold_names`)."""

LONGEST_NAME = 255
"""Maximum length of file names in bytes."""

WEIGHT_FILES = (".safetensors", ".gguf")
"""Suffixes of single files that can be a model's source."""

OTHER_DTYPES = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F4": ("F4", 4),
    "F6_E2M3": ("F6_E2M3", 6),
    "F6_E3M2": ("F6_E3M2", 6),
    "F8_E8M0": ("F8_E8M0", 8),
    "F8_E4M3FNUZ": ("F8_E4M3FNUZ", 8),
    "F8_E5M2FNUZ": ("F8_E5M2FNUZ", 8),
    "C64": ("complex64", 64),
}
"""Stopdown's name and the bits per value of header dtypes that `number_formats` lacks.

Together with `number_formats` these are all dtypes of safetensors 0.8.
"""

_DTYPE = re.compile(r"[A-Z][A-Z0-9_]{0,15}", re.ASCII)
_SHARD = re.compile(r"-\d{5}-of-\d{5}")


class DamagedFileError(ValueError):
    """Raised for a damaged or truncated file; the message states what was found."""


@contextmanager
def refusing_damage(owner: str, remedy: str = "Download it again.") -> Iterator[None]:
    """Convert errors of unreadable files in the block to a `SourceError`.

    Args:
        owner: beginning of the message, such as `The LoRA a.safetensors is`.
    """
    try:
        yield
    except (DamagedFileError, OSError) as error:
        raise SourceError(f"{owner} damaged or cut off: {error}.", remedy=remedy) from error


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a safetensors file.

    Attributes:
        dtype: `fp16`, `bf16`, `fp32`, `int64`…, or the header's name if Stopdown has none.
        start: offset of the values after the header, in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    start: int = field(default=0, compare=False)


def read_header(path: Path) -> dict[str, StoredTensor]:
    return dict(_parse_tensors(path, *_sign(path)))


@functools.lru_cache(maxsize=16)
def _parse_tensors(path: Path, *signs: int) -> dict[str, StoredTensor]:
    header, value_bytes = _read_json(path, *signs)
    tensors: dict[str, StoredTensor] = {}
    ranges = []
    for name, entry in header.items():
        if name == "__metadata__":
            _check_metadata(entry)
            continue
        tensors[name], start, end = _parse_entry(name, entry)
        ranges.append((start, end))
    _check_ranges(ranges, value_bytes)
    return tensors


def read_header_bytes(path: Path) -> bytes:
    """Read the raw header of a safetensors file, including its 8-byte length."""
    with open_regular_file(path) as file:
        prefix = file.read(8)
        return prefix + file.read(min(int.from_bytes(prefix, "little"), LARGEST_HEADER_BYTES))


def encode_header(header: Mapping[str, Any]) -> bytes:
    """Encode a header as the first bytes of a file, including its 8-byte length and padding."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_metadata(path: Path) -> dict[str, str]:
    metadata = _read_json(path, *_sign(path))[0].get("__metadata__", {})
    _check_metadata(metadata)
    return dict(metadata)


def read_rescaled(*paths: Path) -> str:
    """Return the statement in these files' metadata that their weights are rescaled; "" if there is none.

    The first file with such a statement (`RESCALED_ENTRY`) counts.
    """
    for path in paths:
        with contextlib.suppress(DamagedFileError, OSError):
            if said := read_metadata(path).get(RESCALED_ENTRY, ""):
                return said
    return ""


def copy_with_metadata(source: Path, target: Path, metadata: Mapping[str, str]) -> None:
    """Copy a safetensors file with entries added to its metadata; the values are unchanged."""
    raw = read_header_bytes(source)
    header = json.loads(raw[8:])
    header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
    with source.open("rb") as old, target.open("wb") as new:
        old.seek(len(raw))
        new.write(encode_header(header))
        shutil.copyfileobj(old, new, 2**24)


def read_samples(path: Path) -> bytes:
    """Read a weight file's samples for a fingerprint: 16 blocks of 4 KiB, evenly spread from beginning to
    end, and 64 bytes from the middle of each tensor of a safetensors file.

    The blocks alone would miss a change of single tensors, as fine-tuning of one kind of layer makes it.
    """
    last = max(path.stat().st_size - 4096, 0)
    places = [(last * number // 15, 4096) for number in range(16)]
    with contextlib.suppress(DamagedFileError):  # GGUF has another header
        begin = len(read_header_bytes(path))
        tensors = read_header(path).values()
        places += sorted((begin + x.start + x.size_bytes // 2, 64) for x in tensors)
    with open_regular_file(path) as file:
        samples = []
        for start, size in places:
            file.seek(start)
            samples.append(file.read(size))
    return b"".join(samples)


def _sign(path: Path) -> tuple[int, ...]:
    """Return inode, size and modification time of a file: the cache key of its parsed header."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return ()  # what opens it says why
    return state.st_ino, state.st_size, state.st_mtime_ns


@functools.lru_cache(maxsize=16)
def _read_json(path: Path, *_: int) -> tuple[dict[str, Any], int]:
    try:
        with open_regular_file(path) as file:
            content, size = _read_header_text(file)
        header = parse_json(content)
    except UnreadableError as error:
        raise DamagedFileError(f"its header can't be read as JSON: {error}") from error
    if not isinstance(header, dict):
        raise DamagedFileError("its header isn't a table of tensors")
    return header, size - 8 - len(content)


def _read_header_text(file: BinaryIO) -> tuple[bytes, int]:
    """Read the header's JSON, and return it with the size of the whole file in bytes."""
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise DamagedFileError(f"it has {size} bytes, and a safetensors file has at least 8")
    length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_HEADER_BYTES:
        raise DamagedFileError("it doesn't begin with the header of a safetensors file")
    if length > size - 8:
        raise DamagedFileError(f"its header needs {length} bytes and {size - 8} are there")
    return file.read(length), size


def _parse_entry(name: str, entry: Any) -> tuple[StoredTensor, int, int]:
    if not _is_entry(entry):
        raise DamagedFileError(f"its header doesn't describe the tensor {name[:200]!r}")
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    our_name, value_bits = _name_dtype(name, dtype)
    needed = Fraction(math.prod(shape) * value_bits, 8)
    if end >= start and end - start != needed:
        raise DamagedFileError(
            f"the tensor {name[:200]!r} takes {end - start} bytes and its shape needs {needed}"
        )
    return StoredTensor(our_name, shape, end - start, start), start, end


def _is_entry(entry: Any) -> bool:
    """Return whether a header entry of a tensor is well-formed: a dtype, a shape and two offsets."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    is_short = len(shape) <= 64 and _DTYPE.fullmatch(entry["dtype"]) is not None
    return is_short and all(type(x) is int and 0 <= x < 2**63 for x in (*shape, *offsets))


def _check_metadata(entry: Any) -> None:
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
        raise DamagedFileError("its metadata isn't a table of texts")


def _name_dtype(tensor: str, dtype: str) -> tuple[str, int]:
    """Return Stopdown's name of a header's dtype, and the size of one value in bits."""
    if dtype in OTHER_DTYPES:
        return OTHER_DTYPES[dtype]
    if found := find_format(dtype):
        return found.name, 8 * found.size_bytes
    raise DamagedFileError(
        f"the tensor {tensor[:200]!r} has the dtype {dtype!r}, which safetensors doesn't read"
    )


def _check_ranges(ranges: list[tuple[int, int]], value_bytes: int) -> None:
    position = 0
    for start, end in sorted(ranges):
        if start != position or end < start:
            raise DamagedFileError("its tensors overlap or leave a gap")
        position = end
    if position != value_bytes:
        raise DamagedFileError(
            f"its values should take {position} bytes and {value_bytes} are there"
        )


def find_weights(folder: Path, wanted: str = "") -> tuple[str, list[Path]]:
    """Choose the variant, and with it the safetensors files, to load from a component's folder.

    It is the wanted variant if there is one (`model.fp16.safetensors` has the variant `fp16`); else none
    (`model.safetensors`, `model-00001-of-00002.safetensors`), or the first variant by name.
    """
    names = [path.name for path in folder.glob("*.safetensors")]
    variant, chosen = choose_weights(names, wanted)
    return variant, [folder / name for name in chosen]


def choose_weights(names: list[str], wanted: str = "") -> tuple[str, list[str]]:
    """Choose a variant and its files from file names, by the rules of `find_weights`."""
    by_variant: dict[str, list[str]] = {}
    for name in sorted(names):
        stem = _SHARD.sub("", name.removesuffix(".safetensors"))
        base, _, variant = stem.partition(".")
        if base in ("model", "diffusion_pytorch_model", "pytorch_model"):
            by_variant.setdefault(variant, []).append(name)
    if not by_variant:
        return "", []
    variant = wanted if wanted in by_variant else min(by_variant)
    return variant, by_variant[variant]


def read_shard_index(index: Path) -> dict[str, str]:
    """Read an index of shards (`*.safetensors.index.json`): return the file name of each tensor.

    Raises:
        DamagedFileError: it is not an index, or names a file that is not a shard beside it.
    """
    try:
        weight_map = read_json_table(index)["weight_map"]
        if not isinstance(weight_map, dict):
            raise TypeError
    except UnreadableError as error:
        raise DamagedFileError(f"it can't be read as an index of shards: {error}") from error
    except (KeyError, TypeError) as error:
        raise DamagedFileError("it can't be read as an index of shards") from error
    names = set(map(str, weight_map.values()))
    beside = [x for x in names if not {"/", "\\"} & {*x} and len(x.encode()) <= LONGEST_NAME]
    plain = set(choose_weights(beside)[1])
    for shard in weight_map.values():
        if not isinstance(shard, str) or shard not in plain:
            raise DamagedFileError(
                f"it names the file {str(shard)[:100]!r}, which is no shard's name"
            )
    return weight_map


def find_missing_shards(index: Path, shards: Mapping[str, str]) -> list[str]:
    """List the shards in an index that are missing from its folder, and the tensors missing from shards."""
    missing = []
    for shard in sorted(set(shards.values())):
        path = index.parent / shard
        missing += _find_missing_tensors(path, shards) if path.is_file() else [shard]
    return missing


def _find_missing_tensors(shard: Path, weight_map: Mapping[str, str]) -> list[str]:
    try:
        present = read_header(shard)
    except (DamagedFileError, OSError):
        return []  # reported for the file itself
    return [
        f"the tensor {name!r} of {shard.name}"
        for name, file in weight_map.items()
        if file == shard.name and name not in present
    ]
