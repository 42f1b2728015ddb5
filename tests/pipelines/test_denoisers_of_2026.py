"""Denoisers of the families of 2026: made to overflow, rescaled, and held against bf16."""

from __future__ import annotations

import pytest
import torch

from models.rescaling_models import DENOISERS_OF_2026, WAYS, make_example, run_calls, scale_weights
from stopdown.numerics import measure_amax, relative_l2
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.rescale import rescale_

TIMES_AS_WEIGHTS = ("MiniMax Music 3", "ACE-Step 1.5")
"""Their pipelines bring times to the dtype of the weights."""


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", DENOISERS_OF_2026)
def test_a_denoiser_of_2026_is_exact_in_fp32_and_nearer_than_bf16_in_fp16(name: str) -> None:
    """With weights of its first way to overflow times 4096, its bits stay and fp16 is as near as bf16."""
    module, calls = make_example(name)
    least_dim = 1 if name in TIMES_AS_WEIGHTS else 2
    way = WAYS[DENOISERS_OF_2026[name].ways[0]]
    assert scale_weights(module, way, 12)
    reference = run_calls(calls, torch.float32)
    assert all(x.isfinite().all() for x in reference)
    with cast_(module, torch.bfloat16):
        rough = run_calls(calls, torch.bfloat16, least_dim)
    [(_, args, kwargs)] = calls
    rescaling = rescale_(module, args, kwargs)
    assert all(map(torch.equal, run_calls(calls, torch.float32), reference))
    cast_(module, torch.float16, rescaling)
    near = run_calls(calls, torch.float16, least_dim)
    assert all(measure_amax(x) < float("inf") for x in near)
    worst = max(relative_l2(x.float(), y) for x, y in zip(near, reference, strict=True))
    assert worst <= max(relative_l2(x.float(), y) for x, y in zip(rough, reference, strict=True))
