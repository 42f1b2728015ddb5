"""Machines that tests put in the place of this one, and a cache for each test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own: each test probes again."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))


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
