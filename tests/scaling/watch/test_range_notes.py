"""Calls that leave the range that a plan was measured on are reported once."""

from __future__ import annotations

import pytest
import torch

from stopdown.scaling.watch.range_notes import RangeNotes, list_ranged
from stopdown.scaling_records import Scaling


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def notes(said: list[str]) -> RangeNotes:
    scaling = Scaling(inputs={"forward.hidden_states": 10.0}, headroom_bits=2.0)
    return RangeNotes("transformer", scaling, said.append)


def test_arguments_within_the_headroom_are_not_mentioned(
    notes: RangeNotes, said: list[str]
) -> None:
    """Two bits of headroom are a factor of four; beyond it one sentence comes, once."""
    for size in (40.0, 41.0, 50.0):
        notes.note("forward", [("hidden_states", torch.full((2, 2), size))], torch.ones(2))
    assert len(said) == 1
    assert "`transformer` was called with hidden_states up to 41" in said[0]


def test_outputs_that_are_not_finite_are_reported(notes: RangeNotes, said: list[str]) -> None:
    """Inf and NaN alike, once for the component."""
    for value in (torch.inf, torch.nan):
        notes.note("forward", [], torch.full((2, 2), value))
    assert len(said) == 1
    assert "values that are not finite" in said[0]


def test_times_positions_and_masks_have_no_range() -> None:
    """Their magnitude does not matter to fp16."""
    x = torch.ones(2, 2)
    given = [
        ("hidden_states", x),
        ("timestep", x),
        ("attention_mask", x),
        ("img_ids", x),
        ("t", x[0]),
    ]
    assert [name for name, _ in list_ranged(given)] == ["hidden_states"]
