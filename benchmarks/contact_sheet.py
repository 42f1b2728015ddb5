"""The picture in the README: plain Diffusers in fp32, bf16 and fp16, and `stopdown generate`.

Same prompt, same seed. Plain Diffusers is called as its documentation does, and its frames are saved
as it saves them, whatever they hold. Stopdown is called as a command.

    python benchmarks/contact_sheet.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from diffusers import CogVideoXPipeline

from stopdown.media import draw_contact_sheet, read_video
from stopdown.pipelines.sources import BUNDLED_FOLDER

SHEET = Path(__file__).parents[1] / "docs" / "images" / "contact-sheet.png"


def run_diffusers(prompt: str, dtype: torch.dtype, options: argparse.Namespace) -> np.ndarray:
    """Frames `[T, H, W, 3]` uint8 of plain Diffusers."""
    pipe = CogVideoXPipeline.from_pretrained(BUNDLED_FOLDER / "shapes", torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        video = pipe(
            prompt,
            num_inference_steps=options.steps,
            max_sequence_length=16,
            generator=torch.Generator().manual_seed(options.seed),
        ).frames[0]
    for warning in caught:
        if issubclass(warning.category, RuntimeWarning):
            print(f"Diffusers in {dtype}: {warning.category.__name__}: {warning.message}")
    return np.stack([np.asarray(frame) for frame in video])


def run_stopdown(prompt: str, options: argparse.Namespace) -> np.ndarray:
    """Frames `[T, H, W, 3]` uint8 of the command."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/frames/"
        command = [sys.executable, "-m", "stopdown.app.cli", "generate", "shapes", prompt]
        command += ["--steps", str(options.steps), "--seed", str(options.seed), "-o", out]
        subprocess.run(command, check=True)
        return read_video(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default="a red circle moving left on a grey background")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=SHEET)
    options = parser.parse_args()
    rows = [
        (f"Diffusers {name}", run_diffusers(options.prompt, dtype, options))
        for name, dtype in (
            ("fp16", torch.float16),
            ("bf16", torch.bfloat16),
            ("fp32", torch.float32),
        )
    ]
    rows.append(("stopdown generate", run_stopdown(options.prompt, options)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(draw_contact_sheet(rows, options.out, scale=1.5))


if __name__ == "__main__":
    main()
