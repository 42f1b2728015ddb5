"""Scripts like those of Diffusers' documentation, for seven kinds of pipelines, with one argument added.

Each is run twice: in fp32 as it is, and in fp16 with `quantization_config=stopdown.quantization(...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
}
ADDED = "quantization_config=stopdown.quantization(model)"


@pytest.mark.parametrize(
    "name", [x if x == "sd" else pytest.param(x, marks=pytest.mark.slow) for x in SCRIPTS]
)
def test_a_documented_script_with_one_argument_added(
    name: str,
    save_tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The denoiser overflows in fp16; with the argument pictures are those of fp32, but for rounding."""
    import torch

    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    folder = save_tiny(name, overflow="unet" if name in ("sd", "sdxl", "svd") else "transformer")

    def run(dtype: torch.dtype, added: str) -> Any:
        text = HEAD + SCRIPTS[name].replace(", ADDED", f", {added}")
        names: dict[str, Any] = {"model": str(folder), "dtype": dtype}
        exec(compile(text, name, "exec"), names)  # our own text
        return np.stack([np.asarray(x, np.float32) for x in names["found"]]), names["pipe"]

    wanted, _ = run(torch.float32, "")
    found, pipe = run(torch.float16, ADDED)
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    assert denoiser.quantization_method == "stopdown"
    assert found.std() > 1
    assert np.abs(found - wanted).mean() < 0.02 * 255
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)
