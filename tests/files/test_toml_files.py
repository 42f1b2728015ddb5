"""The package's own data: every file is read, a wrong row is refused, and each fact has its source."""

from __future__ import annotations

import re

import msgspec
import pytest

from stopdown.devices.maker_formats import judge_accelerator
from stopdown.devices.model_needs import Need, read_needs
from stopdown.dtype_rules.findings import SEVERITIES, is_fault, make_finding, read_kinds
from stopdown.files.toml_files import parse_rows, read_folder, read_rules
from stopdown.operations import keeps_clamps


def test_files_of_a_folder_come_sorted() -> None:
    """What is read does not depend on the order of a file system."""
    names = list(read_folder("explain"))
    assert names == sorted(names)
    assert {"overflow.toml", "signs.toml"} <= set(names)


def test_an_unknown_field_is_refused() -> None:
    """A misspelt field is an error and not a fact that nobody reads."""
    row = {"begins": "A", "refused": ["fp16"], "reason": "b", "source": "c", "remedy": "d"}
    assert parse_rows([row], Need)[0].begins == "A"
    with pytest.raises(msgspec.ValidationError, match="unknown field `begin`"):
        parse_rows([{**row, "begin": "A"}], Need)
    with pytest.raises(msgspec.ValidationError, match="missing required field `source`"):
        parse_rows([{k: v for k, v in row.items() if k != "source"}], Need)


def test_every_kind_of_finding_is_worded() -> None:
    """Each kind has a severity that sorts, a cause and a remedy, in whole sentences."""
    for name, kind in read_kinds().items():
        assert kind.severity in SEVERITIES
        if name != "model-needs":  # whose words are those of the need
            assert kind.why.endswith(".")
            is_command = re.search(
                r": stopdown [^.]+$", kind.remedy
            )  # is typed, without a full stop
            assert (
                kind.remedy.endswith(".") or is_command or kind.remedy == "{remedy}"
            )  # a rule's own
            assert "\n" not in kind.why + kind.remedy


def test_what_a_finding_says_of_its_place_is_filled_in() -> None:
    """Component, path and dtype stand in the remedy; what is not known stays as it was written."""
    found = make_finding("widens-itself", "vae.decode:up.0", "It is.", path="up.0")
    assert "pipe.vae.get_submodule('up.0')" in found.remedy
    found = make_finding("mixed-parameters", "vae", "It is.")
    assert "pipe.vae.to({dtype})" in found.remedy


def test_weights_that_were_rescaled_are_no_fault() -> None:
    """They say what a model is; `check` ends with 0."""
    assert not is_fault("rescaled-weights")
    assert is_fault("adapter-on-rescaled")
    assert is_fault("a-kind-of-another-version")


def test_the_clamp_of_sana_is_kept() -> None:
    """A class is known by how its name begins, and each need says who found it."""
    assert keeps_clamps("SanaTransformer2DModel")
    assert not keeps_clamps("T5EncoderModel")
    assert not keeps_clamps("Gemma2Model")
    assert all("#" in x.source or x.source.startswith("tests/") for x in read_needs())


def test_what_the_makers_say_has_its_source() -> None:
    """Each row about arithmetic names a page or an issue, and its regular expression compiles."""
    rows = read_rules("arithmetic")["unit"]
    assert all(len(row["source"]) > 8 for row in rows)
    for backend, formats in {"cuda": 2, "rocm": 2, "mps": 2}.items():
        last = {row["format"]: row for row in rows if row["backend"] == backend}
        assert len(last) == formats
        limits = {"from", "below", "only", "name"}
        assert [row for row in last.values() if limits & row.keys()] == [], "the last fits always"


def test_a_reason_agrees_with_its_verdict() -> None:
    """An AMD card before gfx900 has no packed fp16, and is not said to have it."""
    assert (
        judge_accelerator("rocm", (), "gfx803")["fp16"].reason
        == "gfx803 has no packed fp16 arithmetic."
    )
