"""What the libraries log is left out by the sentence, and only for a time."""

from __future__ import annotations

import logging

import pytest
import torch
from diffusers.utils import logging as diffusers_logging
from torch._subclasses.fake_tensor import FakeTensorMode

from stopdown import testing
from stopdown.interception.patches import Patches
from stopdown.sources.library_messages import (
    drop_empty_remarks,
    quiet_libraries,
    quiet_truncation,
)

CUT = (
    "The following part of your input was truncated because CLIP can only handle sequences up to 77"
)
LONG = "Token indices sequence length is longer than the specified maximum sequence length"
EMPTY = "There are modules in X that should be kept in float32: []. Casting directly with `to()`"
KEPT = (
    "There are modules in X that should be kept in float32: ['norm']. Casting directly with `to()`"
)


def say(*sentences: str) -> list[str]:
    """Those of the sentences that come through the handlers of Diffusers."""
    diffusers_logging.get_logger("diffusers")  # makes the handler
    handler = logging.getLogger("diffusers").handlers[0]
    records = [logging.LogRecord("diffusers", 30, "", 1, text, (), None) for text in sentences]
    return [record.getMessage() for record in records if handler.filter(record)]


def test_prompts_of_ours_are_cut_in_silence() -> None:
    """Inside of the block nothing is said of length; other warnings pass; afterwards it is said again."""
    with quiet_truncation():
        assert say(CUT, LONG, KEPT) == [KEPT]
    with quiet_truncation(wanted=False):
        assert say(CUT, LONG) == [CUT, LONG]
    assert say(CUT, LONG) == [CUT, LONG]


def test_a_remark_without_a_name_is_dropped() -> None:
    """That nothing is kept in fp32 helps nobody; that a norm should be is left alone."""
    with Patches() as patches:
        drop_empty_remarks(patches)
        assert say(EMPTY, KEPT) == [KEPT]
    assert say(EMPTY) == [EMPTY]


def test_tiny_pipelines_are_made_without_it(capfd: pytest.CaptureFixture[str]) -> None:
    """A test that makes a pipeline in 16 bits prints nothing."""
    testing.make_pipeline("sd", dtype=torch.bfloat16)
    assert "kept in float32: []" not in capfd.readouterr().err


def test_errors_on_fake_tensors_are_raised_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch logs a traceback of each TypeError, also of those that a dry run expects."""

    def fail() -> None:
        with FakeTensorMode(), pytest.raises(TypeError, match="cond must be a bool"):
            torch.nn.functional.interpolate(torch.empty(1, 0, 2, 2, 2), scale_factor=2.0)

    with quiet_libraries():
        fail()
    assert caplog.records == []
    fail()
    assert "fake tensor raised TypeError" in caplog.text
