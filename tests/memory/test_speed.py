"""How fast a device computes and gets weights."""

from __future__ import annotations

import pytest
import torch

from stopdown.devices.device_choice import Device, choose_device
from stopdown.devices.device_profiles import find_profile
from stopdown.memory import speed as speeds
from stopdown.memory.speed import DISK_BYTES_PER_S, Speed, find_speed, measure_speed


def test_a_profile_is_as_fast_as_its_slowest_format() -> None:
    """A format that the device lacks, or has no rate for, gives none."""
    profile = find_profile("v100")
    fp16, both = find_speed(profile, ["fp16"]), find_speed(profile, ["fp16", "fp32"])
    assert fp16 is not None
    assert both is not None
    assert both.flops_per_s < fp16.flops_per_s
    assert "in fp32" in both.reason
    assert find_speed(profile, ["fp16", "fp8"]) is None


def test_weights_from_files_come_no_faster_than_a_disk() -> None:
    """A link that is slower already stays."""
    found = Speed(1e12, 12e9, "measured here.").read_from_disk()
    assert found.link_bytes_per_s == DISK_BYTES_PER_S
    assert found.reason == "measured here, and files at 0.5 GB/s."
    slow = Speed(1e12, 1e8, "measured here.")
    assert slow.read_from_disk() is slow


@pytest.mark.parametrize(
    ("answer", "why"), [(torch.OutOfMemoryError(), "has no room"), (1.0, "is too busy")]
)
def test_a_device_that_cannot_be_timed_keeps_the_order(
    monkeypatch: pytest.MonkeyPatch, answer: object, why: str
) -> None:
    """A full device and a busy machine give typical rates, with the reason."""

    def time_product(device: Device, name: str) -> float:
        if isinstance(answer, Exception):
            raise answer
        return 1.0

    monkeypatch.setattr(speeds, "_time_product", time_product)
    monkeypatch.setattr(speeds, "_COPIED_BYTES", 1024)
    found = measure_speed(choose_device("cpu"), ["fp32"])
    assert found.flops_per_s == speeds.ROUGH_FLOPS_PER_S
    assert why in found.reason
