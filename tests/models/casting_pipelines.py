"""Tiny pipelines of real classes that cast what their text encoder returns in their own code.

To the dtype that the encoder says it has (LTX-2, Qwen-Image), or to that of the transformer (Kandinsky 5).
The encoders overflow, and return more than fp16 holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.encoder_models import make_encoder
from models.zimage import grow_, make_tokenizer
from stopdown.pipelines.tiny_pipelines import build_part


@dataclass(frozen=True)
class Casting:
    """A pipeline that casts by itself.

    Attributes:
        make: builds it in fp32.
        class_name: of the pipeline, in Diffusers.
        reads: whose dtype its code reads.
        arguments: of a short run.
    """

    make: Callable[[], Any]
    class_name: str
    reads: str
    arguments: dict[str, Any]


def draw(pipe: Any, name: str) -> torch.Tensor:
    """The latents that one run of two steps gives."""
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        "a fox",
        num_inference_steps=2,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        return_dict=False,
        **CASTING[name].arguments,
    )
    return torch.as_tensor(made[0])


def make_qwen_transformer(channels: int, **options: Any) -> nn.Module:
    """The transformer of Qwen-Image for latents of some channels, in patches of 2 x 2."""
    import diffusers

    return diffusers.QwenImageTransformer2DModel(
        in_channels=4 * channels,
        out_channels=channels,
        attention_head_dim=16,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        **options,
    )


def make_qwen_vae(channels: int, **options: Any) -> nn.Module:
    """The autoencoder of Qwen-Image with latents of some channels."""
    import diffusers

    return diffusers.AutoencoderKLQwenImage(
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
        **options,
    )


def _make_qwen_image() -> Any:
    import diffusers

    encoder = _make_encoder("Qwen2_5_VLForConditionalGeneration", **_QWEN)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = make_qwen_transformer(4, num_layers=2, num_attention_heads=2)
        vae = make_qwen_vae(4, base_dim=8)
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_freeze(vae),
        text_encoder=encoder,
        tokenizer=make_tokenizer(),
        transformer=_freeze(transformer),
    )


def _make_kandinsky() -> Any:
    import diffusers

    encoder = _make_encoder("Qwen2_5_VLForConditionalGeneration", **_QWEN)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=32,
            in_text_dim2=32,
            time_dim=32,
            model_dim=32,
            ff_dim=64,
            num_text_blocks=1,
            num_visual_blocks=1,
            axes_dims=(4, 6, 6),
        )
        vae = diffusers.AutoencoderKLHunyuanVideo(
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=4,
            mid_block_add_attention=False,
        )
    return diffusers.Kandinsky5T2VPipeline(
        transformer=_freeze(transformer),
        vae=_freeze(vae),
        text_encoder=encoder,
        tokenizer=make_tokenizer(),  # its processor of pictures needs a package
        text_encoder_2=build_part("clip"),
        tokenizer_2=make_tokenizer(77),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def _make_ltx2() -> Any:
    import diffusers
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    encoder = _make_encoder("Gemma3ForConditionalGeneration", **_GEMMA)
    heads: dict[str, int] = {"attention_head_dim": 16, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = diffusers.LTX2VideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            **heads,
            cross_attention_dim=32,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
            num_layers=1,
            caption_channels=32,
            rope_double_precision=False,
            rope_type="split",
        )
        connectors = LTX2TextConnectors(
            caption_channels=32,
            text_proj_in_factor=3,
            video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=16,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=None,
            audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=16,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=None,
            connector_rope_base_seq_len=32,
            rope_double_precision=False,
            rope_type="split",
        )
        vae = diffusers.AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8,),
            decoder_block_out_channels=(8,),
            layers_per_block=(1,),
            decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatial",),
            upsample_residual=(False,),
            upsample_factor=(1,),
            patch_size=1,
            patch_size_t=1,
            spatial_compression_ratio=32,  # a dry run has latents of a real one's size
            temporal_compression_ratio=8,
        )
        audio_vae = diffusers.AutoencoderKLLTX2Audio(
            base_channels=4,
            output_channels=2,
            ch_mult=(1,),
            num_res_blocks=1,
            in_channels=2,
            resolution=32,
            latent_channels=2,
            mel_bins=8,
        )
        vocoder = LTX2Vocoder(
            in_channels=audio_vae.config.output_channels * audio_vae.config.mel_bins,
            hidden_channels=32,
            out_channels=2,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            leaky_relu_negative_slope=0.1,
            output_sampling_rate=16000,
        )
    return diffusers.LTX2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_freeze(vae),
        audio_vae=_freeze(audio_vae),
        text_encoder=encoder,
        tokenizer=make_tokenizer(16),
        connectors=_freeze(connectors),
        transformer=_freeze(transformer),
        vocoder=_freeze(vocoder),
    )


_QWEN = {"mlp.up_proj": 2.0**8, "mlp.down_proj": 2.0**12, "language_model.norm": 2.0**15}
_GEMMA = {"mlp.up_proj": 2.0**12, "mlp.down_proj": 2.0**8, "post_feedforward_layernorm": 2.0**15}
"""Ends of paths to what multiplies weights: values beyond fp16 inside, and in what is returned."""


def _make_encoder(name: str, **growth: float) -> nn.Module:
    return grow_(make_encoder(name), growth)


def _freeze(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


_SIZE = {"height": 32, "width": 32}
CASTING: dict[str, Casting] = {
    "qwen-image": Casting(
        _make_qwen_image,
        "QwenImagePipeline",
        "text_encoder",
        {**_SIZE, "max_sequence_length": 16, "true_cfg_scale": 1.0},
    ),
    "ltx-2": Casting(
        _make_ltx2,
        "LTX2Pipeline",
        "text_encoder",
        {
            "height": 64,
            "width": 64,
            "num_frames": 9,
            "frame_rate": 25.0,
            "max_sequence_length": 16,
            "guidance_scale": 1.0,
        },
    ),
    "kandinsky-5": Casting(
        _make_kandinsky,
        "Kandinsky5T2VPipeline",
        "transformer",
        {**_SIZE, "num_frames": 5, "guidance_scale": 1.0, "max_sequence_length": 16},
    ),
}
"""Name to a pipeline."""
