"""The autoencoder of `solids`: an `AutoencoderKL` of Diffusers that works frame by frame.

A frame of 96x96 pixels becomes 12 channels of 12x12, 16 times fewer numbers. Sides shrink 8 times.
There's no attention in it, so any side that is a multiple of 8 works.

Group norms train with an eps of almost nothing, as those of `shapes` do: feature maps can then be
scaled up by a power of two without a change in what the class computes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from torch import nn

EPS = 1e-6 * 2.0**-28
CONFIG = {
    "block_out_channels": (24, 48, 96, 128),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 12,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 96,
    "mid_block_add_attention": False,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "force_upcast": False,
}
WEIGHTS = Path(__file__).parent / "autoencoder.safetensors"


FACTOR = WEIGHTS.with_suffix(".json")
"""Holds what latents are multiplied by, so that their standard deviation is 1."""


def read_factor() -> float:
    return json.loads(FACTOR.read_text())["scaling_factor"]


def make_autoencoder() -> AutoencoderKL:
    """Make the autoencoder with fresh weights; its latents begin almost without noise."""
    vae = AutoencoderKL(**CONFIG)
    for module in vae.modules():
        if isinstance(module, nn.GroupNorm):
            module.eps = EPS
    with torch.no_grad():
        vae.encoder.conv_out.bias[CONFIG["latent_channels"] :] = -6.0
    return vae.to(memory_format=torch.channels_last)


def load_autoencoder(path: Path = WEIGHTS) -> AutoencoderKL:
    """Load stored fp16 weights into an fp32 autoencoder."""
    vae = make_autoencoder()
    vae.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return vae.eval()
