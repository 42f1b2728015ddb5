"""Tiny real pipelines for tests and examples, with overflow on demand.

`make_pipeline` and `save_pipeline` build pipelines of real Diffusers classes with small random weights.
With `overflow`, one component overflows in fp16 only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stopdown.component_calls.components import find_components
from stopdown.interception.patches import Patches
from stopdown.pipelines.tiny_pipelines import build_pipeline, list_tiny_pipelines, overflow_
from stopdown.sources.library_messages import drop_empty_remarks

PIPELINE_NAMES = list_tiny_pipelines()
"""Names of the pipelines that `make_pipeline` and `save_pipeline` can build."""


def make_pipeline(
    name: str,
    *,
    overflow: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Make a tiny pipeline of real Diffusers classes with random weights.

    Args:
        name: one of `PIPELINE_NAMES`.
        overflow: component (`transformer`, `text_encoder`, `vae`…) that overflows in fp16 only.
        seed: seed of the weights.
        dtype: dtype of the weights.

    Raises:
        ValueError: the name is unknown, or there is no rule to make the component overflow.
    """
    if name not in PIPELINE_NAMES:
        raise ValueError(f"no tiny pipeline is called {name!r}; known: {', '.join(PIPELINE_NAMES)}")
    pipe = build_pipeline(name, seed=seed)
    if overflow is not None:
        overflow_(getattr(pipe, overflow, None))
    with Patches() as patches:
        drop_empty_remarks(patches)
        for component in find_components(pipe).values():
            component.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save_pipeline(
    name: str,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    overflow: str | None = None,
    seed: int = 0,
) -> Path:
    """Save a tiny pipeline to a folder in the layout of Diffusers, and return the folder's path."""
    make_pipeline(name, overflow=overflow, seed=seed, dtype=dtype).save_pretrained(folder)
    return Path(folder)
