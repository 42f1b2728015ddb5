"""What `docs/deciding.md` says decides something is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

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
