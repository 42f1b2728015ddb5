"""Tiny pipelines that tests share, and how each is called: the smallest run through every component."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from stopdown import testing

NOISE = np.random.default_rng(0).integers(0, 255, (9, 32, 32, 3), np.uint8)
PICTURE = Image.fromarray(NOISE[0])

CALLS: dict[str, dict[str, Any]] = {
    "cogvideox": {"prompt": "a", "num_frames": 5, "max_sequence_length": 226},
    "cogvideox-image": {"prompt": "a", "num_frames": 5, "image": PICTURE},
    "cogvideox-video": {"prompt": "a", "video": [PICTURE] * 5, "height": 32, "width": 32},
    "cogview3plus": {"prompt": "a", "height": 32, "width": 32, "max_sequence_length": 16},
    "svd": {"image": PICTURE, "height": 32, "width": 32, "num_frames": 2},
    "sd": {"prompt": "a"},
    "sdxl": {"prompt": "a"},
    "flux": {"prompt": "a", "height": 32, "width": 32, "max_sequence_length": 16},
    "wan": {
        "prompt": "a",
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "max_sequence_length": 16,
    },
}


def quiet(text: str) -> None:
    """What a guard announces is heard, and not said."""


SCORED_PATH = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"


def make_scored_svd() -> Any:
    """SVD whose scores pass 65504 before they are divided, and not after it; in fp32."""
    pipe = testing.make_pipeline("svd")
    attention = pipe.unet.get_submodule(SCORED_PATH)
    with torch.no_grad():
        for linear in (attention.to_q, attention.to_k):
            linear.weight.mul_(400)
    return pipe


def paint_decoder(source: Path, folder: Path, value: float = -2.0) -> Path:
    """A copy of a saved CogVideoX whose decoder paints one value everywhere: below -1 all is black."""
    shutil.copytree(source, folder)
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["decoder.conv_out.conv.weight"].zero_()
    tensors["decoder.conv_out.conv.bias"].fill_(value)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def load_plain(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """A pipeline as a script loads it, without its bars."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def name_denoiser(name: str) -> str:
    """Return the component of a pipeline that denoises, by the pipeline's name."""
    return "unet" if name in ("sd", "sdxl", "svd") else "transformer"


where = "cpu"
"""The device that pipelines are made on; the fixture `each_device` puts another one in its place."""


def make_pipeline(name: str, **options: Any) -> Any:
    """A tiny pipeline that is made once for all tests: whoever changes it makes one of their own."""
    return _make_pipeline(where, name, **options)


def make_used_pipeline(name: str, **options: Any) -> Any:
    """One that has run: some classes make themselves ready in their first run."""
    return _use_pipeline(where, name, **options)


@functools.cache
def _make_pipeline(device: str, name: str, **options: Any) -> Any:
    return testing.make_pipeline(name, **options)


@functools.cache
def _use_pipeline(device: str, name: str, **options: Any) -> Any:
    pipe = _make_pipeline(device, name, **options)
    call_pipeline(pipe, name)
    return pipe


def call_pipeline(pipe: Any, name: str, *, steps: int = 2, **options: Any) -> np.ndarray[Any, Any]:
    """The pixels of a run with the same seed each time, with NaN where they are NaN."""
    options |= {"num_inference_steps": steps, "output_type": "np"}
    output = pipe(**CALLS[name], generator=torch.Generator().manual_seed(0), **options)
    return np.asarray(output[0])
