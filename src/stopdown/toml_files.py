"""The package's own data: TOML files under `knowledge/`, and their rows as checked records."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib import resources
from typing import Any, TypeVar

import msgspec

_Row = TypeVar("_Row")


def read_texts(folder: str) -> dict[str, str]:
    """The texts of the files in a folder of `knowledge/`, by file name, sorted."""
    entries = (resources.files("stopdown") / "knowledge" / folder).iterdir()
    texts = {e.name: e.read_text(encoding="utf-8") for e in entries if e.name.endswith(".toml")}
    return dict(sorted(texts.items()))


def read_rules(name: str) -> dict[str, Any]:
    """The tables of one file of `knowledge/rules/`: `operations` for `operations.toml`."""
    path = resources.files("stopdown") / "knowledge" / "rules" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def read_rows(name: str, table: str, kind: type[_Row]) -> tuple[_Row, ...]:
    """The rows of one table of `knowledge/rules/`, as records.

    Raises:
        msgspec.ValidationError: a row lacks a field, or has one that is unknown.
    """
    return parse_rows(read_rules(name)[table], kind)


def parse_rows(rows: Iterable[Any], kind: type[_Row]) -> tuple[_Row, ...]:
    """Rows of a table that was read, as records."""
    return tuple(msgspec.convert(row, kind) for row in rows)
