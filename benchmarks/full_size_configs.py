"""Folders with the configs of three full-size models and nothing else: no weights, no vocabularies.

Values as their authors publish them in the Diffusers layout (zai-org/CogVideoX-5b,
zai-org/CogView3-Plus-3B, stabilityai/stable-video-diffusion-img2vid-xt); what equals a class's own
default is left away.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

T5_XXL = {
    "architectures": ["T5EncoderModel"],
    "model_type": "t5",
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
CLIP_H = {
    "architectures": ["CLIPVisionModelWithProjection"],
    "model_type": "clip_vision_model",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "projection_dim": 1024,
    "patch_size": 14,
    "image_size": 224,
    "hidden_act": "gelu",
}
SCHEDULE = {
    "_class_name": "CogVideoXDDIMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "set_alpha_to_one": True,
    "timestep_spacing": "trailing",
}
DIFFUSERS = "diffusers"
TRANSFORMERS = "transformers"

MODELS: dict[str, tuple[str, dict[str, tuple[str, str, dict[str, Any]]]]] = {
    "CogVideoX-5B": (
        "CogVideoXPipeline",
        {
            "tokenizer": (TRANSFORMERS, "T5Tokenizer", {}),
            "text_encoder": (TRANSFORMERS, "T5EncoderModel", T5_XXL),
            "transformer": (
                DIFFUSERS,
                "CogVideoXTransformer3DModel",
                {
                    "num_attention_heads": 48,
                    "num_layers": 42,
                    "text_embed_dim": 4096,
                    "sample_width": 90,
                    "sample_height": 60,
                    "sample_frames": 49,
                    "max_text_seq_length": 226,
                    "use_rotary_positional_embeddings": True,
                    "use_learned_positional_embeddings": False,
                },
            ),
            "vae": (
                DIFFUSERS,
                "AutoencoderKLCogVideoX",
                {
                    "block_out_channels": [128, 256, 256, 512],
                    "latent_channels": 16,
                    "layers_per_block": 3,
                    "scaling_factor": 0.7,
                    "sample_height": 480,
                    "sample_width": 720,
                    "temporal_compression_ratio": 4,
                    "down_block_types": ["CogVideoXDownBlock3D"] * 4,
                    "up_block_types": ["CogVideoXUpBlock3D"] * 4,
                },
            ),
            "scheduler": (
                DIFFUSERS,
                "CogVideoXDDIMScheduler",
                {**SCHEDULE, "snr_shift_scale": 1.0},
            ),
        },
    ),
    "CogView3-Plus-3B": (
        "CogView3PlusPipeline",
        {
            "tokenizer": (TRANSFORMERS, "T5Tokenizer", {}),
            "text_encoder": (TRANSFORMERS, "T5EncoderModel", T5_XXL),
            "transformer": (DIFFUSERS, "CogView3PlusTransformer2DModel", {}),
            "vae": (
                DIFFUSERS,
                "AutoencoderKL",
                {
                    "down_block_types": ["DownEncoderBlock2D"] * 4,
                    "up_block_types": ["UpDecoderBlock2D"] * 4,
                    "block_out_channels": [128, 512, 1024, 1024],
                    "layers_per_block": 3,
                    "latent_channels": 16,
                    "sample_size": 1024,
                    "force_upcast": True,
                    "use_quant_conv": False,
                    "use_post_quant_conv": False,
                    "mid_block_add_attention": False,
                },
            ),
            "scheduler": (
                DIFFUSERS,
                "CogVideoXDDIMScheduler",
                {**SCHEDULE, "snr_shift_scale": 4.0},
            ),
        },
    ),
    "SVD-XT": (
        "StableVideoDiffusionPipeline",
        {
            "image_encoder": (TRANSFORMERS, "CLIPVisionModelWithProjection", CLIP_H),
            "feature_extractor": (TRANSFORMERS, "CLIPImageProcessor", {}),
            "unet": (
                DIFFUSERS,
                "UNetSpatioTemporalConditionModel",
                {"num_attention_heads": [5, 10, 20, 20], "num_frames": 25, "sample_size": 96},
            ),
            "vae": (
                DIFFUSERS,
                "AutoencoderKLTemporalDecoder",
                {
                    "block_out_channels": [128, 256, 512, 512],
                    "down_block_types": ["DownEncoderBlock2D"] * 4,
                    "layers_per_block": 2,
                    "latent_channels": 4,
                    "sample_size": 768,
                    "force_upcast": True,
                },
            ),
            "scheduler": (
                DIFFUSERS,
                "EulerDiscreteScheduler",
                {
                    "_class_name": "EulerDiscreteScheduler",
                    "beta_start": 0.00085,
                    "beta_end": 0.012,
                    "beta_schedule": "scaled_linear",
                    "prediction_type": "v_prediction",
                    "interpolation_type": "linear",
                    "timestep_type": "continuous",
                    "timestep_spacing": "leading",
                    "steps_offset": 1,
                    "sigma_min": 0.002,
                    "sigma_max": 700.0,
                    "use_karras_sigmas": True,
                },
            ),
        },
    ),
}
"""Model → pipeline class, and component → (library, class, config)."""

CALLS = {"SVD-XT": {"height": 576, "width": 1024}}
"""Arguments of a call where a pipeline's own defaults are not what its authors recommend."""


def write_configs(name: str, folder: Path) -> Path:
    """A Diffusers folder with a model's configs."""
    pipeline, components = MODELS[name]
    folder.mkdir(parents=True)
    index = {part: [library, kind] for part, (library, kind, _) in components.items()}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline, **index}))
    for part, (_, kind, config) in components.items():
        (folder / part).mkdir()
        if kind.endswith("Tokenizer"):
            continue
        file = "scheduler_config.json" if kind.endswith("Scheduler") else "config.json"
        file = "preprocessor_config.json" if kind.endswith("ImageProcessor") else file
        content = {"_class_name": kind, **config} if "model_type" not in config else config
        (folder / part / file).write_text(json.dumps(content, indent=2))
    return folder
