"""Headers of safetensors files: what is read here is what the safetensors library reads."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from stopdown.sources.headers import (
    LARGEST_HEADER_BYTES,
    RESCALED_ENTRY,
    DamagedFileError,
    StoredTensor,
    choose_weights,
    encode_header,
    find_missing_shards,
    read_header,
    read_header_bytes,
    read_metadata,
    read_rescaled,
    read_shard_index,
)

NUMBERS = st.sampled_from(
    [0, 1, 2, 4, 8, 12, 16, -1, 2**32, 2**62, 2**63, 2**64, 1.0, "4", None, True]
)
DTYPES = st.sampled_from(
    ["F32", "F16", "BF16", "I8", "U8", "BOOL", "I64", "F8_E4M3", "F4", "f32", "", "F33", 4]
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


@pytest.mark.thorough
@settings(max_examples=600, deadline=None)
@given(TEXTS, st.sampled_from([0, 4, 8, 12, 16]))
def test_what_we_read_the_library_reads_alike(text: str, size: int) -> None:
    """Nothing passes here that the library refuses; what both read is the same."""
    compare_readers(text, size)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(TEXTS, st.sampled_from([0, 4, 8, 12, 16]))
def test_ten_thousand_headers(text: str, size: int) -> None:
    """The same, ten thousand times."""
    compare_readers(text, size)


def describe(
    dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16), **more: Any
) -> dict[str, Any]:
    """A header with one tensor."""
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}, **more}


def join(*ranges: tuple[int, int], dtype: str = "F32") -> dict[str, Any]:
    """A header with several tensors, each of the shape that its bytes need."""
    return {
        f"t{number}": {
            "dtype": dtype,
            "shape": [max(end - start, 0) // 4],
            "data_offsets": [start, end],
        }
        for number, (start, end) in enumerate(ranges)
    }


UNDESCRIBED = "its header doesn't describe the tensor 'a'"
NO_TEXTS = "its metadata isn't a table of texts"
SCATTERED = "its tensors overlap or leave a gap"
DAMAGED: dict[str, tuple[Any, int, str]] = {
    "a header that is a list": ([], 0, "its header isn't a table of tensors"),
    "a tensor that is a list": ({"a": []}, 0, UNDESCRIBED),
    "a dtype that is a number": (describe(dtype=4), 16, UNDESCRIBED),
    "a dtype in small letters": (describe(dtype="f32"), 16, UNDESCRIBED),
    "a long dtype": (describe(dtype="F" * 17), 16, UNDESCRIBED),
    "a dtype that the library does not read": (
        describe(dtype="F33"), 16,
        "the tensor 'a' has the dtype 'F33', which safetensors doesn't read",
    ),
    "half a byte": (
        describe("F4", [3], [0, 1]), 1, "the tensor 'a' takes 1 bytes and its shape needs 3/2"
    ),
    "no shape": (describe(shape=None), 16, UNDESCRIBED),
    "a shape that is a table": (describe(shape={}, offsets=(0, 4)), 4, UNDESCRIBED),
    "a shape with a fraction": (describe(shape=[4.0]), 16, UNDESCRIBED),
    "a shape with true": (describe(shape=[True], offsets=(0, 4)), 4, UNDESCRIBED),
    "a shape of negative sizes": (describe(shape=[-1, -4]), 16, UNDESCRIBED),
    "a size beyond 64 bits": (describe(shape=[2**64, 0], offsets=(0, 0)), 0, UNDESCRIBED),
    "a shape of 65 dimensions": (describe(shape=[1] * 65, offsets=(0, 4)), 4, UNDESCRIBED),
    "offsets that are a text": (describe(offsets="ab"), 16, UNDESCRIBED),
    "no offsets": (describe(offsets=None), 16, UNDESCRIBED),
    "one offset": (describe(offsets=[16]), 16, UNDESCRIBED),
    "offsets below 0": (describe(offsets=[-16, 0]), 16, UNDESCRIBED),
    "three offsets": (describe(offsets=[0, 8, 16]), 16, UNDESCRIBED),
    "offsets with a fraction": (describe(offsets=[0, 16.0]), 16, UNDESCRIBED),
    "more bytes than the shape needs": (
        describe(shape=[3]), 16, "the tensor 'a' takes 16 bytes and its shape needs 12",
    ),
    "fewer bytes than the shape needs": (
        describe(shape=[5]), 16, "the tensor 'a' takes 16 bytes and its shape needs 20",
    ),
    "metadata that is a list": (describe(__metadata__=[]), 16, NO_TEXTS),
    "metadata with a number": (describe(__metadata__={"a": 1}), 16, NO_TEXTS),
    "a gap before the first": (join((4, 16)), 16, SCATTERED),
    "a gap between two": (join((0, 4), (8, 16)), 16, SCATTERED),
    "two that overlap": (join((0, 12), (8, 16)), 16, SCATTERED),
    "an end before its beginning": (join((0, 8), (8, 4)), 4, SCATTERED),
    "values that were cut off": (describe(), 12, "its values should take 16 bytes and 12 are there"),
    "values that are padded": (describe(), 20, "its values should take 16 bytes and 20 are there"),
}  # fmt: skip
"""What is wrong with a file, its header and how many bytes of values it has, and what is said of it."""


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_for_what_is_wrong(case: str, tmp_path: Path) -> None:
    """By a check of its own, in a sentence of its own; the library refuses it as well."""
    header, size, message = DAMAGED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(encode_header(header) + bytes(size))
    with pytest.raises(DamagedFileError) as caught:
        read_header(path)
    assert str(caught.value) == message
    assert case == "a shape of 65 dimensions" or read_theirs(path) is None


BEGINNINGS = {
    "an empty file": (b"", "it has 0 bytes, and a safetensors file has at least 8"),
    "seven bytes": (bytes(7), "it has 7 bytes, and a safetensors file has at least 8"),
    "a picture": (
        b"\x89PNG\r\n\x1a\n" + bytes(64), "it doesn't begin with the header of a safetensors file",
    ),
    "one byte more than a header may have": (
        struct.pack("<Q", LARGEST_HEADER_BYTES + 1),
        "it doesn't begin with the header of a safetensors file",
    ),
    "a header that was cut off": (
        struct.pack("<Q", 10) + b"{}", "its header needs 10 bytes and 2 are there",
    ),
    "half a header": (
        encode_header({})[:8] + b'{"a": 12',
        "its header can't be read as JSON: it isn't JSON at line 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BEGINNINGS)
def test_a_file_that_begins_wrongly_is_refused(case: str, tmp_path: Path) -> None:
    """Nothing beyond its header is read, and no more of that than is there."""
    content, message = BEGINNINGS[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError) as caught:
        read_header(path)
    assert str(caught.value).startswith(message)
    assert read_theirs(path) is None
    assert read_header_bytes(path) == content[: len(read_header_bytes(path))]


@pytest.mark.parametrize("name", ["absent", "a\0b"])
def test_a_path_that_cannot_be_opened_is_an_error_of_ours(name: str, tmp_path: Path) -> None:
    """Also one whose state cannot even be asked for."""
    with pytest.raises(DamagedFileError, match=r"no such file|embedded null"):
        read_header(tmp_path / f"{name}.safetensors")


def test_metadata_is_checked_and_read(tmp_path: Path) -> None:
    """What is no table of texts is refused; of several files the first that says something counts."""
    paths = [tmp_path / f"{name}.safetensors" for name in ("absent", "numbers", "plain", "said")]
    for path, texts in zip(
        paths[1:], ({"a": 1}, {"a": "b"}, {RESCALED_ENTRY: "unet"}), strict=True
    ):
        path.write_bytes(encode_header(describe(__metadata__=texts)) + bytes(16))
    with pytest.raises(DamagedFileError, match=NO_TEXTS):
        read_metadata(paths[1])
    assert read_metadata(paths[2]) == {"a": "b"}
    assert read_rescaled(*paths) == "unet"
    assert read_rescaled(*paths[:3]) == ""


def test_a_header_is_read_again_when_its_file_is_another(tmp_path: Path) -> None:
    """Its size, its time or its place on the disk: each shows it by itself."""
    path, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"

    def write(place: Path, dtype: str, time_s: int, count: int = 4) -> None:
        header = describe(dtype, [count], [0, 4 * count])
        place.write_bytes(encode_header(header) + bytes(4 * count))
        os.utime(place, (time_s, time_s))

    write(path, "F32", 1)
    assert read_header(path)["a"].dtype == "fp32"
    write(path, "I32", 2)
    assert read_header(path)["a"].dtype == "int32", "its time"
    write(path, "U32", 2, count=5)
    assert read_header(path)["a"].dtype == "uint32", "its size"
    write(path, "F32", 3)
    assert read_header(path)["a"].dtype == "fp32"
    write(other, "I32", 3)
    other.replace(path)
    assert read_header(path)["a"].dtype == "int32", "its place"


def test_a_header_is_padded_as_the_format_wants(tmp_path: Path) -> None:
    """Values begin at a multiple of 8 bytes, whatever the names; the library reads them."""
    for length in range(1, 9):
        header = {"n" * length: describe()["a"]}
        assert len(encode_header(header)) % 8 == 0
        path = tmp_path / f"{length}.safetensors"
        path.write_bytes(encode_header(header) + bytes(16))
        assert read_theirs(path) == {"n" * length: (4,)}
        assert read_header(path) == {"n" * length: StoredTensor("fp32", (4,), 16)}


NO_INDEX = "it can't be read as an index of shards"
SHARD = "model-00001-of-00002.safetensors"
INDEXES: dict[str, tuple[Any, str]] = {
    "no table": ([], NO_INDEX),
    "half a table": ('{"weight_map": {', NO_INDEX),
    "no map": ({}, NO_INDEX),
    "a map that is a list": ({"weight_map": [SHARD]}, NO_INDEX),
    "a number": ({"weight_map": {"a": 1}}, "it names the file '1', which is no shard's name"),
    "a list": ({"weight_map": {"a": []}}, "it names the file '[]', which is no shard's name"),
    "another folder behind a name": (
        {"weight_map": {"a": "model.a/../../b.safetensors"}},
        "it names the file 'model.a/../../b.safetensors', which is no shard's name",
    ),
    "another folder": (
        {"weight_map": {"a": f"../{SHARD}"}}, f"it names the file '../{SHARD}', which is no shard's name",
    ),
    "a folder of Windows": (
        {"weight_map": {"a": "model-00001-of-00002.safetensors\\x.safetensors"}},
        "it names the file 'model-00001-of-00002.safetensors\\\\x.safetensors', which is no shard's name",
    ),
    "what no component is loaded from": (
        {"weight_map": {"a": SHARD, "b": "notes.txt"}},
        "it names the file 'notes.txt', which is no shard's name",
    ),
    "two variants": (
        {"weight_map": {"a": SHARD, "b": "model.fp16-00001-of-00001.safetensors"}},
        "it names the file 'model.fp16-00001-of-00001.safetensors', which is no shard's name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_a_damaged_index_of_shards_is_refused(case: str, tmp_path: Path) -> None:
    """An index names files beside it, of one variant, and nothing else."""
    content, message = INDEXES[case]
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DamagedFileError) as caught:
        read_shard_index(path)
    assert str(caught.value).startswith(message)


def test_what_an_index_names_and_the_folder_lacks(tmp_path: Path) -> None:
    """A shard, a tensor of one; a tensor that is in another shard is no loss, a damaged shard not ours."""
    names = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"a": names[0], "b": names[0], "c": names[1], "a.": names[2], "d": names[3]}
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / names[0]).write_bytes(encode_header(describe()) + bytes(16))
    (tmp_path / names[2]).write_bytes(b"half")
    (tmp_path / names[3]).write_bytes(encode_header({"d": describe()["a"]}) + bytes(16))
    assert find_missing_shards(index, read_shard_index(index)) == [
        f"the tensor 'b' of {names[0]}",
        names[1],
    ]


def test_files_of_a_component_are_told_by_name() -> None:
    """The variant that is wanted, where it is there; a file of another name is none of them."""
    names = [
        "model.fp16.safetensors",
        "model.safetensors",
        SHARD,
        "lora.safetensors",
        "a.b.safetensors",
    ]
    assert choose_weights(names) == ("", [SHARD, "model.safetensors"])
    assert choose_weights(names, "fp16") == ("fp16", ["model.fp16.safetensors"])
    assert choose_weights(names, "bf16")[0] == ""
    assert choose_weights(["lora.safetensors"]) == ("", [])
