"""A tiny Z-Image of real classes whose text encoder overflows, and returns more than fp16 holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

GROWTH = {"mlp.up_proj": 2.0**9, "mlp.down_proj": 2.0**17}


def make_zimage() -> Any:
    """Build it in fp32: hidden states of 107,584, as Gemma 3 and Qwen3 have them."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3Model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = Qwen3Model(
            Qwen3Config(
                vocab_size=128,
                hidden_size=16,
                intermediate_size=48,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
            )
        )
        denoiser = ZImageTransformer2DModel(
            all_patch_size=(2,),
            all_f_patch_size=(1,),
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        )
        denoiser.x_pad_token.data.zero_()
        denoiser.cap_pad_token.data.zero_()
        vae = AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2,
            block_out_channels=[8, 8],
            norm_num_groups=4,
            scaling_factor=0.3611,
            shift_factor=0.1159,
        )
    grow_(encoder, GROWTH)
    for module in (encoder, denoiser, vae):
        module.eval().requires_grad_(False)
    pipe = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=encoder,
        tokenizer=make_tokenizer(),
        transformer=denoiser,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def grow_(module: nn.Module, growth: Mapping[str, float]) -> nn.Module:
    """Multiply the weights of the layers whose paths end so, in place."""
    for path, part in module.named_modules():
        for end, factor in growth.items():
            if path.endswith(end):
                part.weight.data.mul_(factor)
    return module


def make_tokenizer(longest: int = 1024) -> Any:
    """One token for each letter."""
    from transformers import Qwen2Tokenizer

    pieces = ["<|endoftext|>", "<unk>", *map(chr, range(97, 123)), "\u0120"]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        model_max_length=longest,
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer
