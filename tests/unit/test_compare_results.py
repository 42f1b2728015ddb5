"""Stored results of two revisions are compared by verdict, and what differs needs a reason."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "compare_results", ROOT / "benchmarks" / "compare_results.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


BEFORE = {
    "machine": {"cores": 2},
    "rows": [
        {"class": "T5", "way": "residual", "folds": 3, "solved_s": 1.5},
        {"class": "Wan", "way": "residual", "folds": 4, "solved_s": 2.5},
    ],
}


def test_only_verdicts_are_compared(script: ModuleType) -> None:
    """A changed fold and a missing row are differences; seconds and the machine are none."""
    after = {
        "machine": {"cores": 64},
        "rows": [{"class": "T5", "way": "residual", "folds": 2, "solved_s": 0.5}],
    }
    rows = [script.read_rows(x) for x in (BEFORE, after)]
    found = script.compare_rows("rescale.json", *rows)
    assert [str(x) for x in found] == [
        "rescale.json: rows / T5 / residual: folds: 3 is now 2",
        'rescale.json: rows / Wan / residual: row: "there" is now null',
    ]
    assert script.compare_rows("rescale.json", rows[0], rows[0]) == []
    assert script.tell_repeated(rows[0], rows[0]) == "2 not asked again"
    assert script.tell_repeated(*rows) == "0 not asked again"


def test_a_reason_explains_its_own_row_and_field(script: ModuleType) -> None:
    """What no reason fits stays open."""
    found = [
        script.Difference("rescale.json", "rows / T5 / residual", field, 3, 2)
        for field in ("folds", "headroom_bits")
    ]
    reason = script.Reason("rescale.json", "rows / T5 / *", "because", field="folds")
    explained, open_ones = script.sort_differences(found, [reason])
    assert explained == {"because": found[:1]}
    assert open_ones == found[1:]


def test_one_reason_may_stand_for_several_rows_and_fields(
    script: ModuleType, tmp_path: Path
) -> None:
    """Lists of patterns are one reason for each pair; without a field it is every field."""
    path = tmp_path / "reasons.toml"
    path.write_text(
        """
        [[difference]]
        file = "check.json"
        row = ["a", "b"]
        field = ["values", "note"]
        because = "several"

        [[difference]]
        file = "check.json"
        row = "c"
        because = "one"
        """
    )
    reasons = script.read_reasons(path)
    assert [(x.row, x.field, x.because) for x in reasons] == [
        ("a", "values", "several"),
        ("a", "note", "several"),
        ("b", "values", "several"),
        ("b", "note", "several"),
        ("c", "*", "one"),
    ]


def test_tables_of_pages_are_rows(script: ModuleType) -> None:
    """Rows of Markdown are named by heading and first cell."""
    rows = script.read_tables("# Reports\n\n| report | answer |\n|---|---|\n| a#1 | dtype |\n")
    assert rows["Reports / a#1"] == {0: "dtype"}


def test_stored_reasons_are_read(script: ModuleType) -> None:
    """Each names a file that is compared."""
    reasons = script.read_reasons()
    assert reasons
    assert {x.file for x in reasons} <= set(script.FILES)
