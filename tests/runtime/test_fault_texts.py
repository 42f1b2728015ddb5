"""Tests of the place of a fault: rows, frames and tokens in people's words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stopdown.module_calls.callee import Callee
from stopdown.runtime.fault_texts import describe_place, name_axes


def make_callee(stage: str, channels: int = 0) -> Callee:
    """A component call of a module whose output has this many channels."""
    owner: Any = torch.nn.Module()
    owner.config = SimpleNamespace(out_channels=channels or None, in_channels=None)
    return Callee("part", owner, "forward", stage)


@pytest.mark.parametrize(
    ("callee", "shape", "arguments", "axes"),
    [
        (make_callee("encode"), (1, 16, 32), {}, ("row", "token", "")),
        (make_callee("denoise", 4), (2, 3, 4, 8, 8), {}, ("row", "frame", "", "", "")),
        (make_callee("denoise", 4), (2, 4, 3, 8, 8), {}, ("row", "", "frame", "", "")),
        (make_callee("decode", 4), (1, 3, 9, 8, 8), {}, ("row", "", "frame", "", "")),
        (make_callee("decode"), (9, 3, 8, 8), {"num_frames": 9}, ("frame", "", "", "")),
        (make_callee("decode"), (2, 3, 8, 8), {}, ("row", "", "", "")),
    ],
)
def test_axes_have_names(
    callee: Callee, shape: tuple[int, ...], arguments: dict[str, Any], axes: tuple[str, ...]
) -> None:
    """Text has tokens; videos have frames, before or behind the channels."""
    assert name_axes(callee, shape, arguments) == axes


@pytest.mark.parametrize(
    ("rows", "tokens", "words"),
    [
        ([1], [0], "row 2 of 2, token 1 of 12"),
        ([0, 1], [2, 3, 4, 7], "tokens 3 to 5 and 8 of 12"),
        ([0, 1], [0, 2, 4, 6, 8], "tokens 1 to 9, 5 of them, of 12"),
        ([0, 1], list(range(12)), ""),
    ],
)
def test_places_are_counted_from_one(rows: list[int], tokens: list[int], words: str) -> None:
    """Only dimensions that the fault does not fill are named."""
    bad = torch.zeros(2, 12, 3, dtype=torch.bool)
    for row in rows:
        bad[row, tokens] = True
    assert describe_place(bad, ("row", "token", "")) == words
