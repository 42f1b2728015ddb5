"""What classes of models need whatever the device, from `knowledge/rules/models.toml`."""

from __future__ import annotations

import msgspec

from stopdown.files.toml_files import read_rows


class Need(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a class of models needs.

    Attributes:
        keeps_clamps: its clamp at fp16's maximum is part of the model.
    """

    begins: str
    refused: tuple[str, ...]
    reason: str
    source: str
    remedy: str
    keeps_clamps: bool = False


def read_needs() -> tuple[Need, ...]:
    return read_rows("models", "need", Need)


def keeps_clamps(class_name: str) -> bool:
    """Whether the clamp at fp16's maximum is part of a model, by the name of its class."""
    return any(need.keeps_clamps and class_name.startswith(need.begins) for need in read_needs())
