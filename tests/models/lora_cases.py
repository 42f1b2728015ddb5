"""LoRA files as trainers name them, for the layers of tiny pipelines; all values are random."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stopdown.testing import make_pipeline

RANK, ALPHA = 4, 3.0
Tensors = dict[str, torch.Tensor]

FLUX = (
    (r"transformer_blocks\.(\d+)\.attn\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
    (r"transformer_blocks\.(\d+)\.attn\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
    (r"transformer_blocks\.(\d+)\.ff\.net\.2", r"double_blocks.\1.img_mlp.2"),
    (r"single_transformer_blocks\.(\d+)\.proj_out", r"single_blocks.\1.linear2"),
)
WAN = (
    (r"blocks\.(\d+)\.attn1\.to_(q|k|v)", r"blocks.\1.self_attn.\2"),
    (r"blocks\.(\d+)\.attn1\.to_out\.0", r"blocks.\1.self_attn.o"),
    (r"blocks\.(\d+)\.attn2\.to_(q|k|v)", r"blocks.\1.cross_attn.\2"),
    (r"blocks\.(\d+)\.attn2\.to_out\.0", r"blocks.\1.cross_attn.o"),
    (r"blocks\.(\d+)\.ffn\.net\.0\.proj", r"blocks.\1.ffn.0"),
    (r"blocks\.(\d+)\.ffn\.net\.2", r"blocks.\1.ffn.2"),
)
LAYERS = {
    "cogvideox": r".*attn1\.to_(q|v|out\.0)|.*ff\.net\.2",
    "wan": "|".join(x for x, _ in WAN),
    "flux": "|".join(x for x, _ in FLUX),
    "sdxl": r".*attn\d\.to_(q|v|out\.0)|.*ff\.net\.2",
    "sd3": r".*attn\.to_(q|v|out\.0)|.*ff\.net\.2",
}
NATIVE = {"flux": FLUX, "wan": WAN}


def find_denoiser(pipe: Any) -> tuple[str, torch.nn.Module]:
    """Its name and itself."""
    name = "unet" if hasattr(pipe, "unet") else "transformer"
    return name, getattr(pipe, name)


def draw_lora(pipe: Any, family: str, seed: int = 0, size: float = 0.3) -> Tensors:
    """Random matrices for the layers of a family: `PATH.A`, `PATH.B`; bf16 holds them.

    Args:
        size: of what they add, over that of the weight.
    """
    made, drawn = torch.Generator().manual_seed(seed), {}
    for path, layer in find_denoiser(pipe)[1].named_modules():
        if not re.fullmatch(LAYERS[family], path):
            continue
        drawn[f"{path}.A"] = torch.randn(RANK, layer.in_features, generator=made)
        spread = float(layer.weight.detach().std()) * size / RANK**0.5
        drawn[f"{path}.B"] = torch.randn(layer.out_features, RANK, generator=made) * spread
    assert drawn
    return {name: x.bfloat16().float() for name, x in drawn.items()}


def _name(drawn: Tensors, write: Callable[[str], str], down: str, up: str, alpha: bool) -> Tensors:
    named: Tensors = {}
    for name, tensor in drawn.items():
        path, _, kind = name.rpartition(".")
        named[f"{write(path)}.{down if kind == 'A' else up}.weight"] = tensor
        if alpha:
            named[f"{write(path)}.alpha"] = torch.tensor(ALPHA)
    return named


def _rename(family: str, path: str) -> str:
    for pattern, to in NATIVE[family]:
        if re.fullmatch(pattern, path):
            return re.sub(pattern, to, path)
    raise KeyError(path)


def name_lora(drawn: Tensors, style: str, family: str) -> Tensors:
    """The tensors of a file under the names that a style has for them."""
    part = "unet" if family == "sdxl" else "transformer"
    if style == "diffusers":
        return _name(drawn, lambda x: f"{part}.{x}", "lora_A", "lora_B", alpha=False)
    if style == "diffusers-old":
        return _name(drawn, lambda x: f"{part}.{x}", "lora.down", "lora.up", alpha=False)
    if style == "peft":
        return _name(drawn, lambda x: f"base_model.model.{x}", "lora_A", "lora_B", alpha=False)
    if style == "kohya":
        named = _rename if family in NATIVE else lambda _, x: x
        return _name(
            drawn,
            lambda x: "lora_unet_" + named(family, x).replace(".", "_"),
            "lora_down",
            "lora_up",
            alpha=True,
        )
    assert style == "comfyui", style
    return _name(
        drawn, lambda x: f"diffusion_model.{_rename(family, x)}", "lora_A", "lora_B", alpha=False
    )


STYLES = {
    "cogvideox": ("diffusers", "peft"),
    "wan": ("diffusers", "peft", "kohya", "comfyui"),
    "flux": ("diffusers", "peft", "kohya"),
    "sdxl": ("diffusers", "peft", "diffusers-old", "kohya"),
    "sd3": ("diffusers", "peft"),
}
"""The names that Diffusers' or PEFT's loader reads for each family."""


def load_lora(pipe: Any, tensors: Tensors, folder: Path, name: str, **more: Any) -> None:
    """By Diffusers' loader from a file; by PEFT itself where the names are PEFT's own."""
    _, module = find_denoiser(pipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if next(iter(tensors)).startswith("base_model."):
            _inject(module, tensors, name)
            return
        path = folder / f"{name}.safetensors"
        save_file(tensors, path)
        pipe.load_lora_weights(str(path), adapter_name=name, **more)


def _inject(module: torch.nn.Module, tensors: Tensors, name: str) -> None:
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    bare = {key.removeprefix("base_model.model."): x for key, x in tensors.items()}
    targets = sorted({key.rpartition(".lora_")[0] for key in bare})
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
    inject_adapter_in_model(config, module, adapter_name=name)
    set_peft_model_state_dict(module, bare, adapter_name=name)
    module._hf_peft_config_loaded = True  # type: ignore[assignment]


def make_family(family: str) -> Any:
    """A tiny pipeline whose denoiser leaves fp16."""
    if family != "sd3":
        return make_pipeline(family, overflow="unet" if family == "sdxl" else "transformer")
    return _make_sd3()


def _make_sd3() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
    from diffusers import StableDiffusion3Pipeline as Pipeline

    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
    ).eval()
    for name, tensor in transformer.named_parameters():
        if re.search(r"pos_embed\.proj|context_embedder|to_out\.0|to_add_out|net\.2", name):
            tensor.data.mul_(2.0**12)
    others = dict.fromkeys(
        f"{kind}{number}" for kind in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")
    )
    return Pipeline(transformer, FlowMatchEulerDiscreteScheduler(), vae=None, **others)


def make_arguments(pipe: Any, family: str) -> dict[str, Any]:
    """Of one call of the denoiser, as its pipeline makes it."""
    _, module = find_denoiser(pipe)
    if family == "sd3":
        made = torch.Generator().manual_seed(0)
        return {
            "hidden_states": torch.randn(1, 4, 8, 8, generator=made),
            "encoder_hidden_states": torch.randn(1, 6, 32, generator=made),
            "pooled_projections": torch.randn(1, 32, generator=made),
            "timestep": torch.tensor([500]),
            "return_dict": False,
        }
    from models.pipeline_calls import call_pipeline

    found: dict[str, Any] = {}

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        names = ("sample", "timestep", "encoder_hidden_states")
        found.update(dict(zip(names, args, strict=False)) | kwargs)

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        call_pipeline(pipe, family, steps=1)
    handle.remove()
    return found


def write_lora(source: Any, folder: Path) -> Path:
    """A LoRA for the UNet of a tiny Stable Diffusion."""
    import torch
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    from stopdown.pipelines.loader import load_pipeline

    pipe = load_pipeline(source, torch_dtypes=torch.float32)
    pipe.unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"]))
    pipe.save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(pipe.unet))
    return folder / "pytorch_lora_weights.safetensors"
