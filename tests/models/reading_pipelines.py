"""A tiny Lumina 2, whose transformer reads the lengths of its prompts, and overflows in fp16."""

from __future__ import annotations

from typing import Any

import torch

from models.zimage import grow_, make_tokenizer

GROWTH = {"feed_forward.linear_2": 2.0**17}


def make_lumina() -> Any:
    """Build it in fp32."""
    import diffusers
    from transformers import Gemma2Config, Gemma2Model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = diffusers.Lumina2Transformer2DModel(
            sample_size=8,
            in_channels=4,
            hidden_size=32,
            num_layers=1,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(300, 64, 64),
            cap_feat_dim=16,
        )
        encoder = Gemma2Model(
            Gemma2Config(
                vocab_size=64,
                head_dim=8,
                hidden_size=16,
                intermediate_size=32,
                num_attention_heads=2,
                num_hidden_layers=2,
                num_key_value_heads=1,
                sliding_window=64,
            )
        )
        vae = diffusers.AutoencoderKL(
            block_out_channels=(8,) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=4,
            shift_factor=0.06,
            scaling_factor=1.5,
        )
    grow_(transformer, GROWTH)
    for module in (encoder, transformer, vae):
        module.eval().requires_grad_(False)
    pipe = diffusers.Lumina2Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=encoder,
        tokenizer=make_tokenizer(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw_lumina(pipe: Any, prompt: str) -> torch.Tensor:
    """One picture of a prompt."""
    made = pipe(
        prompt,
        negative_prompt="a b",
        height=64,
        width=64,
        num_inference_steps=2,
        max_sequence_length=32,
        system_prompt="a",
        generator=torch.Generator().manual_seed(3),
        output_type="np",
    )
    return torch.as_tensor(made.images)
