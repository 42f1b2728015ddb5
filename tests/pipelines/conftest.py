"""A transformer that overflows and a call of it, for files that do not make their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stopdown.testing import make_pipeline


@pytest.fixture(scope="module")
def model() -> nn.Module:
    module: nn.Module = make_pipeline("cogvideox", overflow="transformer").transformer
    return module


@pytest.fixture(scope="module")
def given(model: Any) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 2, 4, 4, 4, generator=draw),
        "encoder_hidden_states": torch.randn(1, 8, model.config.text_embed_dim, generator=draw),
        "timestep": torch.tensor([500]),
    }
