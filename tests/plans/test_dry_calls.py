"""Calls from a dry run, and the sizes of a run that measures little."""

from __future__ import annotations

import pytest

from stopdown.pipelines.requests import Request
from stopdown.plans import dry_calls
from stopdown.testing import make_pipeline


def test_a_run_that_measures_eps_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes above `SMALL` become the nearest that the model makes; smaller ones and given ones stay."""
    pipe = make_pipeline("cogvideox")  # 9 frames of 32x32
    assert dry_calls.shrink_run(pipe, Request()) == Request()
    monkeypatch.setattr(dry_calls, "SMALL", {"height": 20, "width": 20, "frames": 5})
    assert dry_calls.shrink_run(pipe, Request()) == Request(frames=1, height=16, width=16)
    asked = Request(height=32, width=32)
    assert dry_calls.shrink_run(pipe, asked) == asked
