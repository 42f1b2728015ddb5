"""Tiny pipelines that take masks and control pictures."""

from __future__ import annotations

from typing import Any

import torch

from stopdown.testing import make_pipeline


def make_inpainting() -> Any:
    """A tiny Stable Diffusion that paints inside a mask."""
    import diffusers

    parts = make_pipeline("sd").components
    return diffusers.StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)


def make_controlled(kind: str) -> Any:
    """A tiny pipeline of a class with a ControlNet."""
    import diffusers

    parts = make_pipeline("sdxl" if "XL" in kind else "sd").components
    if "XL" not in kind:
        parts["requires_safety_checker"] = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = diffusers.ControlNetModel.from_unet(
            parts["unet"], conditioning_embedding_out_channels=(8, 16, 16, 16)
        )
    return getattr(diffusers, kind)(**parts, controlnet=net.eval().requires_grad_(False))
