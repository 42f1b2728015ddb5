"""A call that can't be captured: the error names the line that stops it."""

from __future__ import annotations

import pytest
import torch

from models.uncapturable_models import Branching, Leaving
from stopdown.errors import CaptureError
from stopdown.fake_tensors.fake_modules import build_fake
from stopdown.scaling.graph.capture import capture_call


def test_a_branch_on_values_is_named_with_its_line() -> None:
    """Without weights there are no answers: refused, with the file and line of the code."""
    module = build_fake(Branching, torch.float16)
    with pytest.raises(CaptureError) as caught:
        capture_call(module, (torch.randn(2, 2),), dtype=torch.float16)
    assert "Branching can't be captured as a graph" in str(caught.value)
    assert "uncapturable_models.py" in str(caught.value)
    assert "if self.linear(x).sum() > 0:" in str(caught.value)


def test_code_that_leaves_torch_is_named_with_its_line() -> None:
    """No answer helps there: the line of the code stands in the error."""
    with pytest.raises(CaptureError, match=r"Leaving can't be captured .*x\.numpy\(\) \* 2"):
        capture_call(Leaving(), (torch.randn(2, 2),), dtype=torch.float16)
