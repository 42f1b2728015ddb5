"""Write tiny checkpoints with overflow in them, under the names that ComfyUI's own loaders read.

`python make_models.py CHECKOUT FOLDER`. Each model is made of ComfyUI's class, with weights drawn from
a seed. A pair of layers is spread: weights of one are larger by a power of two, those of the next smaller.
In fp32 nothing changes, and what lies between them is beyond 65504.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Any

CHECKOUT, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(Path(__file__).parent))

from launch import prepare  # noqa: E402  # the folder above it

prepare(CHECKOUT)
sys.argv = ["main.py", "--cpu"]

import comfy.options  # noqa: E402  # reads the arguments that stand above

comfy.options.enable_args_parsing()

import comfy.ops  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.flux.model import Flux, FluxParams  # noqa: E402
from comfy.ldm.lumina.model import NextDiT  # noqa: E402
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel  # noqa: E402
from comfy.ldm.wan.model import WanModel  # noqa: E402
from comfy.ldm.wan.vae import WanVAE  # noqa: E402
from comfy.taesd.taesd import TAESD  # noqa: E402
from comfy.text_encoders.t5 import T5  # noqa: E402
from narrow_models import NARROW_T5, NARROW_Z_IMAGE  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

SPREAD = 2.0**20
MADE: dict[str, Any] = {
    "dtype": torch.float32,
    "device": "cpu",
    "operations": comfy.ops.disable_weight_init,
}


def draw(module: torch.nn.Module, gain: float = 0.8) -> dict[str, torch.Tensor]:
    """A state dict with weights that keep the size of what passes."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 and "modulation" not in name:
            fan = parameter[0].numel()
            torch.nn.init.normal_(parameter, std=gain * fan**-0.5)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        elif name.endswith(("weight", "gamma", "scale")):
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.02)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def spread(
    weights: dict[str, torch.Tensor], first: str, second: str, factor: float = SPREAD
) -> dict[str, torch.Tensor]:
    """Larger weights in one layer, smaller ones in the next; what lies between is beyond fp16."""
    for name in (f"{first}.weight", f"{first}.bias"):
        if name in weights:
            weights[name] = weights[name] * factor
    weights[f"{second}.weight"] = weights[f"{second}.weight"] / factor
    return weights


def save(name: str, weights: dict[str, torch.Tensor]) -> None:
    """Write them in fp32 under a path of ComfyUI's model folders."""
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in weights.items()}, path)


def make_flux() -> None:
    """Black: the last layer's scale overflows. Clamped: ComfyUI's own clamp hides an MLP's overflow."""
    config: dict[str, Any] = {
        "axes_dim": [16, 56, 56],
        "num_heads": 1,
        "mlp_ratio": 4.0,
        "theta": 10000,
        "out_channels": 16,
        "qkv_bias": True,
        "txt_ids_dims": [],
        "in_channels": 16,
        "hidden_size": 128,
        "context_in_dim": 64,
        "patch_size": 2,
        "vec_in_dim": 32,
        "depth": 2,
        "depth_single_blocks": 2,
        "guidance_embed": True,
    }
    known = {entry.name for entry in dataclasses.fields(FluxParams)}  # older ones know less
    config = {name: value for name, value in config.items() if name in known}
    weights = draw(Flux(image_model="flux", **config, **MADE))
    save("diffusion_models/flux_healthy.safetensors", weights)
    black = spread(dict(weights), "final_layer.adaLN_modulation.1", "final_layer.linear")
    save("diffusion_models/flux_black.safetensors", black)
    clamped = spread(dict(weights), "double_blocks.0.img_mlp.0", "double_blocks.0.img_mlp.2")
    save("diffusion_models/flux_clamped.safetensors", clamped)
    generator = torch.Generator().manual_seed(3)
    lora: dict[str, torch.Tensor] = {}
    for key in ("final_layer.linear", "double_blocks.0.img_attn.proj", "single_blocks.1.linear2"):
        rows, columns = black[f"{key}.weight"].shape
        size = float(black[f"{key}.weight"].std())
        up = torch.randn(rows, 4, generator=generator) * size
        lora[f"diffusion_model.{key}.lora_up.weight"] = up
        lora[f"diffusion_model.{key}.lora_down.weight"] = torch.randn(
            4, columns, generator=generator
        )
    save("loras/flux.safetensors", lora)


def make_z_image() -> None:
    """Clamped: the product in a feed-forward, as in the real model; black: the last layer's.

    A ComfyUI from before this model gets none: the tests of it are skipped there.
    """
    if "z_image_modulation" not in inspect.signature(NextDiT).parameters:
        return
    config = {"patch_size": 2, "in_channels": 16, "dim": 256, "cap_feat_dim": 64, "n_layers": 2}
    module = NextDiT(image_model="lumina2", **config, qk_norm=True, **NARROW_Z_IMAGE, **MADE)
    weights = draw(module)
    block = "layers.0.feed_forward"
    clamped = spread(dict(weights), f"{block}.w3", f"{block}.w2", 2.0**18)
    save("diffusion_models/z_image_clamped.safetensors", clamped)
    black = spread(dict(weights), "final_layer.adaLN_modulation.1", "final_layer.linear")
    save("diffusion_models/z_image_black.safetensors", black)


def make_qwen_image() -> None:
    """Black: what lies between the two linears of a feed-forward."""
    config = {"num_layers": 2, "num_attention_heads": 1, "joint_attention_dim": 64}
    weights = draw(QwenImageTransformer2DModel(image_model="qwen_image", **config, **MADE))
    block = "transformer_blocks.1.img_mlp.net"
    save(
        "diffusion_models/qwen_image_black.safetensors",
        spread(weights, f"{block}.0.proj", f"{block}.2"),
    )


def make_wan() -> None:
    """Black: what lies between the two linears of a feed-forward."""
    config: dict[str, Any] = {"dim": 128, "ffn_dim": 256, "num_heads": 1, "num_layers": 2}
    weights = draw(WanModel(**config, cross_attn_norm=True, **MADE))
    save(
        "diffusion_models/wan_black.safetensors",
        spread(weights, "blocks.1.ffn.0", "blocks.1.ffn.2"),
    )


def make_text_encoder() -> None:
    """Black: what lies between the two linears of a feed-forward."""
    path = Path(sys.modules[T5.__module__].__file__).with_name("t5_config_base.json")
    config = {**json.loads(path.read_text()), **NARROW_T5}
    weights = draw(T5(config, *MADE.values()))
    block = "encoder.block.1.layer.1.DenseReluDense"
    save(
        "text_encoders/t5_black.safetensors", spread(weights, f"{block}.wi", f"{block}.wo", 2.0**16)
    )


def make_vaes() -> None:
    """A small autoencoder for pictures, and Wan's for videos."""
    weights = draw(TAESD(latent_channels=16), gain=1.1)
    weights |= {"vae_scale": torch.tensor(1.0), "vae_shift": torch.tensor(0.0)}
    weights["taesd_decoder.19.bias"] = weights["taesd_decoder.19.bias"] + 0.5
    save("vae/small.safetensors", weights)
    block = "taesd_decoder.4.conv"
    save("vae/small_black.safetensors", spread(dict(weights), f"{block}.0", f"{block}.2"))
    config: dict[str, Any] = {
        "dim": 16,
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "dropout": 0.0,
    }
    save("vae/wan.safetensors", draw(WanVAE(**config)))


if __name__ == "__main__":
    make_flux()
    make_z_image()
    make_qwen_image()
    make_wan()
    make_text_encoder()
    make_vaes()
