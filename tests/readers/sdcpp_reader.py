"""Files read and run by stable-diffusion.cpp, in a process without Stopdown, torch and Diffusers.

Started with one argument: JSON of `runs`: each has `options` of `StableDiffusion` (which files), `call` of
`generate_image`, and `output` (where to write). What it writes holds two pictures of bytes: `picture`, and
`latents`, the linear preview of the latents that its decoder got. Its log goes to stderr.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(runs: list[dict[str, Any]]) -> None:
    """Run every file by itself."""
    import numpy
    from safetensors.numpy import save_file
    from stable_diffusion_cpp import StableDiffusion

    for run in runs:
        model = StableDiffusion(n_threads=1, rng_type="cpu", **run["options"])
        previews: dict[int, Any] = {}

        def keep(step: int, frames: list[Any], _: bool, kept: dict[int, Any] = previews) -> None:
            kept[0] = frames[0].copy()

        (picture,) = model.generate_image(
            **run["call"], preview_method="proj", preview_callback=keep
        )
        found = {"picture": picture, "latents": previews[0]}
        save_file({key: numpy.array(x.convert("RGB")) for key, x in found.items()}, run["output"])
        del model


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
