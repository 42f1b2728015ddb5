"""Tiny pipelines of classes that the table of tiny pipelines lacks, with weights drawn from a seed."""

from __future__ import annotations

from typing import Any

import torch

from stopdown.pipelines.tiny_pipelines import build_part


def make_dit() -> Any:
    """A pipeline whose call needs class labels, and takes no prompt."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = diffusers.DiTTransformer2DModel(
            sample_size=4,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            in_channels=4,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_zero",
            norm_elementwise_affine=False,
        )
        vae = build_part("vae")
    return diffusers.DiTPipeline(
        transformer=transformer, vae=vae, scheduler=diffusers.DDIMScheduler()
    )


def make_latte(video_length: int) -> Any:
    """A pipeline whose transformer has positions for videos of one length."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = diffusers.LatteTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=1,
            cross_attention_dim=16,
            attention_bias=True,
            sample_size=4,
            patch_size=2,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            caption_channels=32,
            video_length=video_length,
        )
        vae, encoder = build_part("vae"), build_part("t5")
    return diffusers.LattePipeline(
        tokenizer=build_part("t5-tokenizer"),
        text_encoder=encoder,
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.DDIMScheduler(),
    )


def make_allegro() -> Any:
    """A pipeline whose autoencoder has code for tiles alone, and is saved with tiling off."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = diffusers.AutoencoderKLAllegro(
            down_block_types=("AllegroDownBlock3D",) * 4,
            up_block_types=("AllegroUpBlock3D",) * 4,
            block_out_channels=(4, 4, 4, 4),
            layers_per_block=1,
            norm_num_groups=2,
        )
        transformer = diffusers.AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            cross_attention_dim=24,
            sample_width=4,
            sample_height=4,
            sample_frames=2,
            caption_channels=32,
        )
        encoder = build_part("t5")
    return diffusers.AllegroPipeline(
        tokenizer=build_part("t5-tokenizer"),
        text_encoder=encoder,
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.DDIMScheduler(),
    )
