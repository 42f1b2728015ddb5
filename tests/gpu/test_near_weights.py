"""Bounds whose products a real accelerator computes."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch

from device.simulated_device import KIND
from models.wide_models import check_bounds, make_encoder, make_transformer
from stopdown.devices.device_choice import Device
from stopdown.plans import near_weights
from stopdown.scaling.bounds.row_sums import sum_rows
from stopdown.scaling.bounds.singular_values import measure_sigma

pytestmark = [pytest.mark.thorough, pytest.mark.gpu]


@pytest.mark.parametrize("make", [make_transformer, make_encoder])
def test_bounds_are_those_of_the_processor(
    make: Any, accelerator: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of another order move no bound by more than their last digits, and all values are covered."""
    if accelerator.type not in near_weights.KINDS:
        monkeypatch.setattr(near_weights, "KINDS", (KIND, accelerator.type))
    check_bounds(*make(), accelerator)


def test_products_of_a_large_weight(
    accelerator: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row sums and singular value of a matrix of CogVideoX-5B; how many times as fast is printed."""
    weight = torch.randn(12288, 3072, generator=torch.Generator().manual_seed(0)).bfloat16()
    peak, found = torch.ones(1).double(), dict[str, tuple[float, float, torch.Tensor]]()
    for name in ("cpu", accelerator.torch_name):
        for _ in range(2):  # the first one loads kernels
            start = time.perf_counter()
            there = weight.to(name)
            sums, sigma = sum_rows(there, peak), measure_sigma(there)
            found[name] = time.perf_counter() - start, sigma, sums.absolute
    (slow, sigma, sums), (fast, other, more) = found.values()
    assert other == pytest.approx(sigma, rel=1e-4)
    torch.testing.assert_close(more, sums, rtol=1e-4, atol=0)
    with capsys.disabled():
        sys.stdout.write(
            f"\nBounds of a weight: {slow / fast:.1f} times as fast on {accelerator}\n"
        )
