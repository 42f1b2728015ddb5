"""Autoencoders under a plan: plain calls are those of the plan, calls in tiles are traced over few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLCogVideoX, AutoencoderKLWan

import stopdown
from models.pipeline_calls import call_pipeline
from stopdown.interception.patches import Patches
from stopdown.memory.smaller_calls import put_variant
from stopdown.memory.strategies import Strategy
from stopdown.numerics import relative_l2
from stopdown.scaling.graph.capture import capture_call
from stopdown.scaling.trials.measurement import FEW_FRAMES, cut_sizes
from stopdown.scaling.watch import known_calls

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:.*not certified:stopdown.StopdownWarning"),
]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of the first argument of each call that is traced while a pipeline runs."""
    found, find = list[tuple[int, ...]](), known_calls.find_call_ends

    def note(module: Any, scaling: Any, capture: Any, args: Any, kwargs: Any) -> Any:
        found.append(tuple(args[0].shape))
        return find(module, scaling, capture, args, kwargs)

    monkeypatch.setattr(known_calls, "find_call_ends", note)
    return found


def test_a_planned_pipeline_traces_no_call(
    save_tiny: Callable[..., Path], traced: list[tuple[int, ...]]
) -> None:
    """`force_upcast` of its configuration is turned off by the plan itself."""
    pipe = stopdown.load(save_tiny("sd"), precision="fp16", device="cpu", memory="none")
    assert not pipe.vae.config.force_upcast
    call_pipeline(pipe, "sd")
    assert traced == []


def test_tiles_are_traced_over_one_seam_in_each_direction(
    save_tiny: Callable[..., Path], traced: list[tuple[int, ...]]
) -> None:
    """The picture of a decoder in 4 x 4 tiles is that of fp32 in as many, and 2 x 2 were traced."""
    folder, pictures = save_tiny("sd", overflow="vae"), []
    for precision in ("fp32", "fp16"):
        pipe = stopdown.load(folder, precision=precision, device="cpu", memory="none")
        pipe.vae.enable_tiling()
        pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 2, 4
        z = torch.randn(1, 4, 7, 7, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            made = pipe.vae.decode(z.to(pipe.vae.dtype), return_dict=False)[0]
        pictures.append(made.float())
    assert traced == [(1, 4, 3, 3)]
    assert relative_l2(pictures[1], pictures[0]) < 5e-3


def test_an_encoder_in_tiles_is_traced_as_it_is_called(
    save_tiny: Callable[..., Path], traced: list[tuple[int, ...]]
) -> None:
    """Where its last tile is smaller than what it makes one value of, no graph would be found."""
    latents, folder = list[torch.Tensor](), save_tiny("cogvideox-image", overflow="transformer")
    for precision in ("fp32", "fp16"):
        pipe = stopdown.load(folder, precision=precision, device="cpu", memory="none")
        x = torch.randn(1, 3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
        with Patches() as patches, torch.no_grad():
            put_variant(pipe, Strategy("resident", tiling=True), patches)
            made = pipe.vae.encode(x.to(pipe.vae.dtype)).latent_dist.mode()
        latents.append(made.float())
    assert traced == [(1, 3, 1, 32, 32)]
    assert relative_l2(latents[1], latents[0]) < 5e-3


def test_a_cut_that_cannot_be_traced_is_not_the_last_word(
    save_tiny: Callable[..., Path],
    traced: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call as it is made is traced then; the exponents stay on."""
    monkeypatch.setattr(
        known_calls, "cut_sizes", lambda call: (call[0], (call[1][0][..., :0],), call[2])
    )
    pipe = stopdown.load(save_tiny("sd"), precision="fp16", device="cpu", memory="none")
    pipe.vae.enable_tiling()
    with torch.no_grad():
        pipe.vae.decode(torch.zeros(1, 4, 4, 4, dtype=torch.float16))
    assert traced == [(1, 4, 4, 4)]


def make_coder(kind: str) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """An autoencoder that works in tiles, latents, and the sizes that are traced."""
    with torch.device("meta"):
        if kind == "AutoencoderKL":
            made: Any = AutoencoderKL(sample_size=16, norm_num_groups=1, block_out_channels=(4, 4))
            made.enable_tiling()
            return made, (1, 4, 30, 8), (1, 4, 9, 8)
        if kind == "CogVideoX":
            made = AutoencoderKLCogVideoX(
                block_out_channels=(2, 2, 2, 2), latent_channels=4, layers_per_block=1,
                norm_num_groups=1, sample_height=32, sample_width=48,
            )  # fmt: skip
            made.enable_tiling()
            return made, (1, 4, 9, 7, 9), (1, 4, FEW_FRAMES, 3, 4)
        made = AutoencoderKLWan(
            base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4, temperal_downsample=[False, True, True],
        )  # fmt: skip
        made.enable_tiling(32, 32, 24, 24)
        return made, (1, 4, 2, 9, 4), (1, 4, 2, 5, 4)


@pytest.mark.parametrize("kind", ["AutoencoderKL", "CogVideoX", "Wan"])
def test_sizes_are_cut_to_where_tiles_begin(kind: str) -> None:
    """A cut call still works in tiles; one that fits into a tile is left as it is."""
    module, sizes, cut = make_coder(kind)
    latents = torch.empty(sizes, device="meta", dtype=torch.float16)
    function, (given,), _ = cut_sizes((module.decode, (latents,), {}))
    assert tuple(given.shape) == cut
    tiled = len(capture_call(function, (given,), {}, dtype=torch.float16).graph.graph.nodes)
    one = given[..., :2, :2]
    assert cut_sizes((function, (one,), {}))[1][0].shape == one.shape
    assert tiled > 1.5 * len(
        capture_call(function, (one,), {}, dtype=torch.float16).graph.graph.nodes
    )
    module.use_tiling = False
    assert cut_sizes((function, (given,), {}))[1][0].shape == given.shape
