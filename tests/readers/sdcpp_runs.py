"""Files run by stable-diffusion.cpp: which together, in which format, and against what.

A picture is one Euler step from noise that torch draws, too, and the decoder: so Diffusers makes the same
in fp32. stable-diffusion.cpp gives bytes. A denoiser is measured on the linear preview of its latents,
since the decoder's convolutions, always in fp16 there, make every difference as large as their own
rounding; a decoder is measured on the picture. The mean difference of bytes is that of the values, however
small: the part of bytes that flip is proportional.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.single_file_models import build
from models.weight_file_samples import write_gguf
from readers.single_file_readers import RUNS, convert_model
from stopdown.sources.single_file_names import arrange, find_whole
from stopdown.sources.weight_files import load_weights

SIZE, SEED = 128, 1
DENOISER, DECODER = "sdcpp-flux", "sdcpp-flux-vae"
GGUF = ("F16", "Q8_0")
FLASH = ", flash attention"
SDXL = ("sdcpp-sdxl-vae", "sdcpp-sdxl-vae-wide")
FACTOR = ", its factor of 1/32"
SDXL_FACTOR = 0.13025
"""Of latents: noise of this size is decoded as noise of size 1."""
CALL = {
    "prompt": "", "width": SIZE, "height": SIZE, "sample_steps": 1, "sample_method": "euler",
    "cfg_scale": 1.0, "guidance": 3.5, "seed": SEED,
}  # fmt: skip


def find_missing() -> str:
    """Why stable-diffusion.cpp cannot run here; nothing where it can."""
    if importlib.util.find_spec("stable_diffusion_cpp") is None:
        return "stable-diffusion-cpp-python isn't installed"
    return ""


def describe_build() -> str:
    """What of the processor the program was compiled for."""
    code = "import stable_diffusion_cpp as sd; print(sd.sd_get_system_info().decode())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ", ".join(re.findall(r"(\w+) = 1", done.stdout))


def run(runs: Sequence[Mapping[str, Any]]) -> str:
    """Start the process that runs files, and give its log."""
    reader = Path(__file__).parent / "sdcpp_reader.py"
    request = [sys.executable, str(reader), json.dumps(runs)]
    done = subprocess.run(request, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def write_forms(files: tuple[Path, Path], folder: Path) -> dict[str, Path]:
    """A file and what it became, each in the formats of `RUNS`."""
    places, forms = dict(zip(("before", "after"), files, strict=True)), {}
    for key, (which, dtype) in RUNS.items():
        forms[key] = folder / f"{places[which].stem}-{which}-{dtype}.safetensors"
        tensors = load_file(places[which])
        save_file({name: x.to(getattr(torch, dtype)) for name, x in tensors.items()}, forms[key])
    return forms


def write_encoder(path: Path) -> Path:
    """A CLIP-L whose weights are zeros: without one, stable-diffusion.cpp does not run Flux."""
    shapes = list_shapes(_build_clip, "")
    return write_zeros(
        path, {f"text_model.{x.removeprefix('text_model.')}": y for x, y in shapes.items()}
    )


def write_vega(path: Path) -> Path:
    """Both encoders and the UNet of Segmind-Vega, the smallest SDXL that it knows, in zeros."""
    table, shapes = find_whole("StableDiffusionXLPipeline"), {}
    parts = {"unet": _build_vega, "text_encoder": _build_clip, "text_encoder_2": _build_clip_g}
    for name, make in parts.items():
        for key, shape in list_shapes(make, table.layouts.get(name, "")).items():
            if not key.startswith(("middle_block.1.", "middle_block.2.")):  # Vega has none
                shapes[table.prefixes[name] + key] = shape
    return write_zeros(path, shapes)


def list_shapes(make: Callable[[], torch.nn.Module], layout: str) -> dict[str, tuple[int, ...]]:
    """Names in single files to shapes, without the memory of weights."""
    with torch.device("meta"):
        module = make()
    tensors = arrange(module.half().to_empty(device="cpu"), layout)
    return {name: tuple(x.shape) for name, x in tensors.items()}


def write_zeros(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A safetensors file of zeros in fp16 that takes no room on the disk."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "F16", "shape": shape, "data_offsets": (start, end)}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return path


def _build_clip() -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(
        vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
        num_attention_heads=12,
    ))  # fmt: skip


def _build_clip_g() -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(CLIPTextConfig(
        vocab_size=49408, hidden_size=1280, intermediate_size=5120, num_hidden_layers=32,
        num_attention_heads=20, projection_dim=1280,
    ))  # fmt: skip


def _build_vega() -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(320, 640, 1280), attention_head_dim=(5, 10, 20), cross_attention_dim=2048,
        use_linear_projection=True, transformer_layers_per_block=(1, 1, 2), addition_embed_type="text_time",
        addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
    )  # fmt: skip


def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Model to the mean difference of bytes of each run, and of `f32` from Diffusers'.

    The reference of the denoiser is its file in fp32. The decoder fails in every format, so its reference
    is the picture of Diffusers.
    """
    converted = {name: convert_model(name, folder) for name in (DENOISER, DECODER)}
    forms = {name: write_forms(files, folder) for name, files in converted.items()}
    pictures = run_files(
        {
            (name, key): {
                DENOISER: forms[DENOISER]["exact"],
                DECODER: forms[DECODER]["converted fp32"],
                name: forms[name][key],
            }
            for name in forms
            for key in RUNS
        },
        folder,
    )
    exact = draw_in_diffusers()
    found: dict[str, dict[str, float]] = {}
    for (name, key), made in pictures.items():
        part = "picture" if name == DECODER else "latents"
        reference = exact if name == DECODER else pictures[name, "exact"][part]
        found.setdefault(name, {})[key] = find_difference(made[part], reference)
    found[DENOISER]["Diffusers"] = find_difference(pictures[DENOISER, "exact"]["picture"], exact)
    return found


def measure_gguf(folder: Path) -> dict[str, dict[str, float]]:
    """The same of GGUF files of the denoiser, by type, and with flash attention, which casts to fp16.

    They are quantised from the file as it was, and from the converted one. The reference is what the codes
    of the first stand for, in fp32.
    """
    plain, scaled = (
        {name: x.float().numpy() for name, x in load_file(path).items()}
        for path in convert_model(DENOISER, folder)
    )
    decoder = write_forms(convert_model(DECODER, folder), folder)["converted fp32"]
    files = {}
    for kind in GGUF:
        before = write_gguf(folder / f"{kind}.gguf", kind, plain)
        after = write_gguf(folder / f"{kind}-fp16.gguf", kind, scaled)
        exact = folder / f"{kind}.safetensors"
        save_file(load_weights(before), exact)
        files |= {(kind, "exact"): exact}
        files |= {(kind, f"before{x}"): before for x in ("", FLASH)}
        files |= {(kind, f"after{x}"): after for x in ("", FLASH)}
    pictures = run_files({key: {DENOISER: x, DECODER: decoder} for key, x in files.items()}, folder)
    return {
        kind: {
            key: find_difference(pictures[kind, key]["latents"], pictures[kind, "exact"]["latents"])
            for other, key in files
            if other == kind and key != "exact"
        }
        for kind in GGUF
    }


def measure_sdxl(folder: Path) -> dict[str, dict[str, float]]:
    """Decoders of SDXL to differences from Diffusers, with and without the program's own factor of 1/32.

    `power` is the exponent of two of the largest value that a convolution reads.
    """
    model = write_vega(folder / "vega.safetensors")
    found: dict[str, dict[str, float]] = {}
    for name in SDXL:
        files = dict(zip(("before", "after"), convert_model(name, folder), strict=True))
        requests = {
            key + factor: {
                "options": {
                    "model_path": str(model),
                    "vae_path": str(path),
                    "vae_decode_only": True,
                    "force_sdxl_vae_conv_scale": factor == FACTOR,
                    "tensor_type_rules": "diffusion_model=q8_0,conditioner=q8_0,cond_stage=q8_0",
                },
                "call": {**CALL, "sigmas": f"{SDXL_FACTOR},0.0"},
                "output": str(folder / f"{name}-{key}{bool(factor)}.out"),
            }
            for key, path in files.items()
            for factor in ("", FACTOR)
        }
        run(list(requests.values()))
        exact, largest = decode(build(name))
        pictures = {key: load_file(x["output"])["picture"] for key, x in requests.items()}
        found[name] = {key: find_difference(x, exact) for key, x in pictures.items()}
        found[name]["power"] = math.log2(largest)
    return found


def decode(decoder: Any) -> tuple[torch.Tensor, float]:
    """What Diffusers makes of the noise in fp32, and the largest value that a convolution reads."""
    read = list[float]()
    for module in decoder.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lambda _, x: read.append(float(x[0].abs().max())))
    with torch.no_grad():
        return to_bytes(decoder.decode(draw_noise(4)).sample), max(read)


def run_files(
    runs: Mapping[tuple[str, str], Mapping[str, Path]], folder: Path
) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """What stable-diffusion.cpp makes of denoisers with decoders: pictures, and previews of latents."""
    encoder = write_encoder(folder / "clip_l.safetensors")
    requests = {
        (name, key): {
            "options": {
                "diffusion_model_path": str(files[DENOISER]),
                "vae_path": str(files[DECODER]),
                "clip_l_path": str(encoder),
                "vae_decode_only": True,
                "diffusion_flash_attn": key.endswith(FLASH),
            },
            "call": CALL,
            "output": str(folder / f"{name}-{key}.out"),
        }
        for (name, key), files in runs.items()
    }
    run(list(requests.values()))
    return {key: load_file(x["output"]) for key, x in requests.items()}


def find_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean difference of two pictures of bytes, of 255."""
    return float((one.double() - other.double()).abs().mean())


@functools.cache
def draw_in_diffusers() -> torch.Tensor:
    """The picture that Diffusers' classes make in fp32."""
    from diffusers import FluxPipeline

    transformer: Any = build(DENOISER)
    decoder: Any = build(DECODER)
    side = SIZE // 8
    noise = draw_noise(16)
    with torch.no_grad():
        change = transformer(
            hidden_states=FluxPipeline._pack_latents(noise, 1, 16, side, side),
            timestep=torch.ones(1),
            guidance=torch.tensor([CALL["guidance"]]),
            pooled_projections=torch.zeros(1, 768),
            encoder_hidden_states=torch.zeros(1, 256, 4096),
            txt_ids=torch.zeros(256, 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(
                1, side // 2, side // 2, "cpu", noise.dtype
            ),
            return_dict=False,
        )[0]
        latents = noise - FluxPipeline._unpack_latents(change, SIZE, SIZE, 8)
        config = decoder.config
        y = decoder.decode(latents / config.scaling_factor + config.shift_factor).sample
    return to_bytes(y)


def draw_noise(channels: int) -> torch.Tensor:
    """The noise of the seed, which stable-diffusion.cpp draws as torch does."""
    seed = torch.Generator().manual_seed(SEED)
    return torch.randn(1, channels, SIZE // 8, SIZE // 8, generator=seed)


def to_bytes(decoded: torch.Tensor) -> torch.Tensor:
    """A decoded picture as one of bytes, [H, W, 3]."""
    return (decoded[0].permute(1, 2, 0) / 2 + 0.5).clamp(0, 1).mul(255).round()
