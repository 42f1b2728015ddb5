"""Tiny pipelines: their weights, and components that are made to overflow in fp16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.tiny_calls import run
from stopdown import testing

OVERFLOWS: list[Any] = [
    ("cogvideox", "text_encoder"),
    ("cogvideox", "transformer"),
    ("cogvideox", "vae"),
    pytest.param("cogvideox-image", "transformer", marks=pytest.mark.slow),
    pytest.param("cogvideox-video", "vae", marks=pytest.mark.slow),
    pytest.param("cogview3plus", "text_encoder", marks=pytest.mark.slow),
    ("cogview3plus", "transformer"),
    pytest.param("cogview3plus", "vae", marks=pytest.mark.slow),
    ("svd", "image_encoder"),
    ("svd", "unet"),
    pytest.param("svd", "vae", marks=pytest.mark.slow),
    ("sd", "unet"),
    pytest.param("sd", "vae", marks=pytest.mark.slow),
    pytest.param("sdxl", "unet", marks=pytest.mark.slow),
    ("flux", "transformer"),
    pytest.param("wan", "text_encoder", marks=pytest.mark.slow),
    ("wan", "transformer"),
]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(("name", "component"), OVERFLOWS)
def test_overflow_is_wrong_in_fp16_only(name: str, component: str) -> None:
    """An overflowing component keeps bf16 close to fp32, and gives NaN in fp16."""
    pixels = {
        dtype: run(testing.make_pipeline(name, overflow=component, dtype=dtype), name)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    difference = pixels[torch.bfloat16] - pixels[torch.float32]
    assert np.sqrt(np.mean(difference**2)) < 0.03
    assert np.isnan(pixels[torch.float16]).all()


@pytest.mark.parametrize(("name", "component"), OVERFLOWS)
def test_overflowing_weights_fit_into_fp16(name: str, component: str) -> None:
    """It is the activations that overflow: no weight becomes Inf when it is cast."""
    module = getattr(testing.make_pipeline(name, overflow=component), component)
    largest = max(float(tensor.abs().max()) for tensor in module.parameters())
    assert largest <= 32768


def test_a_stream_can_be_scaled_without_changing_the_picture() -> None:
    """The overflow of a CogVideoX transformer and VAE leaves fp32 pixels as they were."""
    reference = run(testing.make_pipeline("cogvideox"), "cogvideox")
    for component in ("transformer", "vae"):
        pixels = run(testing.make_pipeline("cogvideox", overflow=component), "cogvideox")
        np.testing.assert_allclose(pixels, reference, atol=2e-3)


def test_the_seed_decides_the_weights_and_leaves_the_global_state() -> None:
    """Equal seeds give equal weights, others do not, and torch's own state does not move."""
    state = torch.get_rng_state()
    first, again, other = (testing.make_pipeline("cogview3plus", seed=seed) for seed in (0, 0, 1))
    weights = [pipe.transformer.proj_out.weight for pipe in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("component", ["scheduler", "decoder"])
def test_what_no_rule_makes_overflow_is_refused(component: str) -> None:
    """Nor does a component that the pipeline lacks."""
    with pytest.raises(ValueError, match="no rule makes"):
        testing.make_pipeline("sd", overflow=component)
