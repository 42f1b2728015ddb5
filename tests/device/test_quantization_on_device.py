"""Models that a `quantization_config` loaded, moved to an accelerator and offloaded from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stopdown
from device.simulated_device import KIND, Simulated
from models.pipeline_calls import call_pipeline

pytestmark = pytest.mark.thorough

HOST = torch.device("cpu")


def move(pipe: Any) -> None:
    pipe.to(KIND)


def offload_models(pipe: Any) -> None:
    pipe.enable_model_cpu_offload(device=KIND)


def offload_groups(pipe: Any) -> None:
    pipe.enable_group_offload(
        onload_device=torch.device(KIND), offload_device=HOST, offload_type="leaf_level"
    )


@pytest.mark.parametrize("place", [move, offload_models, offload_groups])
def test_placed_models_make_the_same(
    place: Callable[[Any], None],
    simulated: Simulated,
    save_tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Moved or offloaded by Diffusers, an overflowing pipeline gives what it gives on the host."""
    from diffusers import DiffusionPipeline

    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    folder = save_tiny("cogview3plus", overflow="transformer")
    config = stopdown.quantization(folder)
    pixels = []
    for step in (None, place):
        pipe = DiffusionPipeline.from_pretrained(
            folder, dtype=torch.float16, quantization_config=config
        )
        pipe.set_progress_bar_config(disable=True)
        if step is not None:
            step(pipe)
        before = simulated.counts.operations
        pixels.append(call_pipeline(pipe, "cogview3plus"))
        assert (simulated.counts.operations > before) == (step is not None)
    assert np.isfinite(pixels[1]).all()
    np.testing.assert_allclose(pixels[1], pixels[0], atol=2e-3)
