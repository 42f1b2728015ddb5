"""Tiny models in the files that others read: which sizes ComfyUI guesses from their shapes.

A program that reads a file takes some sizes from its shapes and has others in its code; these keep to
the latter. Each overflows in fp16 and nowhere else.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from models.rescaling_models import from_diffusers, from_transformers
from stopdown.pipelines.tiny_pipelines import overflow_

SMALLEST = 2.0**-9
"""Weights below are 0 here, so that eight bits of the others outlive a fold in fp16."""

Shapes = Mapping[str, Any]
"""Argument to the shape of noise, or to itself where it is a tensor, text or number."""


@dataclass(frozen=True)
class FileModel:
    """A component that is published as a file by itself.

    Attributes:
        build: it, in fp32.
        call: of the class in Diffusers.
        inputs: of the model in ComfyUI.
        target: class in ComfyUI, where its loader takes sizes from its code that no tiny model has.
        options: of that class.
        prefix: before the names in its file, as a whole checkpoint has them and Diffusers wants them.
        metadata: of its file.
        sgm: class in Stability-AI's sgm that reads it, too.
        sgm_options: of that class.
        spikes: pattern of parameters to the power of two that they are multiplied by besides.
    """

    build: Callable[[], torch.nn.Module]
    call: Shapes
    inputs: Shapes
    target: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    sgm: str = ""
    sgm_options: Mapping[str, Any] = field(default_factory=dict)
    spikes: Mapping[str, int] = field(default_factory=dict)


def draw(shapes: Shapes) -> dict[str, Any]:
    """Arguments with noise for shapes."""
    noise = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(x, generator=noise) if isinstance(x, tuple) else x
        for name, x in shapes.items()
    }


def build(name: str) -> torch.nn.Module:
    """A model in bf16 that overflows in fp16, without its smallest weights."""
    model = find_model(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = model.build().eval().requires_grad_(False)
    overflow_(module)
    for key, tensor in module.state_dict().items():
        for pattern, exponent in model.spikes.items():
            if re.fullmatch(pattern, key):
                tensor.mul_(2.0**exponent)
    round_(module)
    return module


def find_model(name: str) -> FileModel:
    """A model of either table."""
    return (MODELS | SDCPP)[name]


build_wan = from_diffusers(
    "WanTransformer3DModel", num_attention_heads=1, attention_head_dim=128, in_channels=16,
    out_channels=16, text_dim=4096, freq_dim=256, ffn_dim=256, num_layers=2,
)  # fmt: skip


def build_flux(text_width: int = 32, pooled_width: int = 32) -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=128, num_attention_heads=1,
        joint_attention_dim=text_width, pooled_projection_dim=pooled_width, guidance_embeds=True,
    )  # fmt: skip


def build_flux_attention() -> torch.nn.Module:
    """Attention values of its single block beyond fp16, with a feed-forward that counts as much beside."""
    module = build_flux()
    block: Any = module.get_submodule("single_transformer_blocks.0")
    with torch.no_grad():
        block.attn.to_v.weight.mul_(2.0**20)
        block.proj_out.weight[:, 128:].mul_(2.0**20)
    return module


build_chroma = from_diffusers(
    "ChromaTransformer2DModel", in_channels=64, num_layers=1, num_single_layers=1,
    attention_head_dim=128, num_attention_heads=1, joint_attention_dim=32, approximator_num_channels=64,
    approximator_hidden_dim=32, approximator_layers=2,
)  # fmt: skip
build_sd3 = from_diffusers(
    "SD3Transformer2DModel", sample_size=8, patch_size=2, in_channels=16, out_channels=16, num_layers=2,
    attention_head_dim=64, num_attention_heads=2, joint_attention_dim=64, caption_projection_dim=128,
    pooled_projection_dim=32, pos_embed_max_size=8,
)  # fmt: skip
build_hunyuan = from_diffusers(
    "HunyuanVideoTransformer3DModel", in_channels=16, out_channels=16, num_attention_heads=1,
    attention_head_dim=128, num_layers=1, num_single_layers=1, num_refiner_layers=2, text_embed_dim=32,
    pooled_projection_dim=768,
)  # fmt: skip
build_ltx = from_diffusers(
    "LTXVideoTransformer3DModel", in_channels=128, out_channels=128, num_attention_heads=32,
    attention_head_dim=4, cross_attention_dim=128, num_layers=2, caption_channels=4096,
)  # fmt: skip
build_lumina = from_diffusers(
    "Lumina2Transformer2DModel", in_channels=16, sample_size=16, hidden_size=96, num_layers=1,
    num_refiner_layers=2, num_attention_heads=1, num_kv_heads=1, cap_feat_dim=32,
)  # fmt: skip
build_z_image = from_diffusers(
    "ZImageTransformer2DModel", in_channels=16, dim=1536, n_layers=1, n_refiner_layers=1, n_heads=12,
    n_kv_heads=12, cap_feat_dim=32,
)  # fmt: skip
build_qwen = from_diffusers(
    "QwenImageTransformer2DModel", in_channels=64, out_channels=16, num_layers=2, num_attention_heads=1,
    attention_head_dim=128, joint_attention_dim=32,
)  # fmt: skip
build_cogvideox = from_diffusers(
    "CogVideoXTransformer3DModel", num_attention_heads=2, attention_head_dim=64, in_channels=16,
    out_channels=16, time_embed_dim=64, text_embed_dim=32, num_layers=2, sample_width=8,
    sample_height=8, sample_frames=9, use_rotary_positional_embeddings=True,
)  # fmt: skip
build_unet = from_diffusers(
    "UNet2DConditionModel", sample_size=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(320, 320),
    layers_per_block=1, attention_head_dim=8, cross_attention_dim=768,
)  # fmt: skip
build_unet_xl = from_diffusers(
    "UNet2DConditionModel", sample_size=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), block_out_channels=(32, 64), layers_per_block=2,
    attention_head_dim=2, cross_attention_dim=32, use_linear_projection=True,
    transformer_layers_per_block=(0, 2), addition_embed_type="text_time", addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=6 * 8 + 32,
)  # fmt: skip


def build_pipeline() -> Any:
    """A Stable Diffusion 1 with the sizes that ComfyUI expects, in bf16; UNet and autoencoder overflow."""
    import diffusers
    import transformers

    from stopdown.component_calls.components import find_components
    from stopdown.pipelines.tiny_pipelines import make_clip_tokenizer

    torch.manual_seed(0)
    widths = (128, 256, 512)
    made = diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=widths, layers_per_block=2, latent_channels=4, sample_size=32,
        ),
        text_encoder=transformers.CLIPTextModel(transformers.CLIPTextConfig(
            vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
            num_attention_heads=12, bos_token_id=49406, eos_token_id=49407,
        )),
        tokenizer=make_clip_tokenizer(), unet=build_unet(), scheduler=diffusers.EulerDiscreteScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    for module in find_components(made).values():
        module.eval().requires_grad_(False)
        if module is not made.text_encoder:
            overflow_(module)
        round_(module)
        module.to(torch.bfloat16)
    return made


def build_svd() -> Any:
    """A Stable Video Diffusion with the sizes of `SVD_PARTS`, in bf16; UNet and autoencoder overflow."""
    import diffusers
    import transformers

    from stopdown.component_calls.components import find_components

    torch.manual_seed(0)
    made = diffusers.StableVideoDiffusionPipeline(
        vae=build_svd_vae(), unet=build_svd_unet(),
        image_encoder=transformers.CLIPVisionModelWithProjection(
            transformers.CLIPVisionConfig(**_VISION)
        ),
        scheduler=diffusers.EulerDiscreteScheduler(
            prediction_type="v_prediction", timestep_type="continuous", sigma_min=0.002, sigma_max=700.0,
            use_karras_sigmas=True,
        ),
        feature_extractor=transformers.CLIPImageProcessor(),
    )  # fmt: skip
    for module in find_components(made).values():
        module.eval().requires_grad_(False)
        if module is not made.image_encoder:  # whose output would be beyond fp16
            overflow_(module)
        round_(module)
        module.to(torch.bfloat16)
    return made


def round_(module: torch.nn.Module) -> None:
    """Bring weights to bf16, without those that fp16 could not hold beside the tensor's largest."""
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            least = max(SMALLEST, float(tensor.abs().max()) * 2.0**-16)
            tensor.masked_fill_(tensor.abs() < least, 0)
            tensor.copy_(tensor.bfloat16())


build_vae = from_diffusers(
    "AutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 3,
    up_block_types=("UpDecoderBlock2D",) * 3, block_out_channels=(32, 32, 64), latent_channels=4,
    layers_per_block=2, norm_num_groups=32, sample_size=32,
)  # fmt: skip
build_flux_vae = from_diffusers(
    "AutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4, block_out_channels=(32, 64, 128, 128), latent_channels=16,
    layers_per_block=2, sample_size=32, use_quant_conv=False, use_post_quant_conv=False,
    scaling_factor=0.3611, shift_factor=0.1159,
)  # fmt: skip
build_sdxl_vae = from_diffusers(
    "AutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4, block_out_channels=(32, 64, 128, 128), latent_channels=4,
    layers_per_block=2, sample_size=32, scaling_factor=0.13025,
)  # fmt: skip
build_wan_vae = from_diffusers(
    "AutoencoderKLWan", base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2,
    temperal_downsample=[False, True, True],
)  # fmt: skip
build_hunyuan_vae = from_diffusers(
    "AutoencoderKLHunyuanVideo", block_out_channels=(32, 32, 32, 32), layers_per_block=2
)
build_cogvideox_vae = from_diffusers(
    "AutoencoderKLCogVideoX", down_block_types=("CogVideoXDownBlock3D",) * 4,
    up_block_types=("CogVideoXUpBlock3D",) * 4, block_out_channels=(32, 32, 32, 32), layers_per_block=1,
    latent_channels=4,
)  # fmt: skip
build_ltx_vae = from_diffusers(
    "AutoencoderKLLTXVideo", latent_channels=128, block_out_channels=(16, 32, 64, 64),
    decoder_block_out_channels=(16, 32, 64, 64), layers_per_block=(1,) * 5,
    decoder_layers_per_block=(1,) * 5,
)  # fmt: skip
build_cogview4 = from_diffusers(
    "CogView4Transformer2DModel", in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
    num_attention_heads=2, text_embed_dim=32, time_embed_dim=32, condition_dim=8, pos_embed_max_size=8,
    sample_size=8, rope_axes_dim=(8, 8),
)  # fmt: skip
build_svd_unet = from_diffusers(
    "UNetSpatioTemporalConditionModel", sample_size=8, block_out_channels=(32, 64), layers_per_block=1,
    num_attention_heads=(2, 4),
    down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=32,
    addition_time_embed_dim=4, projection_class_embeddings_input_dim=12,
)  # fmt: skip
build_svd_vae = from_diffusers(
    "AutoencoderKLTemporalDecoder", down_block_types=("DownEncoderBlock2D",) * 3,
    block_out_channels=(32, 32, 64), layers_per_block=2, sample_size=32,
)  # fmt: skip
build_clip = from_transformers(
    "CLIPTextModel", "CLIPTextConfig", vocab_size=64, hidden_size=64, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=2,
)  # fmt: skip
build_t5 = from_transformers(
    "T5EncoderModel", "T5Config", vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=2,
    num_heads=4, feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False,
)  # fmt: skip
_SVD_UNET = {
    "in_channels": 8, "model_channels": 32, "out_channels": 4, "channel_mult": (1, 2),
    "num_head_channels": 16, "use_linear_in_transformer": True, "context_dim": 32,
    "adm_in_channels": 12, "num_classes": "sequential", "extra_ff_mix_layer": True,
    "use_spatial_context": True, "merge_strategy": "learned_with_images", "video_kernel_size": [3, 1, 1],
}  # fmt: skip
_LTX_VAE = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3,
    "latent_channels": 128, "encoder_base_channels": 16, "decoder_base_channels": 16,
    "blocks": [
        ["res_x", 1], ["compress_all", 1], ["res_x_y", 1], ["res_x", 1], ["compress_all", 1],
        ["res_x_y", 1], ["res_x", 1], ["compress_all", 1], ["res_x", 1], ["res_x", 1],
    ],
    "scaling_factor": 1.0, "norm_layer": "pixel_norm", "patch_size": 4, "latent_log_var": "uniform",
    "use_quant_conv": False, "causal_decoder": False,
}  # fmt: skip
_HUNYUAN_VAE = {
    "double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 1, 1, 1], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
    "conv3d": True, "time_compress": 4,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 224, "patch_size": 56, "projection_dim": 32, "hidden_act": "gelu",
}  # fmt: skip
_SVD_VAE = {
    "double_z": True, "z_channels": 4, "resolution": 32, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 1, 2], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
STEP = torch.tensor([500.0])
_ROPE = (16, 56, 56)

FLUX = FileModel(
    build_flux,
    {
        "hidden_states": (1, 16, 64),
        "timestep": STEP / 1000,
        "encoder_hidden_states": (1, 8, 32),
        "pooled_projections": (1, 32),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    },
    {
        "x": (1, 16, 8, 8),
        "timestep": STEP / 1000,
        "context": (1, 8, 32),
        "y": (1, 32),
        "guidance": torch.tensor([3.5]),
    },
)

MODELS = {
    "wan": FileModel(
        build_wan,
        {"hidden_states": (1, 16, 3, 8, 8), "timestep": STEP, "encoder_hidden_states": (1, 16, 4096)},
        {"x": (1, 16, 3, 8, 8), "timestep": STEP, "context": (1, 16, 4096)},
    ),
    "flux": FLUX,
    "flux-attention": replace(FLUX, build=build_flux_attention),
    "chroma": FileModel(
        build_chroma,
        {
            "hidden_states": (1, 16, 64), "timestep": STEP / 1000, "encoder_hidden_states": (1, 8, 32),
            "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3),
        },
        {"x": (1, 16, 8, 8), "timestep": STEP / 1000, "context": (1, 8, 32), "guidance": torch.zeros(1)},
        "comfy.ldm.chroma.model:Chroma",
        {
            "in_channels": 64, "out_channels": 64, "context_in_dim": 32, "hidden_size": 128,
            "mlp_ratio": 4.0, "num_heads": 1, "depth": 1, "depth_single_blocks": 1, "axes_dim": _ROPE,
            "theta": 10000, "patch_size": 2, "qkv_bias": True, "in_dim": 64, "out_dim": 128,
            "hidden_dim": 32, "n_layers": 2, "txt_ids_dims": [], "vec_in_dim": 0,
        },
    ),
    "sd3": FileModel(
        build_sd3,
        {
            "hidden_states": (1, 16, 8, 8), "timestep": STEP, "encoder_hidden_states": (1, 8, 64),
            "pooled_projections": (1, 32),
        },
        {"x": (1, 16, 8, 8), "timesteps": STEP, "context": (1, 8, 64), "y": (1, 32)},
    ),
    "hunyuan-video": FileModel(
        build_hunyuan,
        {
            "hidden_states": (1, 16, 3, 8, 8), "timestep": STEP, "encoder_hidden_states": (1, 8, 32),
            "encoder_attention_mask": torch.ones(1, 8), "pooled_projections": (1, 768),
            "guidance": torch.tensor([3500.0]),
        },
        {
            "x": (1, 16, 3, 8, 8), "timestep": STEP, "context": (1, 8, 32), "y": (1, 768),
            "guidance": torch.tensor([3.5]),
        },
    ),
    "ltx": FileModel(
        build_ltx,
        {
            "hidden_states": (1, 48, 128), "timestep": STEP, "encoder_hidden_states": (1, 8, 4096),
            "encoder_attention_mask": torch.ones(1, 8), "num_frames": 3, "height": 4, "width": 4,
        },
        {
            "x": (1, 128, 3, 4, 4), "timestep": STEP / 1000, "context": (1, 8, 4096),
            "attention_mask": None,
        },
    ),
    "lumina2": FileModel(
        build_lumina,
        {
            "hidden_states": (1, 16, 8, 8), "timestep": STEP / 1000, "encoder_hidden_states": (1, 8, 32),
            "encoder_attention_mask": torch.ones(1, 8, dtype=torch.bool),
        },
        {"x": (1, 16, 8, 8), "timesteps": STEP / 1000, "context": (1, 8, 32), "num_tokens": 8},
        "comfy.ldm.lumina.model:NextDiT",
        {
            "in_channels": 16, "dim": 96, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "qk_norm": True,
            "cap_feat_dim": 32, "axes_dims": (32, 32, 32), "axes_lens": (300, 512, 512),
        },
    ),
    "z-image": FileModel(
        build_z_image,
        {"x": [torch.ones(16, 1, 8, 8)], "t": STEP / 1000, "cap_feats": [torch.ones(8, 32)]},
        {"x": (1, 16, 8, 8), "timesteps": STEP / 1000, "context": (1, 8, 32), "num_tokens": 8},
        "comfy.ldm.lumina.model:NextDiT",
        {
            "in_channels": 16, "dim": 1536, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 12,
            "n_kv_heads": 12, "qk_norm": True,
            "cap_feat_dim": 32, "axes_dims": (32, 48, 48), "axes_lens": (1536, 512, 512),
            "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True,
            "time_scale": 1000.0, "pad_tokens_multiple": 32,
        },
    ),
    "qwen-image": FileModel(
        build_qwen,
        {
            "hidden_states": (1, 16, 64), "timestep": STEP / 1000, "encoder_hidden_states": (1, 8, 32),
            "encoder_hidden_states_mask": torch.ones(1, 8, dtype=torch.long),
            "img_shapes": [[(1, 4, 4)]],
        },
        {"x": (1, 16, 1, 8, 8), "timestep": STEP / 1000, "context": (1, 8, 32)},
        "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel",
        {"num_layers": 2, "num_attention_heads": 1, "joint_attention_dim": 32},
    ),
    "cogvideox": FileModel(
        build_cogvideox,
        {
            "hidden_states": (1, 3, 16, 8, 8), "timestep": STEP, "encoder_hidden_states": (1, 226, 32),
            "image_rotary_emb": [torch.ones(48, 64), torch.zeros(48, 64)],
        },
        {"x": (1, 16, 3, 8, 8), "timestep": STEP, "context": (1, 226, 32)},
    ),
    "sd-unet": FileModel(
        build_unet,
        {"sample": (1, 4, 8, 8), "timestep": STEP, "encoder_hidden_states": (1, 8, 768)},
        {"x": (1, 4, 8, 8), "timesteps": STEP, "context": (1, 8, 768)},
        prefix="model.diffusion_model.",
    ),
    "svd-unet": FileModel(
        build_svd_unet,
        {
            "sample": (1, 3, 8, 8, 8), "timestep": STEP / 1000, "encoder_hidden_states": (1, 1, 32),
            "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]]),
        },
        {
            "x": (3, 8, 8, 8), "timesteps": STEP.expand(3) / 1000, "context": (3, 1, 32), "y": (3, 12),
            "num_video_frames": 3, "image_only_indicator": torch.zeros(1, 3),
        },
        "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel",
        {
            **_SVD_UNET, "image_size": 8, "num_res_blocks": [1, 1], "use_spatial_transformer": True,
            "transformer_depth": [1, 0], "transformer_depth_output": [1, 1, 0, 0],
            "transformer_depth_middle": 1, "use_temporal_resblock": True, "use_temporal_attention": True,
        },
        prefix="model.diffusion_model.",
        sgm="sgm.modules.diffusionmodules.video_model:VideoUNet",
        sgm_options={
            **_SVD_UNET, "num_res_blocks": 1, "attention_resolutions": [1], "transformer_depth": 1,
            "spatial_transformer_attn_type": "softmax",
        },
    ),
    "cogview4": FileModel(
        build_cogview4,
        {
            "hidden_states": (1, 4, 8, 8), "encoder_hidden_states": (1, 16, 32), "timestep": STEP,
            "original_size": torch.tensor([[64.0, 64.0]]), "target_size": torch.tensor([[64.0, 64.0]]),
            "crop_coords": torch.zeros(1, 2),
        },
        {},
    ),
    "ltx-vae": FileModel(
        build_ltx_vae, {"z": (1, 128, 2, 4, 4)}, {"z": (1, 128, 2, 4, 4)}, "vae", prefix="vae.",
        metadata={"config": json.dumps({"vae": _LTX_VAE})},
    ),
    "hunyuan-video-vae": FileModel(
        build_hunyuan_vae, {"z": (1, 16, 2, 4, 4)}, {"z": (1, 16, 2, 4, 4)},
        "comfy.ldm.models.autoencoder:AutoencoderKL", {"ddconfig": _HUNYUAN_VAE, "embed_dim": 16},
    ),
    "cogvideox-vae": FileModel(
        build_cogvideox_vae, {"z": (1, 4, 2, 4, 4)}, {"z": (1, 4, 2, 4, 4)},
        "comfy.ldm.cogvideo.vae:AutoencoderKLCogVideoX",
        {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1, "latent_channels": 4},
    ),
    "wan-vae": FileModel(build_wan_vae, {"z": (1, 16, 2, 4, 4)}, {"z": (1, 16, 2, 4, 4)}, "vae"),
}  # fmt: skip
"""Name to a model that is published as a file by itself."""

SDCPP = {
    "sdcpp-flux": FileModel(
        functools.partial(build_flux, 4096, 768),
        {
            "hidden_states": (1, 64, 64), "timestep": torch.ones(1), "guidance": torch.tensor([3.5]),
            "encoder_hidden_states": torch.zeros(1, 256, 4096), "txt_ids": torch.zeros(256, 3),
            "pooled_projections": torch.zeros(1, 768),
            "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
        },
        {},
        spikes={
            r"transformer_blocks\.0\.attn\.(to_v|add_v_proj)\..*": 17,
            r"transformer_blocks\.0\.attn\.(to_out\.0|to_add_out)\.weight": -17,
        },
    ),
    "sdcpp-flux-vae": FileModel(build_flux_vae, {"z": (1, 16, 16, 16)}, {}),
    "sdcpp-sdxl-vae": FileModel(build_sdxl_vae, {"z": (1, 4, 16, 16)}, {}),
    "sdcpp-sdxl-vae-wide": FileModel(
        build_sdxl_vae, {"z": (1, 4, 16, 16)}, {},
        spikes={
            r"decoder\.(conv_in|.*conv2|.*to_out\.0)\..*": 3,
            r"decoder\..*(conv_shortcut|upsamplers\.0\.conv)\.bias": 3,
        },
    ),
}  # fmt: skip
"""Those with sizes that stable-diffusion.cpp has in its code. It keeps values in fp32 between products, so
that a stream alone does not hurt it: here what a product reads is beyond fp16, too."""

OTHERS = {"sdxl-unet": build_unet_xl, "vae": build_vae, "clip": build_clip, "t5": build_t5}
"""Further ones, of which no tiny model has the sizes that ComfyUI expects."""


def _make_engine(modules: str, autoencoder: str, decoder: str) -> tuple[str, dict[str, Any]]:
    """The autoencoder of SVD in a program's own classes, and its options."""
    timed = {**_SVD_VAE, "video_kernel_size": [3, 1, 1], "alpha": 0.0, "time_mode": "conv-only"}
    regularizers = {
        "comfy.ldm.modules": "comfy.ldm.models.autoencoder",
        "sgm.modules": "sgm.modules.autoencoding.regularizers",
    }
    return f"{autoencoder}:AutoencodingEngine", {
        "encoder_config": {
            "target": f"{modules}.diffusionmodules.model.Encoder",
            "params": _SVD_VAE,
        },
        "decoder_config": {"target": decoder, "params": timed},
        "regularizer_config": {"target": f"{regularizers[modules]}.DiagonalGaussianRegularizer"},
        **({"loss_config": {"target": "torch.nn.Identity"}} if modules[0] == "s" else {}),
    }


_COMFYUI_VAE = _make_engine(
    "comfy.ldm.modules",
    "comfy.ldm.models.autoencoder",
    "comfy.ldm.modules.temporal_ae.VideoDecoder",
)
_SGM_VAE = _make_engine(
    "sgm.modules", "sgm.models.autoencoder", "sgm.modules.autoencoding.temporal_ae.VideoDecoder"
)
_SVD = MODELS["svd-unet"]
SVD_PARTS: dict[str, dict[str, tuple[str, Mapping[str, Any], str, dict[str, Any]]]] = {
    "unet": {
        "comfyui": (_SVD.target, _SVD.options, "forward", {}),
        "sgm": (_SVD.sgm, _SVD.sgm_options, "forward", {}),
    },
    "vae": {
        "comfyui": (*_COMFYUI_VAE, "decode", {}),
        "sgm": (*_SGM_VAE, "decode", {"timesteps": 3}),
    },
    "vae encoder": {
        "comfyui": (*_COMFYUI_VAE, "encode", {"unregularized": True}),
        "sgm": (*_SGM_VAE, "encode", {"unregularized": True}),
    },
    "image_encoder": {
        "comfyui": (
            "image encoder",
            {
                **_VISION,
                "num_channels": 3,
                "layer_norm_eps": 1e-5,
                "model_type": "clip_vision_model",
            },
            "forward",
            {},
        )
    },
}
"""Part of an SVD to the class, its options, the method and further arguments of it in each program."""

SVD_INPUTS: dict[str, Shapes] = {
    "unet": _SVD.inputs,
    "vae": {"z": (3, 4, 8, 8)},
    "vae encoder": {"x": (1, 3, 32, 32)},
    "image_encoder": {"pixel_values": (1, 3, 224, 224)},
}
