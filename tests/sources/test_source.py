"""A model that was found, as its index describes it."""

from __future__ import annotations

from pathlib import Path

from stopdown.sources.sources import resolve_source


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
