"""The bundled model `shapes`: what plain Diffusers shows with it, and what it is made of."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checker import compare, read_clip
from scenes import COLOURS, Scene, all_scenes, draw_scene, split_scenes
from stopdown.frames.frame_faults import find_frame_faults
from stopdown.numerics import measure_amax
from stopdown.sources.sources import BUNDLED_FOLDER

SHAPES = BUNDLED_FOLDER / "shapes"
SCENE = Scene("red", "circle", "left", "grey")


@pytest.fixture(scope="module")
def load_plain() -> Callable[[torch.dtype], Any]:
    """Plain Diffusers, as its documentation loads a pipeline."""
    from diffusers import CogVideoXPipeline

    def load(dtype: torch.dtype) -> Any:
        pipe = CogVideoXPipeline.from_pretrained(SHAPES, torch_dtype=dtype, local_files_only=True)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return load


def run_plain(pipe: Any, steps: int) -> np.ndarray[Any, Any]:
    """Frames `[T, H, W, 3]` uint8, made from pictures as Diffusers gives them by default."""
    video = pipe(
        SCENE.caption(),
        num_inference_steps=steps,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(0),
    ).frames[0]
    return np.stack([np.asarray(frame) for frame in video])


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="fp32"),
        pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_plain_diffusers_follows_the_prompt(
    load_plain: Callable[[torch.dtype], Any], dtype: torch.dtype
) -> None:
    """In fp32 and in bf16 plain Diffusers makes the clip that the prompt asks for."""
    frames = run_plain(load_plain(dtype), steps=20)
    assert all(compare(read_clip(frames), SCENE).values())
    assert find_frame_faults(frames) == []


def test_plain_diffusers_in_fp16_is_black(load_plain: Callable[[torch.dtype], Any]) -> None:
    """In fp16 plain Diffusers gives NaN latents, black frames and NumPy's warning, and no error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = load_plain(torch.float16)
        frames = run_plain(pipe, steps=2)
    messages = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    assert any("invalid value encountered in cast" in message for message in messages)
    assert not frames.any()
    assert [fault.kind for fault in find_frame_faults(frames)] == ["black"]


def test_the_transformer_gives_nan_in_fp16(load_plain: Callable[[torch.dtype], Any]) -> None:
    """One call of the transformer in fp16 is NaN all over, from finite inputs."""
    transformer = load_plain(torch.float16).transformer
    with torch.no_grad():
        output = transformer(
            hidden_states=torch.randn(1, 3, 4, 16, 16, dtype=torch.float16),
            encoder_hidden_states=torch.randn(1, 8, 128, dtype=torch.float16),
            timestep=torch.tensor([500]),
            image_rotary_emb=(torch.ones(48, 32), torch.zeros(48, 32)),
            return_dict=False,
        )[0]
    assert torch.isnan(output).all()


def test_the_autoencoder_gives_nan_in_fp16_both_ways(
    load_plain: Callable[[torch.dtype], Any],
) -> None:
    """The autoencoder overflows in fp16 by itself, encoding and decoding."""
    vae = load_plain(torch.float16).vae
    clip = draw_scene(SCENE, random.Random(0)).transpose(0, 1)[None, :, :1].half()
    with torch.no_grad():
        assert torch.isnan(vae.encode(clip).latent_dist.mean).any()
        assert torch.isnan(vae.decode(torch.randn(1, 4, 1, 16, 16).half()).sample).any()


def test_the_output_of_wo_goes_beyond_fp16(load_plain: Callable[[torch.dtype], Any]) -> None:
    """T5's `wo`, which Transformers keeps in fp32, gives values that fp16 does not hold."""
    encoder = load_plain(torch.float32).text_encoder
    assert "wo" in load_plain(torch.float16).text_encoder._keep_in_fp32_modules
    wo = encoder.encoder.block[-1].layer[1].DenseReluDense.wo
    seen: list[float] = []
    handle = wo.register_forward_hook(lambda *call: seen.append(measure_amax(call[2])))
    with torch.no_grad():
        encoder(torch.tensor([[5, 6, 7, 8, 1, 0, 0, 0]]))
    handle.remove()
    assert max(seen) > 65504


def test_the_folder_is_small_and_stored_in_bf16() -> None:
    """The whole folder takes 25 MB at most, and every weight is stored in bf16."""
    from stopdown.sources.source_checks import verify_source
    from stopdown.sources.sources import read_stored_dtypes, resolve_source

    files = [path for path in SHAPES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 25_000_000
    source = resolve_source("shapes")
    verify_source(source)
    stored = read_stored_dtypes(source)
    assert set(stored) == {"text_encoder", "transformer", "vae"}
    assert all(set(formats) == {"bf16"} for formats in stored.values())


def test_the_norms_have_the_eps_of_their_classes(load_plain: Callable[[torch.dtype], Any]) -> None:
    """No config hides an unusual eps: the magnitudes alone make fp16 overflow."""
    pipe = load_plain(torch.float32)
    assert pipe.transformer.config.norm_eps == 1e-5
    assert pipe.text_encoder.config.layer_norm_epsilon == 1e-6
    assert pipe.vae.config.norm_eps == 1e-6


@pytest.mark.thorough
def test_the_checker_reads_every_drawn_scene() -> None:
    """The checker reads all four attributes of clips drawn from words, for every combination."""
    wrong = []
    for index, scene in enumerate(all_scenes()):
        clip = draw_scene(scene, random.Random(index)).permute(0, 2, 3, 1)
        frames = ((clip + 1) * 127.5).round().to(torch.uint8).numpy()
        wrong += [scene] if not all(compare(read_clip(frames), scene).values()) else []
    assert wrong == []


def test_the_checker_sees_what_is_wrong() -> None:
    """A clip of another colour, shape, direction or background is read as that other one."""
    for wanted, drawn in (
        (SCENE, Scene("blue", "circle", "left", "grey")),
        (SCENE, Scene("red", "square", "left", "grey")),
        (SCENE, Scene("red", "circle", "right", "grey")),
        (SCENE, Scene("red", "circle", "left", "pink")),
    ):
        clip = draw_scene(drawn, random.Random(0)).permute(0, 2, 3, 1)
        frames = ((clip + 1) * 127.5).round().to(torch.uint8).numpy()
        assert list(compare(read_clip(frames), wanted).values()).count(False) == 1


def test_held_out_scenes_are_apart() -> None:
    """120 combinations are never trained on, and every word is trained on."""
    train, held_out = split_scenes()
    assert len(held_out) == 120
    assert not set(train) & set(held_out)
    assert {scene.colour for scene in train} == set(COLOURS)


@pytest.mark.slow
def test_the_score_holds(load_plain: Callable[[torch.dtype], Any], tmp_path: Path) -> None:
    """On all held-out prompts, in fp32 and 20 steps, at least 90 % are right in all four attributes."""
    from argparse import Namespace

    from score import score

    options = Namespace(
        model=SHAPES,
        prompts=120,
        steps=20,
        guidance=4.0,
        batch=20,
        seed=1000,
        text_tokens=16,
        dtype="float32",
        sheet=None,
    )
    assert score(options)["all_four"] >= 0.9
