"""JSON from elsewhere: what is read, and what is refused before it costs time or memory."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopdown.files.json_files import (
    MOST_DEPTH,
    UnreadableError,
    parse_json,
    read_json_table,
    read_small_file,
)

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_json_is_read_as_it_was_written(value: object) -> None:
    """Numbers to 64 bits, text, lists and tables come back; Infinity where it is wanted."""
    assert parse_json(json.dumps(value).encode(), allows_infinity=True) == value


def test_a_number_beyond_a_double_is_infinity() -> None:
    """1e999 is refused where Infinity is, and read where it is wanted."""
    with pytest.raises(UnreadableError, match=r"^it holds the number -1e999$"):
        parse_json(b"[-1e999]")
    assert parse_json(b"[-1e999]", allows_infinity=True) == [float("-inf")]


@given(
    st.binary(max_size=200)
    | st.text('[]{}",:0123456789.eE-+NaInfity \\u', max_size=200).map(str.encode)
)
def test_whatever_the_bytes_are_there_is_one_exception(content: bytes) -> None:
    """Any bytes are JSON or an UnreadableError."""
    with contextlib.suppress(UnreadableError):
        repr(parse_json(content)).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it isn't JSON at line 1, column 1: Expecting value"),
        (b'{"a": 1,\n}', "it isn't JSON at line 2, column 1: Expecting property name"),
        ("\ufeff{}".encode(), "it isn't JSON at line 1, column 1: Unexpected UTF-8 BOM"),
        (b"\xff{}", "it isn't UTF-8 at byte 0"),
        (b'{"a": NaN}', "it holds the number NaN"),
        (b'{"a": -Infinity}', "it holds the number -Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "it holds an integer of 5000 digits"),
        (b'{"\\ud83d": "\\ud83d\\ude00"}', "it holds half of a surrogate pair"),
        (b"[" * 100_000, f"it is nested deeper than {MOST_DEPTH}"),
        (b"[" * 100 + b"]" * 100, f"it is nested deeper than {MOST_DEPTH}"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, f"it is nested deeper than {MOST_DEPTH}"),
    ],
)
def test_what_is_not_read_is_said(content: bytes, said: str) -> None:
    """Each limit has its sentence."""
    with pytest.raises(UnreadableError) as caught:
        parse_json(content)
    assert str(caught.value).startswith(said)


def test_the_length_that_tokenizers_call_none_is_read() -> None:
    """`model_max_length` is often int(1e30), written out."""
    assert parse_json(b"[1000000000000000019884624838656]") == [int(1e30)]


def test_nesting_to_the_limit_is_read() -> None:
    """64 lists in one another pass, and one more does not."""
    parse_json(b"[" * MOST_DEPTH + b"]" * MOST_DEPTH)
    with pytest.raises(UnreadableError):
        parse_json(b"[" * (MOST_DEPTH + 1) + b"]" * (MOST_DEPTH + 1))


def test_only_regular_files_of_a_size_are_read(tmp_path: Path) -> None:
    """A named pipe, a folder, a link to itself, nothing, and a file that is too large."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large").write_bytes(b" " * 11)
    for name, said in {
        "pipe": "it isn't a regular file",
        ".": "is a directory",
        "loop": "too many levels of symbolic links",
        "nothing": "no such file or directory",
        "\0": "embedded null byte",
        "large": "it has 11 bytes, and at most 10 are read",
    }.items():
        with pytest.raises(UnreadableError) as caught:
            read_small_file(tmp_path / name, most_bytes=10)
        assert str(caught.value) == said
    (tmp_path / "large").write_bytes(b" " * 10)
    assert read_small_file(tmp_path / "large", most_bytes=10) == b" " * 10


def test_a_list_is_no_table(tmp_path: Path) -> None:
    """Only a table is one."""
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(UnreadableError, match="it holds a list and not a table"):
        read_json_table(path)
    path.write_text('{"a": 1}')
    assert read_json_table(path) == {"a": 1}
