"""Modules of fake tensors."""

from __future__ import annotations

import torch
from torch import nn

from stopdown.fake_tensors.fake_modules import build_fake
from stopdown.scaling.graph.capture import (
    capture_call,
)
from stopdown.scaling.graph.nodes import operation


def test_a_class_without_weights_in_memory_is_captured() -> None:
    """A module built from fake tensors in the target dtype gives the same kind of graph."""
    module = build_fake(lambda: nn.Linear(1 << 16, 1 << 14), torch.float16)
    capture = capture_call(module, (torch.empty(1, 1 << 16).half(),), dtype=torch.float16)
    node = next(n for n in capture.graph.graph.nodes if operation(n) == "linear")
    assert tuple(node.meta["val"].shape) == (1, 1 << 14)
    assert node.meta["val"].dtype == torch.float16
