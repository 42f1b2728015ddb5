"""Pipelines loaded in a precision for each call: the same at their borders as under a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import stopdown


def ask(pipe: Any) -> torch.dtype:
    """What a pipeline's own code reads before it casts what an encoder returned."""
    found: torch.dtype = pipe.transformer.dtype
    return found


def test_values_of_a_wide_encoder_are_not_cast_between_components(
    save_tiny: Callable[..., Path],
) -> None:
    """Beside an encoder in fp32, a denoiser in plain fp16 reports fp32 to the pipeline, as under a plan."""
    given: dict[str, Any] = {"device": "cpu", "guard": False}
    folder = save_tiny("cogvideox", "fp32")
    mixed = stopdown.load(folder, precision="text_encoder=fp32,transformer=fp16-plain", **given)
    assert {x.dtype for x in mixed.transformer.parameters()} == {torch.float16}
    assert ask(mixed) == torch.float32
    assert ask(stopdown.load(folder, precision="fp16-plain", **given)) == torch.float16
