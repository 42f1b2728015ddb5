"""Classes of components, and limits to what a configuration builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from stopdown import testing
from stopdown.errors import SourceError
from stopdown.pipelines.loader import load_pipeline
from stopdown.sources import component_classes
from stopdown.sources.component_classes import describing_failures, find_class, limited_building
from stopdown.sources.headers import StoredTensor
from stopdown.sources.sources import resolve_source


def test_classes_are_of_the_two_libraries_alone() -> None:
    """A name that neither has, and one that is no model, are refused."""
    assert find_class("diffusers", "AutoencoderKL").__name__ == "AutoencoderKL"
    with pytest.raises(SourceError, match="Nonsense"):
        find_class("diffusers", "Nonsense")
    with pytest.raises(SourceError, match="__version__"):
        find_class("diffusers", "__version__")


def test_a_configuration_does_not_build_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many parts are refused, and far more values than the weights store; no hook stays."""
    monkeypatch.setattr(component_classes, "MOST_PARTS", 10)
    with limited_building():
        nn.Linear(2, 2)
    with pytest.raises(SourceError, match="more than 10 parts"), limited_building():
        nn.Sequential(*(nn.Linear(1, 1) for _ in range(9)))
    nn.Sequential(*(nn.Linear(1, 1) for _ in range(9)))
    stored = [StoredTensor("fp16", (1,), 2)]
    with pytest.raises(SourceError, match="values"), limited_building(stored):
        nn.Linear(6000, 3000, device="meta")


def test_errors_of_building_name_the_class_and_the_folder() -> None:
    """What tensors lack is told in plain words."""
    missing = pytest.raises(SourceError, match="tensors of the model are missing")
    with missing, describing_failures(Path("folder"), "Thing"):
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    with pytest.raises(SourceError, match="Thing"), describing_failures(Path("f"), "Thing"):
        raise ImportError("no module sentencepiece")


def test_a_component_that_a_model_leaves_out_is_named(tmp_path: Path) -> None:
    """Diffusers lists all that it expected and all that it got; downloading again brings no more."""
    folder = testing.save_pipeline("sd", tmp_path / "sd")
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"scheduler": [None, None]}))
    with pytest.raises(SourceError) as caught:
        load_pipeline(resolve_source(folder), torch_dtypes=torch.float32)
    assert str(caught.value).startswith(
        f"StableDiffusionPipeline needs scheduler, which {folder} doesn't have."
    )
    assert f"from_pretrained('{folder}', scheduler=...)" in str(caught.value)
