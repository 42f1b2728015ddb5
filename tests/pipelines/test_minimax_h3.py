"""MiniMax H3's attention sinks, at the magnitudes that users of a V100 reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import stopdown
from stopdown.numerics import relative_l2

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import minimax_h3 as h3

SHORT = h3.PUBLISHED | h3.CASES["depth"] | {"num_layers": 4, "num_refiner_layers": 1}


@pytest.mark.thorough
def test_sinks_beside_small_rows_stay_closer_to_fp32_than_bf16() -> None:
    """Rows from 81 thousand to 4.3 million: plain fp16 is NaN, and repaired it is nearer than bf16."""
    call = h3.make_call(SHORT)
    factors = h3.Calibration(SHORT, call).factors
    reference, stream = h3.measure_stream(h3.build(SHORT, factors), call)
    assert stream["sinks"][0] == pytest.approx(h3.FIRST, rel=0.05)
    assert stream["sinks"][-1] == pytest.approx(h3.LAST, rel=0.2)
    assert stream["others"][-1] < h3.LAST / 1000
    results = {
        name: h3.run_variant(h3.build(SHORT, factors), call, reference, variant)
        for name, variant in h3.VARIANTS.items()
    }
    assert results["fp16"]["video"] is None
    for name in ("rescaled", "rescaled, fp32 residual"):
        assert results[name]["exact"]
        assert results[name]["video"] < results["bf16"]["video"] / 2
        assert results[name]["audio"] < results["bf16"]["audio"] / 2


@pytest.mark.thorough
def test_a_guard_repairs_the_sinks() -> None:
    """A transformer that is loaded in fp16 and guarded gives a finite result near that of fp32."""
    call = h3.make_call(SHORT)
    factors = h3.Calibration(SHORT, call).factors
    reference = h3.run(h3.build(SHORT, factors), call, torch.float32)
    module = h3.build(SHORT, factors)
    h3.lower(module, torch.float16)
    with pytest.warns(stopdown.StopdownWarning), stopdown.guard(module) as guard:
        video, audio = h3.run(module, call, torch.float16)
    assert guard.repairs
    assert relative_l2(video, reference[0]) < 0.02
    assert relative_l2(audio, reference[1]) < 0.02
