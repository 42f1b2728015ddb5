"""A model that was found, as its index describes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stopdown import testing
from stopdown.sources.sources import resolve_source


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CogVideoX as a folder."""
    return testing.save_pipeline("cogvideox", tmp_path_factory.mktemp("saved") / "tiny")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def test_a_folder_is_described_from_its_index(saved: Path) -> None:
    """Class, components and kind come from model_index.json."""
    source = resolve_source(str(saved))
    assert (source.kind, source.pipeline_class) == ("folder", "CogVideoXPipeline")
    assert source.name == str(saved)
    assert source.components == {
        "scheduler": ("diffusers", "CogVideoXDDIMScheduler"),
        "text_encoder": ("transformers", "T5EncoderModel"),
        "tokenizer": ("transformers", "T5Tokenizer"),
        "transformer": ("diffusers", "CogVideoXTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLCogVideoX"),
    }
