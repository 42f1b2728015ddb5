"""Storages counted while code runs without weights, against PyTorch's own allocator."""

from __future__ import annotations

import pytest
import torch

from models.memory_runs import LimitedTracker, measure_allocator
from stopdown.memory import allocation_tracker
from stopdown.memory.allocation_tracker import StorageTracker


def count_call(module: torch.nn.Module, *args: torch.Tensor) -> int:
    tracker = StorageTracker()
    tracker.ignore([*module.parameters(), *args])
    with torch.no_grad(), tracker:
        module(*args)
    return tracker.peak_bytes


def make_stack() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4)
    )


@torch.no_grad()
def test_a_call_takes_what_the_allocator_says() -> None:
    """Counted storages of a call give the allocator's own peak, to the byte."""
    module, given = make_stack(), torch.randn(32, 8)
    assert count_call(module, given) == measure_allocator(lambda: module(given))


@torch.no_grad()
def test_what_dies_is_given_back() -> None:
    """After the outputs are gone nothing is counted as alive."""
    module, given = make_stack(), torch.randn(32, 8)
    tracker = StorageTracker()
    tracker.ignore([*module.parameters(), given])
    with tracker:
        output = module(given)
        assert tracker.live_bytes == output.numel() * 4
        del output
    assert tracker.live_bytes == 0


@torch.no_grad()
def test_columns_of_a_convolution_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unfolded input of a plain convolution is in the peak, and not when nobody counts it."""
    module, given = torch.nn.Conv3d(4, 4, 3, padding=1), torch.randn(1, 4, 3, 8, 8)
    measured = measure_allocator(lambda: module(given))
    assert count_call(module, given) == measured
    monkeypatch.setattr(allocation_tracker, "count_workspace", lambda *_: 0)
    assert count_call(module, given) < 0.1 * measured


@torch.no_grad()
@pytest.mark.parametrize(("flags", "channels"), [({"avx512_bw"}, 16), (set(), 8)])
def test_blocks_of_a_convolution_are_those_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], channels: int
) -> None:
    """oneDNN rounds three channels up to what a register holds: the copy of its output says so."""
    monkeypatch.setattr(allocation_tracker, "read_cpu_flags", lambda: flags)
    monkeypatch.setattr(allocation_tracker, "_select_backend", lambda *_: "ConvBackend.Mkldnn")
    module, given = torch.nn.Conv2d(3, 3, 1), torch.randn(1, 3, 8, 8)
    blocked = 64 * channels * 4
    assert count_call(module, given) == blocked + 64 * 3 * 4


@torch.no_grad()
def test_the_peak_is_what_a_device_has_to_have() -> None:
    """With room for the peak a call runs, with one byte less it does not."""
    module, given = make_stack(), torch.randn(32, 8)
    peak = count_call(module, given)

    def run(limit: int) -> None:
        tracker = LimitedTracker()
        tracker.limit_bytes = limit
        tracker.ignore([*module.parameters(), given])
        with tracker:
            module(given)

    run(peak)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory: tried to allocate"):
        run(peak - 1)
