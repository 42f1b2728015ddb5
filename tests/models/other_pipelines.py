"""Tiny pipelines of classes that the table of tiny pipelines lacks, with weights drawn from a seed."""

from __future__ import annotations

from typing import Any

import torch

from models.casting_pipelines import make_qwen_transformer, make_qwen_vae
from models.encoder_models import make_encoder
from models.zimage import make_tokenizer
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


def make_easyanimate() -> Any:
    """A pipeline whose code iterates over its negative prompt, which is None by default."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = diffusers.EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=2,
            text_embed_dim=16,
            num_layers=1,
            sample_width=4,
            sample_height=4,
            patch_size=2,
        )
        vae = diffusers.AutoencoderKLMagvit(
            down_block_types=("SpatialDownBlock3D", *("SpatialTemporalDownBlock3D",) * 3),
            up_block_types=("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3),
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            spatial_group_norm=False,
        )
        encoder = _make_qwen()
    return diffusers.EasyAnimatePipeline(
        transformer=transformer,
        vae=vae,
        text_encoder=encoder,
        tokenizer=make_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def make_animated_control() -> Any:
    """An AnimateDiff whose ControlNet takes a picture for each frame, as `conditioning_frames`."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = diffusers.UNet2DConditionModel(
            block_out_channels=(8, 8),
            layers_per_block=1,
            norm_num_groups=2,
            sample_size=8,
            cross_attention_dim=32,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        )
        adapter = diffusers.MotionAdapter(
            block_out_channels=(8, 8),
            motion_layers_per_block=1,
            motion_norm_num_groups=2,
            motion_num_attention_heads=2,
        )
        return diffusers.AnimateDiffControlNetPipeline(
            unet=unet,
            motion_adapter=adapter,
            controlnet=diffusers.ControlNetModel.from_unet(unet),
            vae=build_part("vae"),
            text_encoder=build_part("clip"),
            tokenizer=build_part("clip-tokenizer"),
            scheduler=diffusers.DDIMScheduler(),
        )


def make_layered() -> Any:
    """A pipeline that takes a picture apart into layers with transparency."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = make_qwen_transformer(
            8,
            num_layers=1,
            num_attention_heads=1,
            use_additional_t_cond=True,
            use_layer3d_rope=True,
        )
        vae = make_qwen_vae(8, base_dim=4, input_channels=4)
        encoder = make_encoder("Qwen2_5_VLForConditionalGeneration")
    return diffusers.QwenImageLayeredPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=encoder,
        tokenizer=make_tokenizer(),
        processor=make_tokenizer(),  # it reads pictures for a call without a prompt
        transformer=transformer,
    )


def _make_qwen() -> Any:
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(
        Qwen3Config(
            vocab_size=128,
            hidden_size=16,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )
