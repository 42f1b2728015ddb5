"""What classes of models need whatever the device, from `knowledge/rules/models.toml`."""

from __future__ import annotations

import msgspec

from stopdown.files.toml_files import read_rows


class Need(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a class of models needs.

    Attributes:
        tiles: its code does nothing without tiling, which is off in its configuration.
    """

    begins: str
    reason: str
    source: str
    refused: tuple[str, ...] = ()
    remedy: str = ""
    tiles: bool = False


def read_needs() -> tuple[Need, ...]:
    return read_rows("models", "need", Need)


def needs_tiling(class_name: str) -> bool:
    """Return whether a model must be told to work in tiles, by the name of its class."""
    return any(need.tiles and class_name.startswith(need.begins) for need in read_needs())
