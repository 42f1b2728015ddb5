"""A dry run that several tests of memory read."""

from __future__ import annotations

import pytest
import torch

from stopdown.memory.run_memory import RunMemory, listen_to_run
from stopdown.pipelines.skeletons import build_skeleton
from stopdown.sources.sources import resolve_source
from stopdown.testing import save_pipeline


@pytest.fixture(scope="module")
def dry_run_sd(tmp_path_factory: pytest.TempPathFactory) -> RunMemory:
    """What a tiny Stable Diffusion takes."""
    folder = save_pipeline("sd", tmp_path_factory.mktemp("sd") / "m", dtype=torch.float32)
    empty = build_skeleton(resolve_source(folder), {})
    arguments = {"prompt": "a", "num_inference_steps": 2, "height": 64, "width": 64}
    return listen_to_run(empty, {**arguments, "output_type": "np"})
