"""Nodes and settings that only these tests need, put beside the pack into `custom_nodes`.

ComfyUI knows a Z-Image by its width of 3840 and gives every Qwen-Image 24 heads: at those widths one
layer has 300 million weights. Here narrower ones are known too, also of Flux and of Wan's autoencoder,
whose sizes older versions do not read from the weights. Text encoders of these models have fixed sizes of
gigabytes; `TestConditioning` draws what one would give.

ComfyUI refuses `--lowvram` beside `--cpu`. With STOPDOWN_TEST_LOWVRAM=1 it loads as it does on a GPU with
that option: weights wait, and are cast and patched at each call.
"""

from __future__ import annotations

import os
from typing import Any

import comfy.ldm.wan.vae
import comfy.model_detection
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher

_detect = comfy.model_detection.detect_unet_config


def _detect_narrow(state_dict: Any, key_prefix: str, *args: Any, **kwargs: Any) -> Any:
    config = _detect(state_dict, key_prefix, *args, **kwargs)
    if config and config.get("image_model") == "qwen_image":
        width = state_dict[f"{key_prefix}img_in.weight"].shape[0]
        text = state_dict[f"{key_prefix}txt_in.weight"].shape[1]
        config |= {"num_attention_heads": width // 128, "joint_attention_dim": text}
    elif config and config.get("image_model") == "flux":
        width = state_dict[f"{key_prefix}img_in.weight"].shape[0]
        text = state_dict[f"{key_prefix}txt_in.weight"].shape[1]
        config |= {"hidden_size": width, "num_heads": width // 128, "context_in_dim": text}
    elif config and config.get("image_model") == "lumina2" and config["dim"] < 1024:
        config |= NARROW_Z_IMAGE
    return config


NARROW_Z_IMAGE = {
    "n_heads": 2,
    "n_kv_heads": 2,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
}

comfy.model_detection.detect_unet_config = _detect_narrow


_WanVAE = comfy.ldm.wan.vae.WanVAE


def _make_narrow_vae(**config: Any) -> Any:
    return _WanVAE(**{**config, "dim": 16})


comfy.ldm.wan.vae.WanVAE = _make_narrow_vae


NARROW_T5 = {"num_layers": 2, "d_model": 64, "d_kv": 32, "num_heads": 2, "d_ff": 128}

_load_clip = comfy.sd.load_clip


def _load_narrow_clip(*args: Any, model_options: Any = None, **kwargs: Any) -> Any:
    narrow = {**(model_options or {}), "t5base_model_config": NARROW_T5}
    return _load_clip(*args, model_options=narrow, **kwargs)


comfy.sd.load_clip = _load_narrow_clip

_load = ModelPatcher.load


def _load_partially(
    self: Any,
    device_to: Any = None,
    lowvram_model_memory: int = 0,
    force_patch_weights: bool = False,
    full_load: bool = False,
) -> Any:
    return _load(self, device_to, 1, force_patch_weights, False)


if os.environ.get("STOPDOWN_TEST_LOWVRAM"):
    ModelPatcher.load = _load_partially


class TestConditioning:
    """What a text encoder would give, drawn by a number."""

    CATEGORY, FUNCTION, RETURN_TYPES = "test", "make", ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls) -> Any:  # ComfyUI asks by this name
        """What it takes."""
        whole = ("INT", {"default": 0, "min": 0, "max": 100000})
        return {"required": {"number": whole, "tokens": whole, "width": whole, "pooled": whole}}

    def make(self, number: int, tokens: int, width: int, pooled: int) -> Any:
        """Conditioning of `[1, tokens, width]`."""
        generator = torch.Generator().manual_seed(number)
        text = torch.randn(1, tokens, width, generator=generator)
        return ([[text, {"pooled_output": torch.randn(1, pooled, generator=generator)}]],)


NODE_CLASS_MAPPINGS = {
    "TestConditioning": TestConditioning,
}
