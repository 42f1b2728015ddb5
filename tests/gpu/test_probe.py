"""Devices and formats on a real accelerator."""

from __future__ import annotations

import pytest
import torch

from stopdown.devices.device_choice import choose_device
from stopdown.devices.device_memory import peak_memory
from stopdown.devices.format_support import judge_device, probe_formats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def test_the_probe_agrees_with_the_maker() -> None:
    """A format that the compute capability calls native is not slower than fp32 here, if time tells."""
    device = choose_device("cuda")
    formats = probe_formats(device)
    for name, verdict in judge_device(device).items():
        assert formats[name].works
        assert formats[name].native == verdict.native
        ratio = formats[name].time_ratio
        assert ratio is None or not verdict.native or ratio < 1.3


def test_the_peak_is_that_of_the_allocator() -> None:
    """Memory that lives only inside the block is seen to the byte."""
    with peak_memory(choose_device("cuda")) as peak:
        before = torch.cuda.memory_allocated(0)
        block = torch.ones(2**20, device="cuda:0")
        del block
    assert peak.peak_bytes == before + 2**22
