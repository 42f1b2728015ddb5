"""Tiny models in the files that others read: which sizes ComfyUI guesses from their shapes.

A program that reads a file takes some sizes from its shapes and has others in its code; these keep to
the latter. Each overflows in fp16 and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SMALLEST = 2.0**-9
"""Weights below are 0 here, so that eight bits of the others outlive a fold in fp16."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FileModel:
    """A component that is published as a file by itself.

    Attributes:
        name: of the component in its pipeline.
        pipeline: class that calls it.
        build: the component in fp32.
        call: arguments by name.
        writers: pattern of the modules whose outputs are made too large; for classes that
            `tiny_pipelines` does not know.
    """

    name: str
    pipeline: str
    build: Callable[[], torch.nn.Module]
    call: Callable[[], dict[str, Any]]
    writers: str = ""
    prefix: str = ""


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def build_wan() -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=4096,
        freq_dim=256, ffn_dim=256, num_layers=2,
    )  # fmt: skip


def build_flux() -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=128, num_attention_heads=1,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True,
    )  # fmt: skip


def build_chroma() -> torch.nn.Module:
    from diffusers import ChromaTransformer2DModel

    return ChromaTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=128, num_attention_heads=1,
        joint_attention_dim=32, approximator_num_channels=64, approximator_hidden_dim=32,
        approximator_layers=2,
    )  # fmt: skip


def build_sd3() -> torch.nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=64,
        num_attention_heads=2, joint_attention_dim=64, caption_projection_dim=128,
        pooled_projection_dim=32, pos_embed_max_size=8,
    )  # fmt: skip


def build_hunyuan() -> torch.nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=1, attention_head_dim=128, num_layers=1,
        num_single_layers=1, num_refiner_layers=2, text_embed_dim=32, pooled_projection_dim=768,
    )  # fmt: skip


def build_ltx() -> torch.nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=128, out_channels=128, num_attention_heads=32, attention_head_dim=4,
        cross_attention_dim=128, num_layers=2, caption_channels=4096,
    )  # fmt: skip


def build_lumina() -> torch.nn.Module:
    from diffusers import Lumina2Transformer2DModel

    return Lumina2Transformer2DModel(
        in_channels=16, sample_size=16, hidden_size=96, num_layers=1, num_refiner_layers=2,
        num_attention_heads=1, num_kv_heads=1, cap_feat_dim=32,
    )  # fmt: skip


def build_z_image() -> torch.nn.Module:
    from diffusers import ZImageTransformer2DModel

    return ZImageTransformer2DModel(
        in_channels=16, dim=256, n_layers=2, n_refiner_layers=2, n_heads=2, n_kv_heads=2, cap_feat_dim=32,
    )  # fmt: skip


def build_qwen() -> torch.nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=64, out_channels=16, num_layers=2, num_attention_heads=1, attention_head_dim=128,
        joint_attention_dim=32,
    )  # fmt: skip


def build_cogvideox() -> torch.nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=64, in_channels=16, out_channels=16, time_embed_dim=64,
        text_embed_dim=32, num_layers=2, sample_width=8, sample_height=8, sample_frames=9,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip


def build_unet() -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(320, 320),
        layers_per_block=1, attention_head_dim=8, cross_attention_dim=768,
    )  # fmt: skip


def build_unet_xl() -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), block_out_channels=(32, 64),
        layers_per_block=2, attention_head_dim=2, cross_attention_dim=32, use_linear_projection=True,
        transformer_layers_per_block=(0, 2), addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
    )  # fmt: skip


def build_vae() -> torch.nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 32, 64), latent_channels=4, layers_per_block=2, norm_num_groups=32,
        sample_size=32,
    )  # fmt: skip


def build_wan_vae() -> torch.nn.Module:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2,
        temperal_downsample=[False, True, True],
    )  # fmt: skip


def build_clip() -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(
        vocab_size=49408, hidden_size=768, intermediate_size=64, num_hidden_layers=12,
        num_attention_heads=12,
    ))  # fmt: skip


def build_t5() -> torch.nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(
        vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False,
    ))  # fmt: skip


BUILDERS = {
    "wan": build_wan, "flux": build_flux, "chroma": build_chroma, "sd3": build_sd3,
    "hunyuan-video": build_hunyuan, "ltx": build_ltx, "lumina2": build_lumina, "z-image": build_z_image,
    "qwen-image": build_qwen, "cogvideox": build_cogvideox, "sd-unet": build_unet,
    "sdxl-unet": build_unet_xl, "vae": build_vae, "wan-vae": build_wan_vae, "clip": build_clip,
    "t5": build_t5,
}  # fmt: skip
