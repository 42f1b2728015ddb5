"""Models that are loaded by a `StopdownConfig`, and comparisons of what they hold and return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import stopdown
from stopdown.fold_names import name_parameters
from stopdown.numerics import relative_l2

FP16 = torch.float16


def load_transformer(folder: Path, **options: Any) -> Any:
    """The transformer of a pipeline, by a config without a plan."""
    from diffusers import CogVideoXTransformer3DModel

    options = {"quantization_config": stopdown.StopdownConfig(), "dtype": FP16, **options}
    return CogVideoXTransformer3DModel.from_pretrained(folder, subfolder="transformer", **options)


def load_encoder(folder: Path, **options: Any) -> Any:
    """The text encoder of a pipeline, by a config without a plan."""
    from transformers import T5EncoderModel

    options = {"quantization_config": stopdown.StopdownConfig(), "dtype": FP16, **options}
    return T5EncoderModel.from_pretrained(folder, **options)


def have_same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Whether two models have the same tensors in the same dtypes."""
    mine, others = name_parameters(first), name_parameters(second)
    return mine.keys() == others.keys() and all(
        x.dtype == others[name].dtype and torch.equal(x, others[name]) for name, x in mine.items()
    )


def is_near(found: Any, wanted: Any, limit: float = 0.01) -> bool:
    """Whether something is finite and within a relative error of what fp32 gives."""
    given = (torch.as_tensor(x).float() for x in (found, wanted))
    return bool(relative_l2(*given) < limit)
