"""Stable Diffusion's weights by the names of its first authors, as single files have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from stopdown import testing

Tensors = Mapping[str, torch.Tensor]

RESNET_NAMES = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_NAMES = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "down_blocks.0.resnets.0": "input_blocks.1.0",
    "down_blocks.0.attentions.0": "input_blocks.1.1",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.2.0.op",
    "down_blocks.1.resnets.0": "input_blocks.3.0",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
    "up_blocks.0.resnets.0": "output_blocks.0.0",
    "up_blocks.0.resnets.1": "output_blocks.1.0",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.1.1.conv",
    "up_blocks.1.resnets.0": "output_blocks.2.0",
    "up_blocks.1.attentions.0": "output_blocks.2.1",
    "up_blocks.1.resnets.1": "output_blocks.3.0",
    "up_blocks.1.attentions.1": "output_blocks.3.1",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
VAE_NAMES = (
    (r"(en|de)coder\.mid_block\.resnets\.0", r"\1coder.mid.block_1"),
    (r"(en|de)coder\.mid_block\.resnets\.1", r"\1coder.mid.block_2"),
    (r"(en|de)coder\.mid_block\.attentions\.0", r"\1coder.mid.attn_1"),
    (r"group_norm", "norm"),
    (r"to_([qkv])", r"\1"),
    (r"to_out\.0", "proj_out"),
    (r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2"),
    (r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample"),
    (r"up_blocks\.(\d)\.resnets\.(\d)", lambda m: f"up.{3 - int(m[1])}.block.{m[2]}"),
    (r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{3 - int(m[1])}.upsample"),
    (r"conv_shortcut", "nin_shortcut"),
    (r"conv_norm_out", "norm_out"),
)


def rename_unet(name: str) -> str:
    """A UNet parameter's name in a single file."""
    prefix = max((known for known in UNET_NAMES if name.startswith(f"{known}.")), key=len)
    rest = name.removeprefix(f"{prefix}.")
    if ".resnets." in prefix:
        module, _, parameter = rest.partition(".")
        rest = f"{RESNET_NAMES[module]}.{parameter}"
    return f"model.diffusion_model.{UNET_NAMES[prefix]}.{rest}"


def rename_vae(name: str) -> str:
    """A VAE parameter's name in a single file."""
    for pattern, replacement in VAE_NAMES:
        name = re.sub(pattern, replacement, name)
    return f"first_stage_model.{name}"


def name_unet(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Those of a UNet as a single file has them."""
    return {rename_unet(name): tensor.contiguous() for name, tensor in tensors.items()}


def name_vae(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Those of a VAE, whose linear projections are convolutions there."""
    projections = {x for x in tensors if re.search(r"attentions.*to_.*weight", x)}
    return {
        rename_vae(name): (x[..., None, None] if name in projections else x).contiguous()
        for name, x in tensors.items()
    }


def name_encoder(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Those of a CLIP."""
    prefix = "cond_stage_model.transformer.text_model."
    return {
        prefix + name.removeprefix("text_model."): x.contiguous() for name, x in tensors.items()
    }


def name_pipeline(unet: Tensors, vae: Tensors, text_encoder: Tensors) -> dict[str, torch.Tensor]:
    """All three in one."""
    return name_unet(unet) | name_vae(vae) | name_encoder(text_encoder)


def save_single_file(path: Path) -> Path:
    """The tiny Stable Diffusion in fp16, written as a single file."""
    pipe = testing.make_pipeline("sd", dtype=torch.float16)
    parts = (pipe.unet, pipe.vae, pipe.text_encoder)
    save_file(name_pipeline(*(part.state_dict() for part in parts)), path)
    return path
