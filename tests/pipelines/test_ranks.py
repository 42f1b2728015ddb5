"""What ranks agree on, and how one that is gone is named."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from processes.several_ranks import gather_results, run_ranks
from stopdown.errors import InputError, RankError
from stopdown.ranks.ranks import Ranks, find_group

pytestmark = pytest.mark.thorough


def agree(rank: int) -> dict[str, Any]:
    """Everything that ranks agree by, and what they refuse."""
    ranks = Ranks()
    told = ""
    try:
        ranks.refuse_differences(
            "plan", {"hash": "a" if rank else "b", "version": 1}, "Start anew."
        )
    except InputError as error:
        told = str(error)
    ranks.refuse_differences("plan", {"hash": "a"}, "Start anew.")
    return {
        "flags": ranks.agree(False, rank == 1, True),
        "gathered": ranks.gather({"rank": rank, "values": torch.full((2,), float(rank))}),
        "shared": ranks.share(f"from {rank}"),
        "told": told,
    }


def test_ranks_agree() -> None:
    """One flag is a flag of all; differences are refused by name on all."""
    first, second = gather_results(run_ranks(agree, 2))
    for found in (first, second):
        assert found["flags"] == (False, True, True)
        assert [one["rank"] for one in found["gathered"]] == [0, 1]
        assert found["gathered"][1]["values"].tolist() == [1.0, 1.0]
        assert found["shared"] == "from 0"
        assert found["told"].startswith(
            "The ranks differ in their plan: hash is 'b' on rank 0 and 'a' on rank 1."
        )


def lose(rank: int, how: str) -> str:
    """Exchange until rank 1 is gone or fails; what the others are told."""
    ranks = Ranks()
    try:
        with ranks.running():
            for step in range(1000):
                ranks.agree(False)
                if rank == 1 and step == 5:
                    if how == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError("the prompt is too long")
    except RankError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_rank_that_is_gone_ends_the_others(how: str) -> None:
    """They end at once, with what to do, and not with PyTorch's error about a connection."""
    begun = time.monotonic()
    outcomes = run_ranks(lose, 3, how)
    assert time.monotonic() - begun < 240
    assert outcomes[1].code == (-signal.SIGKILL if how == "killed" else 1)
    for rank in (0, 2):
        said = outcomes[rank].result
        assert said.startswith("Another rank is gone: it failed, was killed, or lost its network (")
        assert "Start the run again" in said


def test_no_group_is_found_without_one() -> None:
    """A single process has no ranks, whatever is on its pipeline."""

    class Pipeline:
        components: ClassVar = {"transformer": torch.nn.Linear(1, 1)}

    Pipeline.components["transformer"]._parallel_config = "left behind"
    assert not dist.is_initialized()
    assert find_group(Pipeline()) is None
