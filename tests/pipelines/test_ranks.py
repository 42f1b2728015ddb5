"""What ranks agree on, how one that is gone is named, and guidance on two of them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from models.snapshots import assert_untouched
from processes.several_ranks import gather_results, run_ranks
from stopdown.errors import InputError, RankError
from stopdown.interception.patches import Patches
from stopdown.ranks.guidance import put_guidance_parallel
from stopdown.ranks.ranks import Ranks, find_group
from stopdown.testing import make_pipeline

ROUNDING = 64 * torch.finfo(torch.float32).eps


def agree(rank: int) -> dict[str, Any]:
    """Everything that ranks agree by, and what they refuse; then each row where it belongs."""
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
        "guided": [
            share_guidance("cogvideox", torch.float32),
            share_guidance("svd", torch.float64),  # from noise of 700, which makes rounding large
            share_guidance("wan", torch.float32),  # a call for each branch
            share_guidance("wan", torch.float32, guidance_scale=1.0, num_inference_steps=3),
        ],
    }


def share_guidance(
    name: str, dtype: torch.dtype, **options: Any
) -> tuple[float, int, bool, list[str]]:
    """Error of two ranks to one, calls that this one made, whether a group is found, what is announced."""
    pipe, told = make_pipeline(name, dtype=dtype), list[str]()
    calls: list[int] = []
    denoiser = pipe.unet if name == "svd" else pipe.transformer
    alone = make_latents(pipe, **options)
    with assert_untouched(pipe), Patches() as patches:
        put_guidance_parallel(pipe, patches, announce=told.append)
        part = next(denoiser.children())  # that each call enters once
        counting = part.register_forward_pre_hook(lambda *_: calls.append(1))
        shared, is_found = make_latents(pipe, **options), find_group(pipe) is not None
        counting.remove()
    error = float((shared - alone).abs().max() / alone.abs().max())
    return error, len(calls), is_found and find_group(pipe) is None, told


def make_latents(pipe: Any, **given: Any) -> torch.Tensor:
    sizes: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 9}
    prompt: dict[str, Any] = {"prompt": "a red ball"}
    if type(pipe).__name__ == "StableVideoDiffusionPipeline":
        from PIL import Image

        prompt = {"image": Image.new("RGB", (32, 32), "red")}
        sizes["num_frames"] = 2
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        options = {"num_inference_steps": 2, "generator": generator, "output_type": "latent"}
        return pipe(**{**prompt, **sizes, **options, **given})[0]


def test_ranks_agree_and_share_guidance() -> None:
    """One flag is a flag of all; differences are refused by name on all; rows give what one rank gives."""
    first, second = gather_results(run_ranks(agree, 2))
    for found in (first, second):
        assert found["flags"] == (False, True, True)
        assert [one["rank"] for one in found["gathered"]] == [0, 1]
        assert found["gathered"][1]["values"].tolist() == [1.0, 1.0]
        assert found["shared"] == "from 0"
        assert found["told"].startswith(
            "The ranks differ in their plan: hash is 'b' on rank 0 and 'a' on rank 1."
        )
        rows, frames, branches, single = found["guided"]
        assert rows[0] <= ROUNDING
        assert frames[0] <= 1e-12
        assert branches[0] == 0.0
        assert single[0] == 0.0
        assert [one[1] for one in found["guided"]] == [2, 2, 3, 3]  # Wan: four without sharing
        assert all(one[2] for one in found["guided"])
        assert [one[3] for one in (rows, frames, branches)] == [[], [], []]
        assert single[3] == [
            "`transformer` is called once a step, with rows that the ranks cannot share: every rank "
            "computes the whole call."
        ]


def lose(rank: int, how: str) -> str:
    """Exchange until rank 1 is gone or fails; what the others are told."""
    pipe, ranks = make_pipeline("cogvideox"), Ranks()
    with Patches() as patches:
        put_guidance_parallel(pipe, patches)
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

    Pipeline.components["transformer"].stopdown_group = "left behind"
    assert not dist.is_initialized()
    assert find_group(Pipeline()) is None
