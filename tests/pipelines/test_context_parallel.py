"""One call of a transformer over several ranks: the same result, and off again without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.snapshots import assert_untouched
from processes.several_ranks import call_small, gather_results, make_with_heads, run_ranks
from stopdown.component_calls.step_caches import in_full, is_spread
from stopdown.errors import OptionError
from stopdown.interception.patches import Patches
from stopdown.ranks.context_parallel import (
    REPLACED,
    CogVideoXAttnProcessor,
    find_plan,
    put_context_parallel,
)
from stopdown.testing import make_pipeline

ROUNDING = 64 * torch.finfo(torch.float32).eps
"""Sums of the same products in another order, through a few layers and steps, relative to the largest."""


def make_latents(pipe: Any) -> torch.Tensor:
    return call_small(pipe, output_type="latent")


def compare(rank: int, name: str, heads: int) -> dict[str, Any]:
    """What one rank alone and all together give, before, while and after the call is spread."""
    pipe = make_with_heads(name, heads)
    alone = make_latents(pipe)
    with assert_untouched(pipe), Patches() as patches:
        config = put_context_parallel(pipe.transformer, patches)
        spread, was_spread = make_latents(pipe), is_spread(pipe.transformer)
        with in_full(pipe.transformer):
            bare = make_latents(pipe)
    return {
        "alone": alone,
        "spread": spread,
        "bare": bare,
        "again": make_latents(pipe),
        "uneven": config.ulysses_anything,
        "is_spread": (was_spread, is_spread(pipe.transformer)),
    }


def compare_all(rank: int, cases: tuple[tuple[str, int], ...]) -> list[dict[str, Any]]:
    return [compare(rank, *case) for case in cases]


def check_cases(cases: tuple[tuple[str, int], ...], ranks: int, uneven: tuple[str, ...]) -> None:
    results = gather_results(run_ranks(compare_all, ranks, cases))
    for case, found in zip(cases, zip(*results, strict=True), strict=True):
        first = found[0]
        for other in found:
            assert torch.equal(other["spread"], first["spread"]), case  # the same on all ranks
            assert torch.equal(other["bare"], other["alone"]), case
            assert torch.equal(other["again"], other["alone"]), case
            assert other["is_spread"] == (True, False)
        error = (first["spread"] - first["alone"]).abs().max() / first["alone"].abs().max()
        assert error <= (0.0 if case[0] == "wan" else ROUNDING), case
        assert first["uneven"] == (case[0] in uneven), case


@pytest.mark.thorough
def test_two_ranks_give_what_one_gives() -> None:
    """fp32: Wan bit for bit; CogVideoX and CogView3-Plus, whose keys stand in another order, nearly."""
    check_cases((("cogvideox", 2), ("cogview3plus", 2), ("wan", 2)), 2, ())


@pytest.mark.slow
def test_three_ranks_split_what_three_does_not_divide() -> None:
    """Sixteen text tokens, sixteen or twelve others, and heads in a padded share, over three ranks."""
    cases = (("cogvideox", 6), ("cogview3plus", 6), ("cogvideox", 5), ("wan", 6))
    check_cases(cases, 3, ("cogvideox", "cogview3plus"))


@pytest.mark.parametrize("fused", [False, True])
def test_the_processor_is_that_of_diffusers_on_one_rank(fused: bool) -> None:
    """Without ranks the processor that can be spread gives the bits of the one that it replaces."""
    pipe = make_pipeline("cogvideox")
    if fused:
        pipe.transformer.fuse_qkv_projections()
    before = make_latents(pipe)
    assert isinstance(next(iter(pipe.transformer.attn_processors.values())), REPLACED)
    pipe.transformer.set_attn_processor(CogVideoXAttnProcessor())
    assert torch.equal(make_latents(pipe), before)


def test_a_transformer_without_a_plan_is_refused() -> None:
    """The message says who has one, and what to do with several devices."""
    with pytest.raises(
        OptionError, match=r"UNetSpatioTemporal.* has a context-parallel plan"
    ) as told:
        find_plan(make_pipeline("svd").unet)
    assert "CogView3PlusTransformer2DModel" in str(told.value)
    assert "stopdown batch" in str(told.value)


def plan_and_spread(rank: int, source: str, plan_path: str) -> dict[str, float]:
    """How far fp16 by a plan lies from fp32 with one rank and with all, and whether fp16 needs the plan."""
    import stopdown

    size = {"height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 16}
    given: dict[str, Any] = {
        "prompt": "a red circle",
        "num_inference_steps": 3,
        "output_type": "pt",
    }

    def call(pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        with torch.no_grad():
            return pipe(**given, **size, generator=torch.Generator().manual_seed(0))[0].float()

    wide = stopdown.load(source, precision="fp32", device="cpu")
    reference = call(wide)
    with Patches() as patches:
        put_context_parallel(wide.transformer, patches)
        spread_wide = call(wide)
    raw = call(stopdown.load(source, precision="fp16-plain", device="cpu"))
    pipe = stopdown.load(source, precision=plan_path, device="cpu")
    alone = call(pipe)
    with Patches() as patches:
        put_context_parallel(pipe.transformer, patches)
        with stopdown.guard(pipe, announce=lambda text: None) as guarding:
            spread = call(pipe)
    return {
        "fp32": float((spread_wide - reference).abs().max()),
        "alone": float((alone - reference).square().mean().sqrt()),
        "spread": float((spread - reference).square().mean().sqrt()),
        "raw is finite": bool(raw.isfinite().all()),
        "repairs": len(guarding.repairs),
    }


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("count", [2, 3])
def test_shapes_in_fp16_by_a_plan_is_as_near_to_fp32_as_on_one_rank(
    count: int, tmp_path: Path
) -> None:
    """The bundled model: fp32 within rounding, fp16 by its plan without a fault and no farther away."""
    from stopdown.pipelines.requests import Request
    from stopdown.plans.calibrated import measure_plan
    from stopdown.plans.plan_files import write_plan
    from stopdown.sources.sources import resolve_source

    request = Request(prompt="a red circle", steps=3, frames=9, height=64, width=64)
    plan = measure_plan(resolve_source("shapes"), request=request)
    path = write_plan(plan, tmp_path / "plan.json")
    for found in gather_results(
        run_ranks(plan_and_spread, count, "shapes", str(path), limit_s=1200)
    ):
        assert found["fp32"] < 1e-4
        assert not found["raw is finite"]
        assert found["repairs"] == 0
        assert 0 < found["spread"] <= 1.5 * found["alone"], found
