"""Calls of a program's devices and pipelines, intercepted while a script runs."""

from __future__ import annotations

from unittest import mock

import torch
from torch.utils._device import _device_constructors

from stopdown.component_calls.pipeline_interception import redirect_devices
from stopdown.interception.patches import Patches


def test_a_default_device_works_after_a_redirection() -> None:
    """Torch keeps a list of what makes tensors: it holds torch's own functions, not replaced ones."""
    _device_constructors.cache_clear()
    with mock.patch.object(torch, "linspace"), torch.device("meta"):
        torch.ones(1)
    with Patches() as patches:
        redirect_devices("cpu", print, patches)
        assert torch.linspace(0, 1, 2, device="cuda").device.type == "cpu"
        with torch.device("meta"):
            assert torch.hann_window(4).is_meta
    with torch.device("meta"):
        assert torch.linspace(0, 1, 2).is_meta


def test_what_goes_elsewhere_is_left_alone() -> None:
    """Only CUDA is redirected: dtypes, the meta device and other arguments pass."""
    said: list[str] = []
    with Patches() as patches:
        redirect_devices("cpu", said.append, patches)
        assert torch.ones(1).to("meta").device.type == "meta"
        assert torch.nn.Linear(1, 1).to(torch.float16).weight.dtype == torch.float16
        assert torch.ones(1).to("cpu", torch.float64, copy=True).dtype == torch.float64
    assert said == []
