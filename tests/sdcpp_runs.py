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
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from single_file_models import build
from single_file_readers import RUNS, convert_model

SIZE, SEED = 128, 1
DENOISER, DECODER = "sdcpp-flux", "sdcpp-flux-vae"
CALL = {
    "prompt": "", "width": SIZE, "height": SIZE, "sample_steps": 1, "sample_method": "euler",
    "cfg_scale": 1.0, "guidance": 3.5, "seed": SEED,
}  # fmt: skip


def find_missing() -> str:
    """Why stable-diffusion.cpp cannot run here; nothing where it can."""
    if importlib.util.find_spec("stable_diffusion_cpp") is None:
        return "stable-diffusion-cpp-python is not installed"
    return ""


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
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
        num_attention_heads=12,
    )  # fmt: skip
    with torch.device("meta"):
        shapes = CLIPTextModel(config).state_dict()
    zeros = {name: torch.zeros(x.shape, dtype=torch.float16) for name, x in shapes.items()}
    save_file(
        {f"text_model.{name.removeprefix('text_model.')}": x for name, x in zeros.items()}, path
    )
    return path


def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Denoiser and decoder to the mean difference of bytes of each run, and of `f32` from Diffusers'.

    The reference of the denoiser is its file in fp32. The decoder fails in every format, so its reference
    is the picture of Diffusers.
    """
    forms = {name: write_forms(convert_model(name, folder), folder) for name in (DENOISER, DECODER)}
    encoder = write_encoder(folder / "clip_l.safetensors")
    runs = {}
    for name in forms:
        for key in RUNS:
            chosen = {DENOISER: "exact", DECODER: "converted fp32", name: key}
            runs[name, key] = {
                "options": {
                    "diffusion_model_path": str(forms[DENOISER][chosen[DENOISER]]),
                    "vae_path": str(forms[DECODER][chosen[DECODER]]),
                    "clip_l_path": str(encoder),
                    "vae_decode_only": True,
                },
                "call": CALL,
                "output": str(folder / f"{name}-{key}.out"),
            }
    run(list(runs.values()))
    pictures = {key: load_file(x["output"]) for key, x in runs.items()}
    exact = draw_in_diffusers()
    found: dict[str, dict[str, float]] = {}
    for (name, key), made in pictures.items():
        part = "picture" if name == DECODER else "latents"
        reference = exact if name == DECODER else pictures[name, "exact"][part]
        found.setdefault(name, {})[key] = find_difference(made[part], reference)
    found[DENOISER]["Diffusers"] = find_difference(pictures[DENOISER, "exact"]["picture"], exact)
    return found


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
    noise = torch.randn(1, 16, side, side, generator=torch.Generator().manual_seed(SEED))
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
    return (y[0].permute(1, 2, 0) / 2 + 0.5).clamp(0, 1).mul(255).round()
