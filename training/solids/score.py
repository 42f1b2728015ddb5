"""Score `solids` on prompts that it wasn't trained on: plain Diffusers in fp32, read by the checker.

cd training && python -m solids.score --prompts 120 --sheet sheet.png
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import LattePipeline

from solids.autoencoder import load_autoencoder, read_factor
from solids.checker import WORDS, compare, read_clip
from solids.clips import CHECKPOINTS
from solids.scenes import FRAMES, SIDE, Scene, all_captions, draw_sheet, split_scenes
from solids.train_denoiser import WEIGHTS, load_weights, make_models, make_scheduler
from tokens import make_tokenizer


def make_pipeline(checkpoint: Path | None) -> LattePipeline:
    """Put the stored weights together; with a checkpoint, its averaged weights."""
    tokenizer = make_tokenizer(all_captions())
    models = make_models(len(tokenizer))
    if checkpoint:
        models.load_state_dict(torch.load(checkpoint, weights_only=True)["average"])
    else:
        load_weights(models, WEIGHTS)
    vae = load_autoencoder()
    vae.register_to_config(scaling_factor=read_factor())
    models.eval()
    pipe = LattePipeline(
        tokenizer=tokenizer,
        text_encoder=models["encoder"],
        vae=vae,
        transformer=models["denoiser"],
        scheduler=make_scheduler(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_clip(
    pipe: LattePipeline, scene: Scene, steps: int, guidance: float, seed: int
) -> np.ndarray:
    """Make the clip of a scene, `[T, H, W, 3]` uint8."""
    clip = pipe(
        scene.caption(),
        num_inference_steps=steps,
        guidance_scale=guidance,
        video_length=FRAMES,
        height=SIDE,
        width=SIDE,
        generator=torch.Generator().manual_seed(seed),
        clean_caption=False,
        output_type="np",
    ).frames[0]
    return (np.asarray(clip) * 255).round().astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--checkpoint", action="store_true", help="score what is being trained")
    parser.add_argument("--sheet", type=Path, help="a picture of the first eight clips")
    options = parser.parse_args()
    pipe = make_pipeline(CHECKPOINTS / "denoiser.pt" if options.checkpoint else None)
    results, rows, began_s = [], [], time.process_time()
    for i, scene in enumerate(split_scenes()[1][: options.prompts]):
        clip = make_clip(pipe, scene, options.steps, options.guidance, options.seed + i)
        results.append(compare(read_clip(clip), scene))
        rows.append((scene.caption(), clip))
        if not all(results[-1].values()):
            wrong = {"wanted": scene.caption(), "read": vars(read_clip(clip))}
            print(json.dumps(wrong), flush=True)
    if options.sheet:
        draw_sheet(rows[:8]).save(options.sheet)
    right = {name: round(sum(r[name] for r in results) / len(results), 4) for name in WORDS}
    table = {
        "prompts": len(results),
        "all": round(sum(all(r.values()) for r in results) / len(results), 4),
        **right,
        "steps": options.steps,
        "guidance": options.guidance,
        "processor_s_a_clip": round((time.process_time() - began_s) / len(results), 2),
    }
    print(json.dumps(table))


if __name__ == "__main__":
    main()
