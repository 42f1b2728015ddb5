"""Every way in beside every kind of change: right, repaired, or refused in one sentence; never wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from models import ways_in
from models.small_ways import Cell, fill_small, list_small_cells
from models.ways_in import Outcome, Table, list_cells

QUICK = {
    ("cogvideox", "fp16", "second call"),
    ("cogvideox", "apply_plan", "replaced forward"),
    ("cogvideox", "fp16", "hidden states"),
    ("cogvideox-image", "guard + plan", "another size first"),
    ("sdxl", "guard", "optional arguments"),
    ("zimage", "quantization_config", "first call"),
}
"""Cells of the quick suite, one for each kind of fault that was found between two ways."""

THOROUGH = {("cogvideox", "run", "replaced forward"), ("cogvideox", "run", "replaced class")}

SMALL_QUICK = ("guard", "fp16")


def mark(cell: tuple[str, str, str]) -> Any:
    """Return when a cell is tested."""
    return () if cell in QUICK else pytest.mark.thorough if cell in THOROUGH else pytest.mark.slow


CELLS = [pytest.param(*x, marks=mark(x), id="-".join(x)) for x in list_cells()]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    return Table(tmp_path_factory.mktemp("ways"))


def check(outcome: Outcome) -> None:
    """Hold a cell: no wrong result, and a refusal is a sentence."""
    assert outcome.verdict != "wrong", outcome.reason
    assert (outcome.verdict == "refused") == bool(outcome.reason), outcome


@pytest.mark.parametrize(("name", "way", "change"), CELLS)
def test_each_way_in_meets_each_change(table: Table, name: str, way: str, change: str) -> None:
    """A change is met by every way in: no further from fp32 than bf16, or refused in words."""
    check(table.fill(name, way, change))


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(x, marks=() if x.way in SMALL_QUICK else pytest.mark.thorough)
        for x in list_small_cells()
    ],
    ids=str,
)
def test_each_way_in_takes_each_small_module(cell: Cell) -> None:
    """A module that swallows, returns or reads what passes fp16's range is right through each way in."""
    check(fill_small(cell))


def test_a_wrong_cell_is_seen(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that leaves a component in plain fp16 is a wrong cell: the table can fail."""
    monkeypatch.setitem(ways_in.WAYS, "guard", ways_in.leave_plain)
    assert table.fill("sdxl", "guard", "first call").verdict == "wrong"
