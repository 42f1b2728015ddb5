"""Pipelines loaded: weights that don't match their model, pins of authors, progress."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.damaged_folders import read_error
from stopdown import testing
from stopdown.errors import SourceError
from stopdown.pipelines.loader import load_pipeline
from stopdown.sources.component_classes import limited_building
from stopdown.sources.headers import StoredTensor, find_weights
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import resolve_source


@pytest.fixture
def folder(save_tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a tiny CogVideoX, to damage."""
    return Path(shutil.copytree(save_tiny("cogvideox"), tmp_path / "tiny"))


def test_weights_that_lack_a_tensor_do_not_load(folder: Path) -> None:
    """A tensor that is absent is an error, not random numbers."""
    path = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.block.0.layer.0.SelfAttention.q.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    source = resolve_source(folder)
    verify_source(source)
    assert read_error(lambda: load_pipeline(source, torch_dtypes=torch.float32)) == (
        f"The weights in {folder}/text_encoder don't match the model: they lack "
        "encoder.block.0.layer.0.SelfAttention.q.weight. Their configuration describes a "
        "T5EncoderModel. Download or save the model again, weights and config.json from one "
        "version."
    )


@pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
def test_weights_of_another_shape_do_not_load(folder: Path, component: str) -> None:
    """A tensor of another shape is an error that names the component."""
    [path] = find_weights(folder / component)[1]
    tensors = load_file(path)
    name = sorted(name for name, tensor in tensors.items() if tensor.ndim > 1)[0]
    tensors[name] = tensors[name][:1].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    source = resolve_source(folder)
    verify_source(source)
    message = read_error(lambda: load_pipeline(source, torch_dtypes=torch.float32))
    assert message.startswith(f"The weights in {path.parent} don't match the model: ")


def test_authors_pins_are_kept(save_tiny: Callable[..., Path]) -> None:
    """T5 in fp16 keeps its last feed-forward linear in fp32, as its authors ask."""
    encoder = load_pipeline(
        resolve_source(save_tiny("cogvideox")), torch_dtypes=torch.float16
    ).text_encoder
    assert encoder.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert encoder.encoder.block[0].layer[0].SelfAttention.q.weight.dtype == torch.float16


def test_progress_tells_each_component(save_tiny: Callable[..., Path]) -> None:
    """Loading reports components in order, and ends with all bytes."""
    calls: list[tuple[str, str, int, int]] = []
    load_pipeline(
        resolve_source(save_tiny("cogvideox")),
        torch_dtypes=torch.float32,
        progress=lambda *call: calls.append(call),
    )
    assert [what for _, what, _, _ in calls] == [
        "loading text_encoder",
        "loading transformer",
        "loading vae",
        "loading pipeline",
    ]
    assert calls[-1][2] == calls[-1][3] > 0


def test_a_buffer_that_older_versions_stored_is_no_misfit(tmp_path: Path) -> None:
    """CLIP's position_ids are computed now, and are still in published files."""
    folder = testing.save_pipeline("sd", tmp_path / "sd")
    path = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(tensors, path, {"format": "pt"})
    load_pipeline(resolve_source(folder), torch_dtypes=torch.float32)


def test_an_encoder_may_come_with_the_whole_that_it_is_a_part_of(tmp_path: Path) -> None:
    """UMT5 with its decoder loads; a layer too many in the encoder does not."""
    folder = testing.save_pipeline("wan", tmp_path / "wan")
    path = folder / "text_encoder" / "model.safetensors"
    tensors = {
        **load_file(path),
        "decoder.block.0.layer.0.SelfAttention.k.weight": torch.ones(4, 4),
    }
    save_file(tensors, path, {"format": "pt"})
    load_pipeline(resolve_source(folder), torch_dtypes=torch.float32)
    save_file({**tensors, "encoder.block.9.more": torch.ones(4)}, path, {"format": "pt"})
    assert "the model has no place for encoder.block.9.more. Their configuration" in read_error(
        lambda: load_pipeline(resolve_source(folder), torch_dtypes=torch.float32)
    )


@pytest.mark.thorough
def test_a_model_is_not_built_beyond_its_weights() -> None:
    """Parts and values are counted while a component is built, and no longer afterwards."""
    few = [StoredTensor("fp32", (4,), 16)]
    with limited_building(few):
        torch.nn.Linear(1024, 1024)
    with pytest.raises(SourceError, match="A configuration describes 17179869184 values, found in"):  # noqa: SIM117
        with limited_building(few), torch.device("meta"):
            torch.nn.Linear(2**17, 2**17)
    with pytest.raises(SourceError, match="describes more than 200000 parts, found in Sequential"):  # noqa: SIM117
        with limited_building():
            torch.nn.Sequential(*[torch.nn.Identity()] * 200_001)
    torch.nn.Sequential(*[torch.nn.Identity()] * 200_001)
