"""Tests of records: they survive JSON, and damaged ones are refused in whole sentences."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.run_records import RECORD
from stopdown import records
from stopdown.errors import InputError
from stopdown.records import (
    Finding,
    RunRecord,
    from_json,
    read_record,
    to_json,
)

RECORDS = [item for item in vars(records).values() if dataclasses.is_dataclass(item)]

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
SIMPLE = {str: st.text(), int: INTEGERS, float: FLOATS, bool: st.booleans(), Any: PLAIN}


def draw_value(hint: Any) -> st.SearchStrategy[Any]:
    """Values of the type of a field."""
    if dataclasses.is_dataclass(hint):
        return draw_record(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and ... not in arguments:
        return st.tuples(*map(draw_value, arguments))
    if origin is tuple:
        return st.lists(draw_value(arguments[0]), max_size=2).map(tuple)
    if origin in (dict, Mapping):
        return st.dictionaries(*map(draw_value, arguments), max_size=2)
    if origin in (Union, type(int | None)):
        return st.one_of([draw_value(part) for part in arguments])
    return st.none() if hint is type(None) else SIMPLE[hint]


def draw_record(kind: type) -> st.SearchStrategy[Any]:
    """Records of a kind with its own schema."""
    hints = get_type_hints(kind)
    fixed = ("schema", "kind") if "schema" in hints else ()
    return st.builds(kind, **{n: draw_value(h) for n, h in hints.items() if n not in fixed})


@pytest.mark.parametrize("kind", RECORDS)
def test_every_record_survives_json(kind: type) -> None:
    """What was written is read back equal, tuples, None and nested records included."""

    @settings(max_examples=25, deadline=None)
    @given(draw_record(kind))
    def check(record: Any) -> None:
        assert from_json(to_json(record), kind) == record

    check()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, len(to_json(RECORD)) - 3))
def test_a_record_that_was_cut_off_is_refused(length: int) -> None:
    """At whatever character the text ends, the message says so and nothing is read."""
    with pytest.raises(InputError) as caught:
        from_json(to_json(RECORD)[:length], RunRecord)
    message = str(caught.value)
    assert message.startswith("The text isn't a RunRecord: ")
    assert message.endswith("It may be cut off or edited; make it again.")


@pytest.mark.parametrize("text", ["[]", "null", "3", '"run"', "[" * 100_000])
def test_other_json_is_refused(text: str) -> None:
    """A list, a number or brackets without end are no record."""
    with pytest.raises(InputError, match=r"^The text isn't a RunRecord: "):
        from_json(text, RunRecord)


def test_bytes_that_are_no_text_are_refused() -> None:
    """Bytes that are not UTF-8 give the same message."""
    with pytest.raises(InputError, match=r"^The text isn't a RunRecord: "):
        from_json(b'{"source": "\xff\xfe"}', RunRecord)


def edit(**changes: Any) -> str:
    return json.dumps({**json.loads(to_json(RECORD)), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schema": 99},
            "The RunRecord has schema 99. This version of Stopdown reads schema 1 here. "
            "Make it again with this version.",
        ),
        (
            {"kind": "plan"},
            "The RunRecord has kind 'plan'. This version of Stopdown reads kind 'run' here. "
            "Make it again with this version.",
        ),
        (
            {"colour": "red", "alpha": 1},
            "The RunRecord has fields that are unknown: alpha, colour. A record has the fields "
            "that this version of Stopdown writes. Make it again with this version.",
        ),
        (
            {"elapsed_s": "soon"},
            "The text isn't a RunRecord: Expected `float`, got `str` - at `$.elapsed_s`. A "
            "record is JSON as Stopdown writes it. It may be cut off or edited; make it again.",
        ),
        (
            {"decisions": [{"precision": "fp16"}]},
            "The text isn't a RunRecord: Object missing required field `component` - at "
            "`$.decisions[0]`. A record is JSON as Stopdown writes it. It may be cut off or edited; make "
            "it again.",
        ),
    ],
)
def test_an_edited_record_is_refused(changes: dict[str, Any], message: str) -> None:
    """The message names what differs, and where."""
    with pytest.raises(InputError) as caught:
        from_json(edit(**changes), RunRecord)
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


def test_a_name_that_is_no_text_is_written_with_replacements() -> None:
    """A file's name with bytes that are not UTF-8 does not keep its record from being written."""
    record = dataclasses.replace(RECORD, output="clip\udcff.mp4", request={"\udc80": ["\udcfe"]})
    found = from_json(to_json(record), RunRecord)
    assert (found.output, found.request) == ("clip\ufffd.mp4", {"\ufffd": ["\ufffd"]})
    assert found == dataclasses.replace(record, output=found.output, request=found.request)


def test_json_holds_no_control_characters() -> None:
    """What a terminal obeys is escaped, and comes back."""
    record = dataclasses.replace(RECORD, source="a\x1b[2J\x07\x7f\x9b2J\u202ea")
    text = to_json(record)
    assert text.replace("\n", "").isprintable()
    assert from_json(text, RunRecord) == record


def test_a_record_is_read_from_a_file(tmp_path: Path) -> None:
    """A file that was written comes back equal; one that is missing is named."""
    path = tmp_path / "clip.mp4.json"
    path.write_text(to_json(RECORD), encoding="utf-8")
    assert read_record(path, RunRecord) == RECORD
    with pytest.raises(InputError) as caught:
        read_record(tmp_path / "other.json", RunRecord)
    assert str(caught.value) == (
        f"The record {tmp_path / 'other.json'} can't be read: "
        "no such file or directory. Name a file that exists."
    )


def test_json_is_for_people_too() -> None:
    """A record is indented, ends with a line, and holds no escape for what UTF-8 can say."""
    text = to_json(Finding("black-frames", "output", "Größe: 9 × 64", "…"))
    assert text == (
        '{\n  "kind": "black-frames",\n  "module_path": "output",\n  "evidence": "Größe: 9 × 64",\n'
        '  "remedy": "…",\n  "why": "",\n  "severity": "wrong"\n}\n'
    )
