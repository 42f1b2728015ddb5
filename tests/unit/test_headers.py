"""Headers of safetensors files: what is read here is what the safetensors library reads."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from stopdown.pipelines.headers import DamagedFileError, read_header

NUMBERS = st.sampled_from(
    [0, 1, 2, 4, 8, 12, 16, -1, 2**32, 2**62, 2**63, 2**64, 1.0, "4", None, True]
)
DTYPES = st.sampled_from(
    ["F32", "F16", "BF16", "I8", "U8", "BOOL", "I64", "F8_E4M3", "f32", "", "F33", 4]
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": DTYPES,
        "shape": st.lists(NUMBERS, max_size=3) | st.none(),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
    }
)
PLAIN = st.builds(
    lambda start, count: {
        "dtype": "F32",
        "shape": [count],
        "data_offsets": [start, start + 4 * count],
    },
    st.sampled_from([0, 0, 0, 4, 8]),
    st.sampled_from([0, 1, 2]),
)
METADATA = st.none() | st.dictionaries(st.sampled_from("ab"), st.sampled_from(["x", "", 1, None]))
HEADERS = st.tuples(
    st.dictionaries(st.sampled_from(["a", "b", "", "\u00e9"]), PLAIN | PLAIN | ENTRIES, max_size=3),
    METADATA,
).map(lambda parts: parts[0] if parts[1] is None else {**parts[0], "__metadata__": parts[1]})
TEXTS = (
    HEADERS.map(json.dumps)
    | HEADERS.map(json.dumps).map(lambda text: text + "   ")
    | HEADERS.map(json.dumps).map(lambda text: " " + text)
    | HEADERS.map(json.dumps).map(lambda text: "\ufeff" + text)
    | HEADERS.map(lambda header: json.dumps(header)[:-1])
    | st.text('[]{}",:0129.eE-', max_size=60)
)


def read_theirs(path: Path) -> dict[str, Any] | None:
    """Names and shapes as the library reads them; None for a file that it refuses."""
    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        return None


def read_ours(path: Path) -> dict[str, Any] | None:
    """The same by us, which has one exception."""
    try:
        return {name: entry.shape for name, entry in read_header(path).items()}
    except DamagedFileError:
        return None


def compare_readers(text: str, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        content = text.encode()
        path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(size))
        ours, theirs = read_ours(path), read_theirs(path)
    if ours is not None:
        assert ours == theirs


@settings(max_examples=600, deadline=None)
@given(TEXTS, st.sampled_from([0, 4, 8, 12, 16]))
def test_what_we_read_the_library_reads_alike(text: str, size: int) -> None:
    """Nothing passes here that the library refuses, and what both read has the same names and shapes."""
    compare_readers(text, size)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(TEXTS, st.sampled_from([0, 4, 8, 12, 16]))
def test_ten_thousand_headers(text: str, size: int) -> None:
    """The same, ten thousand times."""
    compare_readers(text, size)
