"""Runs as records: calls added up, and the card of a run."""

from __future__ import annotations

import dataclasses

from models.run_records import RECORD
from stopdown.records import CallSummary, Repair, StepDown


def test_calls_are_added_up() -> None:
    """Later precisions come first; headroom is the least that's known."""
    first = CallSummary("transformer", "denoise", 3, 1.0, ("fp16",), 1)
    later = CallSummary("transformer", "denoise", 2, 0.5, ("fp32", "fp16"), 0, 4.0)
    both = first.add(later)
    assert both == CallSummary("transformer", "denoise", 5, 1.5, ("fp32", "fp16"), 1, 4.0)
    assert both.add(dataclasses.replace(first, headroom_bits=1.5)).headroom_bits == 1.5


def test_a_verdict_is_that_of_the_output() -> None:
    """Faults of the frames come before repairs, and a repair that failed is told as such."""
    repair = Repair("vae.decode", "vae.decode:up", "range", 1, "Its result is 1e5.", "rescaled", "")
    assert RECORD.verdict == "All 9 frames."
    healthy = dataclasses.replace(RECORD, findings=())
    assert healthy.verdict == "no NaN or Inf, nothing repaired."
    repaired = dataclasses.replace(healthy, repairs=(repair, repair))
    assert repaired.verdict == "repaired vae.decode; the result isn't affected."
    failed = dataclasses.replace(healthy, repairs=(dataclasses.replace(repair, action="none"),))
    assert "wasn't repaired" in failed.verdict


def test_limits_name_the_strategy_and_each_step_down() -> None:
    """Without a limit nothing is listed."""
    assert RECORD.list_limits() == []
    step = StepDown("vae.decode", "resident", "resident+tiling", "8 GiB")
    limited = dataclasses.replace(RECORD, strategy="resident", steps_down=(step,))
    assert limited.list_limits() == [
        "predicted to fit in the device's memory: resident",
        "vae.decode ran out of memory with resident; retried with resident+tiling",
    ]
