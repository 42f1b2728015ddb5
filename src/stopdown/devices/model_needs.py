"""Requirements of model classes on any device, from `knowledge/rules/models.toml`."""

from __future__ import annotations

import msgspec

from stopdown.files.toml_files import read_rows


class Need(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requirement of the model classes whose names have a common beginning.

    Attributes:
        begins: beginning of the class names.
        refused: formats in which the models must not run.
        tiles: whether their code only works with tiling, which their configuration turns off.
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
    """Return whether tiling must be enabled for models of a class."""
    return any(need.tiles and class_name.startswith(need.begins) for need in read_needs())
