"""Scripts like those of Diffusers' documentation, for nine kinds of pipelines, with one argument added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

HEAD = """
import torch
from PIL import Image
import stopdown

picture = Image.fromarray(torch.arange(32 * 32 * 3).view(32, 32, 3).to(torch.uint8).numpy())
seed = torch.Generator("cpu").manual_seed(42)
"""

SCRIPTS = {
    "cogvideox": """
from diffusers import CogVideoXPipeline

pipe = CogVideoXPipeline.from_pretrained(model, dtype=dtype, ADDED)
pipe.vae.enable_tiling()
pipe.vae.enable_slicing()
found = pipe(
    prompt="a panda plays a guitar", num_videos_per_prompt=1, num_inference_steps=2, num_frames=5,
    guidance_scale=6, generator=seed,
).frames[0]
""",
    "cogvideox-image": """
from diffusers import CogVideoXImageToVideoPipeline

pipe = CogVideoXImageToVideoPipeline.from_pretrained(model, dtype=dtype, ADDED)
pipe.vae.enable_tiling(24, 24)  # its own tiles of 16 leave 6 pixels, too few for the tiny encoder
pipe.vae.enable_slicing()
found = pipe(
    prompt="a penguin wanders", image=picture, num_videos_per_prompt=1, num_inference_steps=2,
    num_frames=5, guidance_scale=6, generator=seed,
).frames[0]
""",
    "cogvideox-video": """
from diffusers import CogVideoXDPMScheduler, CogVideoXVideoToVideoPipeline

pipe = CogVideoXVideoToVideoPipeline.from_pretrained(model, dtype=dtype, ADDED)
pipe.scheduler = CogVideoXDPMScheduler.from_config(pipe.scheduler.config)
found = pipe(
    video=[picture] * 5, prompt="a robot walks", strength=0.8, guidance_scale=6, height=32, width=32,
    num_inference_steps=4, generator=seed,
).frames[0]
""",
    "cogview3plus": """
from diffusers import CogView3PlusPipeline

pipe = CogView3PlusPipeline.from_pretrained(model, dtype=dtype, ADDED)
pipe.vae.enable_slicing()
found = pipe(
    prompt="a red car", guidance_scale=7.0, num_images_per_prompt=2, num_inference_steps=2, width=32,
    height=32, max_sequence_length=16, generator=seed,
).images
""",
    "svd": """
from diffusers import StableVideoDiffusionPipeline

pipe = StableVideoDiffusionPipeline.from_pretrained(model, dtype=dtype, ADDED)
found = pipe(
    picture, height=32, width=32, num_frames=2, decode_chunk_size=1, num_inference_steps=2,
    generator=seed, motion_bucket_id=180, noise_aug_strength=0.1,
).frames[0]
""",
    "sd": """
from diffusers import DPMSolverMultistepScheduler, StableDiffusionPipeline

pipe = StableDiffusionPipeline.from_pretrained(model, dtype=dtype, ADDED)
pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
pipe.enable_attention_slicing()
found = pipe("an astronaut on a horse", num_inference_steps=3, generator=seed).images
""",
    "sdxl": """
from diffusers import StableDiffusionXLPipeline

pipe = StableDiffusionXLPipeline.from_pretrained(model, dtype=dtype, use_safetensors=True, ADDED)
found = pipe(
    prompt="an astronaut in a jungle", prompt_2="cold colours", negative_prompt="a blur",
    num_inference_steps=2, generator=seed,
).images
""",
    "flux": """
from diffusers import FluxPipeline

pipe = FluxPipeline.from_pretrained(model, dtype=dtype, ADDED)
found = pipe(
    "a cat holds a sign", guidance_scale=3.5, height=32, width=32, num_inference_steps=2,
    max_sequence_length=16, generator=seed,
).images
""",
    "wan": """
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

vae = AutoencoderKLWan.from_pretrained(model, subfolder="vae", dtype=torch.float32)
pipe = WanPipeline.from_pretrained(model, vae=vae, dtype=dtype, ADDED)
pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=5.0)
found = pipe(
    prompt="a cat walks", negative_prompt="a blur", height=32, width=32, num_frames=5,
    num_inference_steps=2, guidance_scale=5.0, max_sequence_length=16, generator=seed,
).frames[0]
""",
}
ADDED = "quantization_config=stopdown.quantization(model)"


def run_script(name: str, model: Path, dtype: str, added: str = "") -> tuple[Any, Any]:
    """Return a script's pixels, from 0 to 1, and its pipeline."""
    import torch

    text = HEAD + SCRIPTS[name].replace(", ADDED", f", {added}")
    names: dict[str, Any] = {"model": str(model), "dtype": getattr(torch, dtype)}
    exec(compile(text, name, "exec"), names)  # our own text
    made = [np.asarray(x) for x in names["found"]]
    most = 255 if made[0].dtype == np.uint8 else 1  # Wan's are arrays
    return np.stack(made).astype(np.float32) / most, names["pipe"]
