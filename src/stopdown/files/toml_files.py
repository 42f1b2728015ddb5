"""Reading of the package's own data: TOML files under `knowledge/`, with rows as validated records."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, TypeVar, cast

import msgspec

_Row = TypeVar("_Row")


def read_folder(folder: str) -> dict[str, dict[str, Any]]:
    """Read each TOML file in a folder of `knowledge/`; return its tables by file name, sorted."""
    names = sorted(entry.name for entry in _find(folder).iterdir())
    return {name: _read(folder, name) for name in names if name.endswith(".toml")}


@functools.cache
def read_rules(name: str) -> dict[str, Any]:
    """Return the tables of a file in `knowledge/rules/`, such as `versions` for `versions.toml`.

    They are cached, so callers must not change them.
    """
    return _read("rules", f"{name}.toml")


def _read(*parts: str) -> dict[str, Any]:
    return tomllib.loads(_find(*parts).read_text(encoding="utf-8"))


def _find(*parts: str) -> Traversable:
    return resources.files("stopdown").joinpath("knowledge", *parts)


def read_rows(name: str, table: str, kind: type[_Row]) -> tuple[_Row, ...]:
    """Read the rows of one table of a file in `knowledge/rules/`, as records of type `kind`."""
    rows: tuple[_Row, ...] = _parse_table(name, table, cast(Any, kind))
    return rows


@functools.cache
def _parse_table(name: str, table: str, kind: Any) -> Any:
    return parse_rows(read_rules(name)[table], kind)


def parse_rows(rows: Iterable[Any], kind: type[_Row]) -> tuple[_Row, ...]:
    """Convert the rows of a parsed table to records of type `kind`, and validate them."""
    return tuple(msgspec.convert(row, kind) for row in rows)
