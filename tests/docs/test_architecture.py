"""What `docs/deciding.md` says decides something is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from docs.documentation import find_missing_evidence

PAGE = (Path(__file__).parents[2] / "docs" / "deciding.md").read_text(encoding="utf-8")
ROWS = [[x.strip() for x in row.split("|")[1:-1]] for row in re.findall(r"^\|.*\|$", PAGE, re.M)]
DECISIONS = {
    row[0]: row[1].partition(":")[0] for row in ROWS if re.match(r"`[\w/.]+\.\w+`", row[1])
}


def find(named: str) -> object:
    """The function of a row: `plans/applier.put_plan`, `module_calls.entrances.Entrance.proceed`."""
    parts = ["stopdown", *named.strip("`").replace("/", ".").split(".")]
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise AssertionError(named)


@pytest.mark.parametrize("named", DECISIONS.values(), ids=DECISIONS.keys())
def test_what_decides_is_there(named: str) -> None:
    """Each row names one function, and it has a docstring that says what it decides."""
    found = find(named)
    assert callable(found) or isinstance(found, property)
    assert found.__doc__


def test_seven_faults_have_one_place_each() -> None:
    """Faults that were right through one way in and wrong through another are decided once."""
    places = [row[1] for row in ROWS if re.fullmatch(r"`\w+(\.\w+)+`", row[1])]
    assert len(places) == len(set(places)) == 7


FAULTS = {row[0]: re.findall(r"`([\w/.]+::\w+)`", row[1]) for row in ROWS if "::" in row[1]}
"""Faults that were found once, and the tests that would find them again."""


def test_each_fault_has_a_test_that_is_there() -> None:
    """No row is without a test, and none names one that was renamed or taken away."""
    assert len(FAULTS) >= 45
    assert all(FAULTS.values())
    named = {f"tests/{test}" for tests in FAULTS.values() for test in tests}
    assert {x: why for x in named if (why := find_missing_evidence(x))} == {}
