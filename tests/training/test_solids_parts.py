"""Training of `solids` goes on where it stopped, learns, and makes parts that Diffusers loads and runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, LattePipeline
from diffusers.models.attention_processor import Attention
from safetensors.torch import save_file

from solids import finish, train_autoencoder, train_denoiser
from solids.autoencoder import make_autoencoder
from solids.scenes import FRAMES, SIDE, all_captions, read_prompt, split_scenes
from solids.train_denoiser import Captions, ShortAttention, find_turnable
from tokens import make_tokenizer


def read_models(path: Path) -> list[torch.Tensor]:
    state = torch.load(path, weights_only=True)
    return [*state["model"].values(), *state.get("average", {}).values()]


def is_same(first: Path, second: Path) -> bool:
    pairs = zip(read_models(first), read_models(second), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture
def small_frames(tmp_path: Path) -> Path:
    """A folder of frames for the autoencoder, so that none are drawn."""
    clips = np.random.default_rng(0).integers(0, 255, (1, FRAMES, SIDE, SIDE, 3), np.uint8)
    np.save(tmp_path / "clips-000.npy", clips)
    return tmp_path


@pytest.fixture
def small_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of latents for a transformer of one layer; each clip is one value in all places."""
    monkeypatch.setitem(train_denoiser.TRANSFORMER, "num_layers", 1)
    monkeypatch.setitem(train_denoiser.ENCODER, "num_layers", 1)
    monkeypatch.setattr(train_denoiser, "read_factor", lambda: 0.5)
    latents = torch.linspace(-3, 3, 8).view(8, 1, 1, 1, 1).expand(8, 12, FRAMES, 12, 12).half()
    save_file({"means": latents.contiguous()}, tmp_path / "latents-000.safetensors")
    return tmp_path


@pytest.mark.thorough
def test_autoencoder_training_goes_on(small_frames: Path) -> None:
    """Two steps, a stop and two more give the same weights as four steps at a stretch."""
    path = small_frames / "autoencoder.pt"
    options = {"steps": 4, "batch": 1, "seed": 0, "every": 9, "parts": 1}
    train_autoencoder.train(small_frames, **options)
    whole = path.rename(small_frames / "whole.pt")
    train_autoencoder.train(small_frames, **options, stop=2)
    assert not is_same(whole, path)
    train_autoencoder.train(small_frames, **options)
    assert is_same(whole, path)


@pytest.mark.thorough
def test_denoiser_training_goes_on(small_latents: Path) -> None:
    """A run that was stopped after one step goes on to the weights of an uninterrupted one."""
    path = small_latents / "denoiser.pt"
    options = {"steps": 2, "batch": 1, "seed": 0, "every": 9, "parts": 1}
    train_denoiser.train(small_latents, **options)
    whole = path.rename(small_latents / "whole.pt")
    train_denoiser.train(small_latents, **options, stop=1)
    assert not is_same(whole, path)
    train_denoiser.train(small_latents, **options)
    assert is_same(whole, path)


@pytest.mark.thorough
def test_denoiser_learns(small_latents: Path) -> None:
    """The loss begins at the variance of noise and latents, about 2, and falls."""
    first = train_denoiser.train(small_latents, 60, 2, 0, 99, 1, stop=1)
    assert 1.0 < first < 4.0
    (small_latents / "denoiser.pt").unlink()
    mean = train_denoiser.train(small_latents, 60, 2, 0, 99, 1)
    assert mean < 0.75 * first


def test_clips_are_played_backwards_only_as_training_scenes() -> None:
    """A clip backwards has the caption of what it then shows, and none of the held-out scenes."""
    scenes, held_out = split_scenes()
    captions = Captions(scenes)
    turnable = find_turnable(scenes)
    for index, scene in enumerate(scenes[:200]):
        if not turnable[index]:
            continue
        ids, encoded, _ = captions.pick([index], [True], np.random.default_rng(1))
        text = captions.tokenizer.decode(ids[0][encoded[0] == 1], skip_special_tokens=True)
        shown = read_prompt(text)
        assert shown not in held_out
        assert shown == replace(scene, motion=train_denoiser.TURNED[scene.motion])


def test_short_attention_is_the_attention_of_the_class() -> None:
    """The transformer computes the same with it, whole clips and masked captions included."""
    torch.manual_seed(0)
    model = train_denoiser.make_transformer().eval()
    for weight in model.parameters():
        if weight.dim() > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.05)
    models = torch.nn.ModuleDict({"encoder": train_denoiser.make_encoder(40), "denoiser": model})
    ids = torch.randint(3, 40, (2, 7))
    read = torch.ones_like(ids)
    read[1, 5:] = 0
    noisy = torch.randn(2, 12, FRAMES, 12, 12)
    inputs = (noisy, torch.tensor([5, 900]), (ids, read, read), torch.arange(FRAMES))
    with torch.no_grad():
        plain = train_denoiser.predict(models, *inputs)
        for module in model.modules():
            if isinstance(module, Attention):
                module.set_processor(ShortAttention())
        short = train_denoiser.predict(models, *inputs)
    assert plain.abs().max() > 0.1
    assert torch.allclose(plain, short, atol=1e-5)


def test_captions_are_padded_as_the_pipeline_pads_one_prompt() -> None:
    """The encoder reads what a caption or the empty text has, the transformer the caption's length."""
    scenes = split_scenes()[0][:40]
    captions = Captions(scenes)
    ids, encoded, read = captions.pick(list(range(40)), [False] * 40, np.random.default_rng(0))
    empty = encoded.sum(1) == 1
    assert 0 < empty.sum() < 20
    assert (read.sum(1) >= 7).all()
    assert torch.equal(encoded[~empty], read[~empty])
    assert (ids[encoded == 0] == 0).all()
    assert (ids != make_tokenizer(all_captions()).unk_token_id).all()


@pytest.mark.thorough
def test_autoencoder_is_a_class_of_diffusers(tmp_path: Path) -> None:
    """Saved and loaded again, it makes 12 channels of 12x12 of a frame, and a frame of those."""
    make_autoencoder().save_pretrained(tmp_path)
    vae = AutoencoderKL.from_pretrained(tmp_path, local_files_only=True)
    with torch.no_grad():
        latents = vae.encode(torch.zeros(1, 3, SIDE, SIDE)).latent_dist.mean
        assert latents.shape == (1, 12, 12, 12)
        assert vae.decode(latents).sample.shape == (1, 3, SIDE, SIDE)


@pytest.mark.thorough
def test_pipeline_takes_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`LattePipeline` makes a clip of nine frames in two steps with parts of fresh weights."""
    monkeypatch.setitem(train_denoiser.TRANSFORMER, "num_layers", 1)
    tokenizer = make_tokenizer(all_captions())
    models = train_denoiser.make_models(len(tokenizer)).eval()
    pipe = LattePipeline(
        tokenizer=tokenizer,
        text_encoder=models["encoder"],
        vae=make_autoencoder().eval(),
        transformer=models["denoiser"],
        scheduler=train_denoiser.make_scheduler(),
    )
    pipe.set_progress_bar_config(disable=True)
    scene = split_scenes()[1][0]
    clip = pipe(
        scene.caption(),
        num_inference_steps=2,
        video_length=FRAMES,
        height=SIDE,
        width=SIDE,
        clean_caption=False,
        output_type="np",
    ).frames[0]
    assert clip.shape == (FRAMES, SIDE, SIDE, 3)
    assert np.isfinite(clip).all()


def test_inflation_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part computes the same afterwards, bit for bit, with values beyond fp16 inside."""
    monkeypatch.setitem(train_denoiser.TRANSFORMER, "num_layers", 1)
    torch.manual_seed(0)
    tokenizer = make_tokenizer(all_captions())
    models = train_denoiser.make_models(len(tokenizer)).eval()
    for weight in models.parameters():
        if weight.dim() > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.05)
    pipe = LattePipeline(
        tokenizer=tokenizer,
        text_encoder=models["encoder"],
        vae=make_autoencoder().eval(),
        transformer=models["denoiser"],
        scheduler=train_denoiser.make_scheduler(),
    )
    largest = []
    block = pipe.transformer.transformer_blocks[0]
    block.ff.net[2].register_forward_hook(lambda *call: largest.append(call[2].abs().max().item()))
    finish.inflate_all(pipe)
    before, after = largest
    assert after == before * 2 ** finish.EXPONENTS["transformer branches"]
