"""The model of PyTorch's caching allocator, and what a run reserves by it.

The traces are sequences of allocations and frees with what the allocator's source says must come of them
(`c10/cuda/CUDACachingAllocator.cpp`: the constants, `round_size`, `get_allocation_size`, `should_split`,
`get_free_block`, `free_block`, `release_cached_blocks`); the sizes of the first two groups are those that
PyTorch's own `test_cuda.py` allocates. They were worked out by hand, not recorded on a card.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stopdown.devices.device_profiles import find_device_target
from stopdown.memory.allocation_tracker import count_sums
from stopdown.memory.caching_allocator import (
    HOPPER_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    CachingAllocator,
    OutOfMemory,
    find_workspace,
)
from stopdown.memory.forecast import Fit, choose_prediction
from stopdown.memory.strategies import Prediction, Strategy

MIB = 2**20
KIB = 2**10

TRACES: dict[str, tuple[str, tuple[int, int, int]]] = {
    # what is asked for (in bytes, or in KiB and MiB by k and m), `-N` frees the Nth; then MiB or bytes
    "one byte": ("1", (512, 2 * MIB, 1)),
    "nothing": ("0", (0, 0, 0)),
    "512 bytes": ("512", (512, 2 * MIB, 1)),
    "513 bytes": ("513", (1024, 2 * MIB, 1)),
    "one MiB is small": ("1m", (MIB, 2 * MIB, 1)),
    "two of one MiB fill a small segment": ("1m 1m", (2 * MIB, 2 * MIB, 1)),
    "a third of one MiB takes another": ("1m 1m 1m", (3 * MIB, 4 * MIB, 2)),
    "a byte more than one MiB is large": ("1048577", (MIB + 512, 20 * MIB, 1)),
    "two of 9 MiB share 20": ("9m 9m", (18 * MIB, 20 * MIB, 1)),
    "a third of 9 MiB does not": ("9m 9m 9m", (27 * MIB, 40 * MIB, 2)),
    "10 MiB has a segment of its own": ("10m", (10 * MIB, 10 * MIB, 1)),
    "large segments are of 2 MiB": ("11m", (12 * MIB, 12 * MIB, 1)),
    "more than one MiB left stays free": ("12m -1 10m", (10 * MIB, 12 * MIB, 1)),
    "one MiB left is handed out": ("12m -1 11m", (12 * MIB, 12 * MIB, 1)),
    "small and large do not mix": ("10m -1 1m", (MIB, 12 * MIB, 2)),
    "best fit": ("30m 20m -1 -2 19m 25m", (44 * MIB + MIB, 50 * MIB, 2)),
    "neighbours are merged": ("6m 6m 8m -1 -2 12m", (20 * MIB, 20 * MIB, 1)),
    "segments are not": ("12m 12m -1 -2 24m", (24 * MIB, 48 * MIB, 3)),
    "a block in between keeps two apart": ("6m 6m 8m -1 -3 12m", (18 * MIB, 32 * MIB, 2)),
    "cached segments go back when memory runs out": ("12m 12m -1 -2 90m", (90 * MIB, 90 * MIB, 1)),
    "what is split stays": ("12m -1 10m 60m -3 95m", (0, 0, -1)),
    "it is left to fail": ("60m 41m", (0, 0, -1)),
    "test_cuda: 1, 10 x 20, 200 x 300 x 2000 floats": (
        "4 800 480000000",
        (512 + 1024 + 458 * MIB, 460 * MIB, 2),
    ),
    "a clip's weights and two streams": (
        "218103808 218103808 -1 431308800 -2",
        (412 * MIB, 2 * 208 * MIB + 412 * MIB, 3),
    ),
}
"""Limit of 100 MiB but for the last two; -1 segments: memory runs out."""


def play(text: str, allocator: CachingAllocator) -> CachingAllocator:
    blocks: list[Any] = []
    for word in text.split():
        if word.startswith("-"):
            allocator.free(blocks[int(word[1:]) - 1])
            blocks.append(None)
        else:
            unit = {"k": KIB, "m": MIB}.get(word[-1], 1)
            blocks.append(allocator.allocate(int(word.rstrip("km")) * unit))
    return allocator


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_comes_to_what_the_rules_say(name: str) -> None:
    """Allocated, reserved and segments follow from the allocator's published rules."""
    text, expected = TRACES[name]
    limit = 2000 * MIB if "test_cuda" in name or "clip" in name else 100 * MIB
    allocator = CachingAllocator(limit)
    if expected[2] < 0:
        with pytest.raises(OutOfMemory, match="bytes beside"):
            play(text, allocator)
        return
    play(text, allocator)
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.segments) == expected


@pytest.mark.parametrize(
    ("text", "reserved"),
    [
        ("1", 2 * MIB),
        ("9m 9m 9m", 40 * MIB),
        ("12m -1 24m", 40 * MIB),
        ("12m 12m -1 -2 24m", 40 * MIB),
        ("12m -1 11m 1m", 22 * MIB),
        ("30m 30m -1 50m", 100 * MIB),
        ("30m 30m -1 -2 60m", 60 * MIB),
    ],
)
def test_an_expandable_segment_grows_by_pages(text: str, reserved: int) -> None:
    """What is next to each other in an expandable segment is one block, and its end grows by pages."""
    assert play(text, CachingAllocator(100 * MIB, expandable=True)).reserved_bytes == reserved


@pytest.mark.parametrize("expandable", [False, True])
def test_books_are_kept_over_a_long_trace(expandable: bool) -> None:
    """Over thousands of calls, reserved holds allocated, and all of it goes back in the end."""
    draw = random.Random(1)
    allocator = CachingAllocator(0, expandable=expandable, grows=True)
    alive: list[tuple[int, Any]] = []
    for _ in range(4000):
        if alive and draw.random() < 0.5:
            allocator.free(alive.pop(draw.randrange(len(alive)))[1])
        else:
            size = int(2 ** draw.uniform(0, 25))
            alive.append((size, allocator.allocate(size)))
        assert allocator.allocated_bytes >= sum(size for size, _ in alive[-3:])
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= (allocator.limit_bytes or 0)
    for _, block in alive:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.release()
    assert (allocator.reserved_bytes, allocator.segments) == (0, 0)


def test_a_strategy_is_chosen_by_what_it_reserves() -> None:
    """A strategy whose tensors fit and whose segments do not is passed over."""
    first = Prediction(Strategy("component"), 90, "transformer", 0, 0, reserved_bytes=120)
    second = Prediction(Strategy("block"), 80, "transformer", 0, 0, reserved_bytes=85)
    assert choose_prediction(Fit((first, second)), 100) is second
    assert (
        choose_prediction(Fit((dataclasses.replace(first, reserved_bytes=0), second)), 100)
        is not second
    )


@pytest.mark.parametrize(
    ("name", "expected"), [("t4", WORKSPACE_BYTES), ("mps-m1", None), ("cpu", None)]
)
def test_the_workspace_is_that_of_the_device(name: str, expected: int | None) -> None:
    """cuBLAS takes 8.1 MiB; a Mac and a CPU have other allocators."""
    assert find_workspace(find_device_target(name)[1]) == expected


def test_the_workspace_of_hopper_is_larger() -> None:
    """cuBLAS takes 32 MiB on compute capability 9.0."""
    assert find_workspace(find_device_target("h100")[1]) == HOPPER_WORKSPACE_BYTES


def test_the_run_that_ran_out_of_memory_on_a_card_is_explained() -> None:
    """By what is reserved, the strategies that failed on the H200 do not fit; the one that held does."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "memory_reserved.json"
    found = json.loads(path.read_text())["results"]["CogVideoX-5B"]
    rows = {row["name"]: row for row in found["strategies"]}
    usable = found["limit_bytes"] * found["usable_share"]
    assert found["forecast_then"]["strategy"] == found["chosen_by_tensors"] == "component+tiling"
    for name in ("component+tiling", "component+tiling+4 pieces"):
        assert rows[name]["peak_bytes"] <= usable
        assert rows[name]["reserved_bytes"] > found["limit_bytes"]
    assert rows[found["ended_with"]]["reserved_bytes"] <= usable
    assert rows[found["chosen_by_reserved"]]["reserved_bytes"] <= usable
    assert found["chosen_by_reserved"].startswith("block+tiling")


def test_wide_heads_take_sums_in_fp32() -> None:
    """Attention over 512 values a head keeps its sums in memory, over 64 in registers."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    wide, narrow = (torch.empty(1, 2, 30, width, device="meta") for width in (512, 64))
    assert count_sums(kernel, (wide,) * 3) == 2 * 30 * 512 * 4
    assert count_sums(kernel, (narrow,) * 3) == 0
    assert count_sums(torch.ops.aten.add.Tensor, (wide,) * 3) == 0
