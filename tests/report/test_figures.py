"""Figures of a page: classes of colour, and the maps with the least headroom."""

from __future__ import annotations

import math

import pytest

from stopdown.report.figures import MOST_SHOWN, HeatMap, choose_bin


@pytest.mark.parametrize(
    ("bits", "name"),
    [(-0.5, "over"), (0.0, "edge"), (0.9, "edge"), (1.0, "near"), (4.0, "fine"), (8.0, "far"),
     (math.inf, "far")],
)  # fmt: skip
def test_headroom_has_a_colour(bits: float, name: str) -> None:
    """A limit belongs to the class above it."""
    assert choose_bin(bits) == name


def test_the_tightest_blocks_are_shown_first() -> None:
    """The least headroom in any precision counts; steps at which a block was not called do not."""
    heats = {
        "fp16": {f"b{n}": (float(n), None) for n in range(1, 20)},
        "bf16": {"b19": (None, 0.5), "b1": (9.0, 9.0)},
    }
    found = HeatMap("transformer", heats).tightest
    assert len(found.module_paths) == MOST_SHOWN
    assert found.module_paths[:3] == ["b19", "b1", "b2"]
    assert found.heats["bf16"].keys() == {"b19", "b1"}
    assert found.steps == 2
