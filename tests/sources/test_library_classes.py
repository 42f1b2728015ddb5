"""Classes of Diffusers and Transformers, known without importing them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from models.damaged_folders import edit_json, read_error, verify
from stopdown import testing
from stopdown.pipelines.loader import load_pipeline
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import resolve_source


def test_an_unknown_pipeline_class_names_the_nearest(folder: Path) -> None:
    """A class that Diffusers lacks is refused with the nearest that it has."""
    edit_json(folder / "model_index.json", _class_name="CogVideoXPipelin")
    assert read_error(lambda: verify(folder)) == (
        f"{folder}/model_index.json names the pipeline class 'CogVideoXPipelin', which Diffusers "
        "doesn't have. The nearest that the installed version has is CogVideoXPipeline. "
        "A newer Diffusers may know it: pip install -U diffusers"
    )


def test_a_class_of_a_pipeline_module_is_no_foreign_library(tmp_path: Path) -> None:
    """Stable Diffusion's safety checker may be named, and its folder may be absent."""
    folder = testing.save_pipeline("sd", tmp_path / "sd")
    checker = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    edit_json(folder / "model_index.json", safety_checker=checker)
    source = resolve_source(folder)
    verify_source(source)
    assert load_pipeline(source, torch_dtypes=torch.float32).safety_checker is None


@pytest.mark.parametrize("library", ["wuerstchen", "diffusers"])
def test_a_deprecated_class_is_named(folder: Path, library: str) -> None:
    """Stable Cascade's autoencoder is a class that Diffusers loads no more, however it's named."""
    index = folder / "model_index.json"
    said = json.loads(index.read_text()) | {"vae": [library, "PaellaVQModel"]}
    index.write_text(json.dumps(said))
    assert read_error(lambda: verify(folder)).startswith(
        "model_index.json names the class 'PaellaVQModel', which the installed Diffusers has among its "
        "deprecated pipelines."
    )
    assert read_error(lambda: verify(folder)).endswith("Use another model.")
