"""What a caching allocator reserves, by replaying a dry run."""

from __future__ import annotations

import pytest
import torch

from stopdown.interception.patches import Patches
from stopdown.memory.caching_allocator import WORKSPACE_BYTES, CachingAllocator, OutOfMemory
from stopdown.memory.reserved import count_reserved, replay
from stopdown.memory.run_memory import MemoryListener, RunMemory, listen_to_run
from stopdown.memory.smaller_calls import put_variant
from stopdown.memory.strategies import PLACEMENTS, Placement, Strategy, predict
from stopdown.pipelines.dry_run import make_arguments
from stopdown.pipelines.skeletons import copy_skeleton
from stopdown.testing import make_pipeline

MIB = 2**20


def listen(strategy: Strategy) -> RunMemory:
    pipe = copy_skeleton(make_pipeline("cogvideox", dtype=torch.float16))
    pipe.set_progress_bar_config(disable=True)
    arguments = {**make_arguments(pipe), "num_inference_steps": 2}
    with Patches() as patches:
        put_variant(pipe, strategy, patches)
        return listen_to_run(pipe, arguments, MemoryListener(on_cpu=False, sign=strategy.sign))


@pytest.mark.thorough
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_allocated_in_the_replay_is_what_was_forecast(placement: Placement) -> None:
    """The replay holds the peak of the forecast but for rounding, and nothing but weights at the end."""
    strategy = Strategy(placement)
    run = listen(strategy)
    allocator = CachingAllocator()
    replay(run, strategy, allocator, workspace_bytes=0)
    peak = predict(run, strategy, steps=2).peak_bytes
    assert peak * 0.98 <= allocator.peak_allocated_bytes <= peak * 1.15
    assert allocator.reserved_bytes >= allocator.peak_allocated_bytes
    weights = sum(size for size, _ in run.totals.values())
    assert allocator.allocated_bytes <= weights * 1.1 + run.between_bytes


@pytest.mark.thorough
def test_a_run_stays_within_what_is_said_to_be_reserved() -> None:
    """Under the limit that is forecast the replay ends, and a segment below it memory runs out."""
    strategy = Strategy("component")
    run = listen(strategy)
    least = count_reserved(run, strategy)
    replay(run, strategy, CachingAllocator(least))
    with pytest.raises(OutOfMemory, match="bytes beside"):
        replay(run, strategy, CachingAllocator(least - 2 * MIB))
    assert count_reserved(run, strategy, workspace_bytes=0) <= least
    assert least >= predict(run, strategy, steps=2).peak_bytes + WORKSPACE_BYTES
    assert count_reserved(run, strategy, expandable=True) < 2 * least
