"""What tests of several folders share: tiny pipelines that are saved once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny pipeline, by name, stored format and overflowing component."""
    from stopdown import testing
    from stopdown.formats import FORMATS

    root = tmp_path_factory.mktemp("tiny")

    @functools.cache
    def save(name: str, stored: str = "bf16", overflow: str | None = None) -> Path:
        folder = root / f"{name}-{stored}-{overflow}"
        dtype = FORMATS[stored].torch_dtype
        return testing.save_pipeline(name, folder, dtype=dtype, overflow=overflow)

    return save
