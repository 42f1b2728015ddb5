"""Modules of fake tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

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


def test_a_class_that_skips_its_initialisation_is_built() -> None:
    """`skip_init` converts parameters while a class is built, as ChatGLM in Kolors has it."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.utils.skip_init(nn.Linear, 1 << 16, 1 << 14)
            self.second = nn.Linear(4, 4)

    convert = nn.Module._apply
    module = build_fake(Skipping, torch.float16)
    for parameter in module.parameters():
        assert isinstance(parameter, FakeTensor)
        assert isinstance(parameter, nn.Parameter)
        assert parameter.device.type == "cpu"
        assert parameter.dtype == torch.float16
    assert nn.Module._apply is convert
    assert "_apply" in vars(nn.Module)
