"""Two cards that PyTorch finds, on any machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stopdown.devices.device_choice import Device

CPU = Device("cpu", 0, "a CPU", None, 2**34)
V100 = Device("cuda", 0, "Tesla V100", (7, 0), 2**34)
T4 = Device("cuda", 1, "Tesla T4", (7, 5), 2**34)


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a V100 and a T4, as torch would describe it."""
    cards = [
        SimpleNamespace(name="Tesla V100", major=7, minor=0, total_memory=2**34),
        SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=2**34),
    ]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    monkeypatch.setattr(torch.version, "hip", None)
