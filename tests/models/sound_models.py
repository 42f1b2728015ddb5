"""Tiny pipelines of sound, of real Diffusers classes with weights drawn from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stopdown.pipelines.tiny_pipelines import build_part, make_t5_tokenizer


def make_stable_audio(seed: int = 0) -> Any:
    """Stable Audio 1 with sound of two channels at 800 Hz."""
    import diffusers
    from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = diffusers.StableAudioDiTModel(
            sample_size=16,
            in_channels=3,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_attention_heads=2,
            out_channels=3,
            cross_attention_dim=32,
            time_proj_dim=8,
            global_states_input_dim=64,
            cross_attention_input_dim=32,
        )
        vae = diffusers.AutoencoderOobleck(
            encoder_hidden_size=6,
            downsampling_ratios=[1, 2],
            decoder_channels=3,
            decoder_input_channels=3,
            audio_channels=2,
            channel_multiples=[2, 4],
            sampling_rate=800,
        )
        projection = StableAudioProjectionModel(
            text_encoder_dim=32, conditioning_dim=32, min_value=0, max_value=32
        )
        encoder = build_part("t5")
    pipe = diffusers.StableAudioPipeline(
        vae=vae,
        text_encoder=encoder,
        projection_model=projection,
        tokenizer=make_t5_tokenizer(),
        transformer=transformer,
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(
            solver_order=2,
            prediction_type="v_prediction",
            sigma_data=1.0,
            sigma_schedule="exponential",
        ),
    )
    pipe.tokenizer.model_max_length = 16
    return pipe


def save_stable_audio(folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """The folder that tiny Stable Audio was saved to."""
    make_stable_audio().to(dtype).save_pretrained(folder)
    return folder
