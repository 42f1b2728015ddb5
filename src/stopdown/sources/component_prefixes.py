"""What stands before the names of a component's tensors in files, of models and of LoRAs."""

from __future__ import annotations

import re

DENOISER = "denoiser"
"""Any of `transformer`, `unet`, `prior` and what other programs call theirs."""

_TABLE = (
    (r"(?:model\.)?diffusion_model\.|(?:transformer|unet|prior)(?:_\d)?\.|net\.", DENOISER),
    (r"lora_(?:unet|transformer|prior_unet)_|lycoris_|base_model\.model\.", DENOISER),
    (r"first_stage_model\.|vae\.", "vae"),
    (r"(?:text_encoder_2|text_encoders\.clip_g)\.|lora_te2_", "text_encoder_2"),
    (r"conditioner\.embedders\.1\.(?:model\.)?", "text_encoder_2"),
    (r"(?:text_encoder_3|text_encoders\.t5xxl)\.|lora_te3_", "text_encoder_3"),
    (r"(?:text_encoder|text_encoders\.\w+|cond_stage_model)\.|lora_te1?_", "text_encoder"),
    (r"conditioner\.embedders\.\d+\.", "text_encoder"),
    (r"image_encoder\.", "image_encoder"),
    (r"controlnet\.", "controlnet"),
)
_PATTERNS = tuple(
    (re.compile(rf"({begin}){'(?:transformer[.])?' * name.startswith('text')}"), name)
    for begin, name in _TABLE
)


def split_prefix(name: str) -> tuple[str, str, str]:
    """The component that a tensor's name begins with, that beginning as it stands, and the rest.

    The component is as a pipeline names it, or `DENOISER`; it and the beginning are "" where nothing stands
    before the name. In `text_encoders.t5xxl.transformer.encoder`, `transformer.` belongs to neither.
    """
    for pattern, component in _PATTERNS:
        if found := pattern.match(name):
            return component, found[1], name[found.end() :]
    return "", "", name
