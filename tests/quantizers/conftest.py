"""The pipeline that tests of `quantization_config` load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stopdown import testing


@pytest.fixture(scope="session")
def cogvideox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose transformer and text encoder overflow, as Diffusers saves it."""
    folder = tmp_path_factory.mktemp("models") / "cogvideox"
    pipe = testing.make_pipeline("cogvideox", overflow="transformer")
    testing.overflow_(pipe.text_encoder)
    for part in (pipe.transformer, pipe.text_encoder, pipe.vae):
        part.to(torch.bfloat16)
    pipe.save_pretrained(folder)
    return folder
