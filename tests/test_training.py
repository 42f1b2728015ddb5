"""The training scripts: they restart where they stopped, and inflation is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_autoencoder
import train_denoiser
from train_autoencoder import Cycle
from training_state import find_cycle


def read_model(path: Path, key: str = "model") -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)[key]


def is_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_step_belongs_to_the_cycle_that_it_falls_into() -> None:
    """Steps are counted from 0 in each; behind the last one there is none."""
    first, second = (Cycle(steps, 0, 1.0, (14.0, 18.0)) for steps in (2, 3))
    found = [find_cycle((first, second), step) for step in range(5)]
    assert found == [(first, 0), (first, 1), (second, 0), (second, 1), (second, 2)]
    with pytest.raises(ValueError, match="behind the last cycle"):
        find_cycle((first, second), 5)


@pytest.mark.thorough
def test_autoencoder_training_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, a stop and two more give the same weights as four steps at a stretch."""
    monkeypatch.setattr(train_autoencoder, "CYCLES", (Cycle(4, 1, 1.0, (14.0, 18.0)),))
    train_autoencoder.train(tmp_path / "whole", batch=1, seed=0, every=4)
    monkeypatch.setattr(train_autoencoder, "CYCLES", (Cycle(2, 0, 1.0, (14.0, 18.0)),))
    monkeypatch.setattr(
        train_autoencoder, "find_cycle", lambda _, step: (Cycle(4, 1, 1.0, (14.0, 18.0)), step)
    )
    train_autoencoder.train(tmp_path / "parts", batch=1, seed=0, every=2)
    monkeypatch.setattr(train_autoencoder, "CYCLES", (Cycle(4, 1, 1.0, (14.0, 18.0)),))
    train_autoencoder.train(tmp_path / "parts", batch=1, seed=0, every=4)
    whole, parts = (read_model(tmp_path / name / "autoencoder.pt") for name in ("whole", "parts"))
    assert is_same(whole, parts)


@pytest.mark.thorough
def test_denoiser_training_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped after two steps goes on to the weights of an uninterrupted one."""
    generator = torch.Generator().manual_seed(0)
    latents = {
        "latents": torch.randn(8, 3, 4, 16, 16, generator=generator),
        "scene": torch.arange(8),
    }
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        save_file(latents, tmp_path / name / "latents-only.safetensors")
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        cycle = train_denoiser.Cycle("only", steps, 4, 1.0, 3.0, (12.0, 13.5), 0.5)
        monkeypatch.setattr(train_denoiser, "CYCLES", (cycle,))
        train_denoiser.train(tmp_path / name, batch=4, seed=0, every=4)
    for key in ("model", "average"):
        whole, parts = (read_model(tmp_path / n / "denoiser.pt", key) for n in ("whole", "parts"))
        assert is_same(whole, parts)


@pytest.mark.thorough
def test_inflation_is_exact() -> None:
    """Fresh components inflated by powers of two give the same output bit for bit in fp32."""
    from finish import inflate_all, round_to_bf16

    torch.manual_seed(0)
    vae = train_autoencoder.make_autoencoder()
    for parameter in vae.parameters():
        parameter.data = parameter.data.contiguous()
    inflate_all(
        round_to_bf16(vae),
        round_to_bf16(train_denoiser.make_encoder(50)),
        round_to_bf16(train_denoiser.make_transformer()),
    )


def test_inflation_that_is_not_exact_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A change of the function, however small, ends the script."""
    from finish import check_same

    values = torch.ones(3)
    with pytest.raises(SystemExit, match="changed the output by up to"):
        check_same("planted", lambda: values.clone(), lambda: values.add_(1e-6))


def test_checkpoints_come_back_from_the_model_folder(tmp_path: Path) -> None:
    """Restored and finished again, `shapes` is the folder that it was restored from, bit for bit."""
    from finish import EXPONENTS, OUT, load_autoencoder, load_denoiser
    from inflate import inflate_autoencoder, inflate_encoder, inflate_transformer
    from restore import restore_autoencoder, restore_denoiser

    restore_autoencoder(OUT, tmp_path)
    restore_denoiser(OUT, tmp_path, step=7)
    vae, (encoder, transformer) = load_autoencoder(tmp_path), load_denoiser(tmp_path)
    assert vae.config.scaling_factor != 1
    assert not is_same_as_folder(transformer, OUT / "transformer")
    inflate_autoencoder(vae, EXPONENTS["vae.encode"], EXPONENTS["vae.decode"])
    inflate_encoder(encoder, EXPONENTS["text_encoder"], EXPONENTS["text_encoder gate"])
    inflate_transformer(transformer, EXPONENTS["transformer"])
    for module, name in ((vae, "vae"), (encoder, "text_encoder"), (transformer, "transformer")):
        assert is_same_as_folder(module, OUT / name)


def is_same_as_folder(module: torch.nn.Module, folder: Path) -> bool:
    stored = load_file(next(folder.glob("*.safetensors")))
    own = module.state_dict()
    return all(torch.equal(own[name], value.float()) for name, value in stored.items())
