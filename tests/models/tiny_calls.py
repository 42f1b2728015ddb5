"""Calls of each tiny pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import torch

RED = PIL.Image.new("RGB", (32, 32), (200, 30, 40))


CALLS: dict[str, dict[str, Any]] = {
    "cogvideox": {"prompt": "a ball", "num_frames": 9},
    "cogvideox-image": {"prompt": "a ball", "num_frames": 9, "image": RED},
    "cogvideox-video": {
        "prompt": "a ball",
        "video": [RED] * 9,
        "height": 32,
        "width": 32,
        "strength": 1.0,
    },
    "cogview3plus": {"prompt": "a ball"},
    "svd": {"image": RED, "height": 32, "width": 32, "num_frames": 3},
    "sd": {"prompt": "a ball"},
    "sdxl": {"prompt": "a ball"},
    "flux": {"prompt": "a ball", "height": 32, "width": 32},
    "wan": {"prompt": "a ball", "height": 32, "width": 32, "num_frames": 9},
}


def run(pipe: Any, name: str, *, steps: int = 1) -> np.ndarray:
    """The pixels of a tiny run: 0 to 1, the same seed each time."""
    generator = torch.Generator().manual_seed(0)
    output = pipe(**CALLS[name], num_inference_steps=steps, generator=generator, output_type="np")
    return np.asarray(output[0])
