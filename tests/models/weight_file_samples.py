"""Weight files of several programs, written as those programs write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 16


def quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and one scale, as scaled fp8 files have them."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def quantise_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and a scale for each row, `[rows, 1]`."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def make_plain() -> tuple[Tensors, dict[str, str]]:
    weights = {f"blocks.{number}.weight": draw(64, 64, seed=number).bfloat16() for number in (0, 1)}
    return {**weights, "norm.weight": torch.ones(64).bfloat16()}, {}


def make_scaled_fp8() -> tuple[Tensors, dict[str, str]]:
    codes, scale = quantise_fp8(draw(64, 64))
    prefix = "model.diffusion_model"
    return {
        f"{prefix}.ff.weight": codes,
        f"{prefix}.ff.scale_weight": scale,
        f"{prefix}.ff.scale_input": torch.tensor(1.0),
        f"{prefix}.ff.bias": draw(64, seed=1).half(),
        f"{prefix}.scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }, {}


def make_comfy_int8() -> tuple[Tensors, dict[str, str]]:
    codes, scale = quantise_int8(draw(64, 64))
    said = torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)
    return {"ff.weight": codes, "ff.weight_scale": scale, "ff.comfy_quant": said}, {}


def make_comfy_metadata() -> tuple[Tensors, dict[str, str]]:
    codes, scale = quantise_fp8(draw(64, 64))
    said = json.dumps({"layers": {"ff": {"format": "float8_e4m3fn"}}})
    return {"ff.weight": codes, "ff.weight_scale": scale}, {"_quantization_metadata": said}


def make_bitsandbytes_int8() -> tuple[Tensors, dict[str, str]]:
    codes, scale = quantise_int8(draw(64, 64))
    return {
        "ff.weight": codes,
        "ff.SCB": scale.reshape(-1) * 127,
        "ff.weight_format": torch.tensor(0, dtype=torch.uint8),
    }, {}


def make_lora() -> tuple[Tensors, dict[str, str]]:
    layers = ("lora_unet_down_blocks_0_ff", "lora_te1_layers_0_fc1")
    tensors = {}
    for layer in layers:
        tensors[f"{layer}.lora_down.weight"] = draw(4, 64).half()
        tensors[f"{layer}.lora_up.weight"] = draw(64, 4).half()
        tensors[f"{layer}.alpha"] = torch.tensor(4.0).half()
    return tensors, {}


SAFETENSORS: dict[str, Callable[[], tuple[Tensors, dict[str, str]]]] = {
    "plain": make_plain,
    "scaled fp8": make_scaled_fp8,
    "comfy int8": make_comfy_int8,
    "comfy metadata": make_comfy_metadata,
    "bitsandbytes int8": make_bitsandbytes_int8,
    "lora": make_lora,
}


def write_sample(name: str, path: Path, **changes: torch.Tensor | None) -> Path:
    """A file of a kind; `changes` replace tensors by the last two parts of their names, None drops one."""
    tensors, metadata = SAFETENSORS[name]()
    for part, value in changes.items():
        key = next(key for key in tensors if key.replace(".", "_").endswith(part))
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, path, metadata or None)
    return path


def write_gguf(path: Path, kind: str, tensors: dict[str, np.ndarray]) -> Path:
    """A GGUF file whose matrices are of a type, where their rows are whole blocks, and the rest in fp32."""
    import gguf

    writer = gguf.GGUFWriter(path, "flux")
    kind = gguf.GGMLQuantizationType[kind]
    for name, value in tensors.items():
        fits = value.ndim > 1 and value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        packed = gguf.quants.quantize(value, kind) if fits else value
        writer.add_tensor(name, packed, raw_dtype=kind if fits else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
