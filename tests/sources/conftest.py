"""The folder that tests of sources damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def saved(save_tiny: Callable[..., Path]) -> Path:
    """A tiny CogVideoX as a folder."""
    return save_tiny("cogvideox")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))
