"""What converted files say of themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stopdown.checkpoints.cards import (
    CARD_LINE,
    MARK,
    list_entries,
    refuse_rescaled,
    write_card_beside,
)
from stopdown.errors import OptionError
from stopdown.records import ConvertedComponent
from stopdown.sources.headers import EXPONENTS_ENTRY, RESCALED_ENTRY


def make_entry(component: str, folded: int) -> ConvertedComponent:
    return ConvertedComponent(
        component, "fp16", folded=folded, reasons=("It fits.", "It was tried.")
    )


def test_metadata_names_what_was_rescaled() -> None:
    """Exponents are there only where a tensor has some; each component has its reasons."""
    entries = list_entries("seal", [make_entry("vae", 0), make_entry("unet", 3)], {"a.weight": -2})
    assert entries[MARK].endswith(" plan seal")
    assert entries[RESCALED_ENTRY].startswith("unet: ")
    assert json.loads(entries[EXPONENTS_ENTRY]) == {"a.weight": -2}
    assert entries[f"{MARK}.vae"] == "It fits. It was tried."
    plain = list_entries("seal", [make_entry("vae", 0)], {})
    assert not plain.keys() & {RESCALED_ENTRY, EXPONENTS_ENTRY}


def test_nothing_is_scaled_twice() -> None:
    """What the metadata says is in the message."""
    refuse_rescaled("a.safetensors", "")
    with pytest.raises(
        OptionError, match=r"is already rescaled. Unet: weights are multiplied by powers of two."
    ):
        refuse_rescaled("a.safetensors", "unet: weights are multiplied by powers of two")


def test_a_card_of_others_is_left(tmp_path: Path) -> None:
    """One of ours is written again."""
    file, card = tmp_path / "a.safetensors", tmp_path / "a.md"
    write_card_beside(file, f"# a, {CARD_LINE}\n")
    write_card_beside(file, f"# b, {CARD_LINE}\n")
    assert card.read_text(encoding="utf-8").startswith("# b")
    card.write_text("# somebody else's\n", encoding="utf-8")
    write_card_beside(file, "new")
    assert card.read_text(encoding="utf-8") == "# somebody else's\n"
