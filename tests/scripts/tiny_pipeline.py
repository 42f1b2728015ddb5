"""A tiny pipeline with a callback, twice, in bf16; its pixels and its parts afterwards."""

import sys

import torch
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
pipe.set_progress_bar_config(disable=True)


def look(pipe, step, time, kept):
    print(step, int(time), kept["latents"].float().sum().item())
    return kept


for number in range(2):
    found = pipe(
        "a", height=32, width=32, num_inference_steps=2, output_type="np",
        generator=torch.Generator().manual_seed(number), callback_on_step_end=look,
    ).images  # fmt: skip
    print(found.shape, found.sum(), found.std())
print(sorted(pipe.components), pipe.dtype, "forward" in vars(pipe.unet))
