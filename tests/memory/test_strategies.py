"""The strategies that are tried, and the runs that each of them is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stopdown.memory.forecast import USABLE_SHARE
from stopdown.memory.strategies import list_strategies

GIB = 2**30


def list_names(**has: bool) -> list[str]:
    return [one.name for one in list_strategies(**{"has_tiling": False, **has})]


def test_a_model_with_tiles_has_six() -> None:
    """Three placements, each plain and with tiles; those that cost the least time come first."""
    assert list_names(has_tiling=True) == [
        "resident", "resident+tiling", "component", "component+tiling", "block", "block+tiling",
    ]  # fmt: skip


def test_a_video_model_that_decodes_in_chunks_has_twelve() -> None:
    """Four frames or one at a time, and pieces of the layers beside four."""
    ways = ["", "+4 frames", "+1 frame", "+4 pieces+4 frames"]
    places = ["resident", "component", "block"]
    assert list_names(has_chunks=True) == [place + way for place in places for way in ways]


def test_attention_is_split_where_no_kernel_does_without_its_scores() -> None:
    """Only a run with nothing made smaller keeps them whole."""
    assert list_names(fused=False) == [
        "resident", "resident+split", "component+split", "block+split",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "needed"),
    [("SVD-XT", "block+4 pieces+4 frames"), ("CogVideoX-5B", "block+tiling")],
)
def test_a_model_at_its_own_size_runs_within_8_gib(model: str, needed: str) -> None:
    """By the stored forecast, one strategy alone does it, so none of its parts can go."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "memory_predicted.json"
    found = json.loads(path.read_text())["results"][model]["reserved_bytes"]
    known = list_names(has_tiling=model != "SVD-XT", has_chunks=model == "SVD-XT")
    assert list(found) == known
    assert [x for x in known if found[x] <= USABLE_SHARE * 8 * GIB] == [needed]
