"""Conversion of records to JSON and back, with checks of kind and schema."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stopdown.errors import InputError
from stopdown.files.json_files import UnreadableError, parse_json, read_small_file

SCHEMA = 1

Record = TypeVar("Record")


def to_json(record: Any) -> str:
    """Encode a record as indented JSON text that is safe to print on a terminal.

    Bytes of file names that are not UTF-8 become U+FFFD.
    """
    try:
        content = msgspec.json.encode(record)
    except UnicodeEncodeError:
        content = msgspec.json.encode(_replace_bytes(msgspec.to_builtins(record)))
    text = msgspec.json.format(content, indent=2).decode()
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


_UNPRINTABLE = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters for terminals that JSON leaves unescaped; they occur only inside of strings."""


def _replace_bytes(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_replace_bytes(key): _replace_bytes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_bytes(item) for item in value]
    return value


def from_json(text: str | bytes, kind: type[Record]) -> Record:
    """Read a record from JSON text.

    Raises:
        InputError: the text is not such a record, or has another schema number.
    """
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        return convert_record(parse_json(content), kind)
    except UnreadableError as error:
        raise _refuse(kind, error) from error


def convert_record(raw: Any, kind: type[Record]) -> Record:
    """Convert decoded JSON to a record.

    Raises:
        InputError: it is not such a record, or has another schema number.
    """
    _check_header(raw, kind)
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refuse(kind, error) from error


def _refuse(kind: type, error: Exception) -> InputError:
    return InputError(
        f"The text isn't a {kind.__name__}: {error}.",
        expected="A record is JSON as Stopdown writes it.",
        remedy="It may be cut off or edited; make it again.",
    )


def _check_header(raw: Any, kind: type) -> None:
    """Refuse another schema, another kind of record, and fields that would be ignored."""
    if not isinstance(raw, dict):
        return  # refused by its type
    fields = {entry.name: entry.default for entry in dataclasses.fields(kind)}
    fixed = {name: fields[name] for name in ("kind", "schema") if "schema" in fields}
    for name, value in fixed.items():
        if raw.get(name, value) != value:
            raise InputError(
                f"The {kind.__name__} has {name} {raw[name]!r:.60}.",
                expected=f"This version of Stopdown reads {name} {value!r} here.",
                remedy="Make it again with this version.",
            )
    unknown = sorted(name[:60] for name in set(raw) - set(fields))
    if unknown:
        raise InputError(
            f"The {kind.__name__} has fields that are unknown: {', '.join(unknown[:8])}.",
            expected="A record has the fields that this version of Stopdown writes.",
            remedy="Make it again with this version.",
        )


def describe_other(kind: str, path: Path) -> str:
    """Describe a file that isn't a record of the given kind; return "" if it is one, or is empty.

    Args:
        kind: `run`, `plan`, `comparison`…
        path: an existing file.
    """
    found = read_kind(path)
    if found is None:
        return "a file that Stopdown didn't write as a record"
    return "" if found in ("", kind) else f"a record of the kind {found}"


def read_kind(path: Path) -> str | None:
    """Read a file's kind of record; return "" for an empty file, None for a file that isn't a record."""
    try:
        content = read_small_file(path, most_bytes=_MOST_BYTES)
        head = msgspec.json.decode(content, type=_Head) if content else _Head("", 0)
        return head.kind if head.schema is not None or head.kind == _WITHOUT_SCHEMA else None
    except (UnreadableError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


describe_no_run = functools.partial(describe_other, "run")
"""Describe what a file contains if a run's record must not replace it; return "" for a run's record."""

_MOST_BYTES = 2**30
"""Largest file that is read as a record; a comparison's record contains its pictures."""


class _Head(msgspec.Struct):
    """The fields of every record's header; a certificate has no schema, because its checker knows it."""

    kind: str
    schema: int | None = None


_WITHOUT_SCHEMA = "certificate"


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a record from a JSON file.

    Raises:
        InputError: the file cannot be read, or is not such a record.
    """
    try:
        content = read_small_file(path)
    except UnreadableError as error:
        raise InputError(
            f"The record {path} can't be read: {error}.", remedy="Name a file that exists."
        ) from error
    return from_json(content, kind)
