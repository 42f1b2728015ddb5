"""Quantised files: a folder gets their values in fp16, and no codes and scales are written again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.weight_file_samples import Tensors, quantise_fp8, write_gguf
from stopdown import testing
from stopdown.sources.weight_files import load_weights

Run = Callable[..., tuple[int, str, str]]


def write_transformer(path: Path) -> Path:
    """A CogVideoX with its pipeline beside it: as GGUF, or as fp8 with a scale for each matrix."""
    pipe = testing.make_pipeline("cogvideox")
    pipe.save_pretrained(path.parent / "model")
    weights = pipe.transformer.state_dict()
    if path.suffix == ".gguf":
        return write_gguf(path, "BF16", {name: x.numpy() for name, x in weights.items()})
    stored: Tensors = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, value in weights.items():
        if value.dim() < 2:
            stored[name] = value.bfloat16()
            continue
        stored[name], scale = quantise_fp8(value)
        stored[f"{name.removesuffix('.weight')}.scale_weight"] = scale
    save_file(stored, path)
    return path


@pytest.mark.parametrize(("suffix", "kinds"), [(".gguf", "GGUF"), (".safetensors", "fp8")])
def test_no_exponents_are_written_into_quantised_files(
    tmp_path: Path, run: Run, suffix: str, kinds: str
) -> None:
    """Before anything is computed; the message names the formats and two ways out."""
    if suffix == ".gguf":
        pytest.importorskip("gguf")
    source, target = write_transformer(tmp_path / f"a{suffix}"), tmp_path / f"b{suffix}"
    code, _, err = run("convert", source, target, "--config", tmp_path / "model")
    assert code == 2
    assert f"a{suffix} has quantised weights (" in err
    assert kinds in err
    assert "Give a folder as OUT, which gets their values in fp16." in err
    assert not target.exists()


@pytest.mark.thorough
def test_a_folder_gets_the_values_of_a_quantised_file(tmp_path: Path, run: Run) -> None:
    """From scaled fp8: the transformer is in fp16, and near to the values of the file in fp32."""
    from diffusers import CogVideoXTransformer3DModel

    source, target = write_transformer(tmp_path / "a.safetensors"), tmp_path / "out"
    code, _, err = run("convert", source, target, "--config", tmp_path / "model")
    assert code == 0, err
    model = CogVideoXTransformer3DModel.from_pretrained(
        target / "transformer", torch_dtype=torch.float16
    )
    given = {
        "hidden_states": torch.randn(1, 2, model.config.in_channels, 4, 4),
        "encoder_hidden_states": torch.randn(1, 8, model.config.text_embed_dim),
        "timestep": torch.tensor([500]),
    }
    half = {name: x.half() if x.is_floating_point() else x for name, x in given.items()}
    wide = CogVideoXTransformer3DModel.from_config(model.config).eval()
    wide.load_state_dict(load_weights(source))
    with torch.no_grad():
        wanted, made = wide(**given).sample, model(**half).sample.float()
    assert (made - wanted).norm() < 0.01 * wanted.norm()
