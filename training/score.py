"""Score `shapes` on prompts that it was not trained on: plain Diffusers, read by the checker.

Prints the share that is right by attribute. With `--out` the row joins those of other settings in a
file, with `--sheet` the first clips are drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from diffusers import CogVideoXPipeline

from checker import ATTRIBUTES, compare, read_clip
from finish import OUT
from scenes import Scene, split_scenes
from stopdown.devices.environment import describe_machine
from stopdown.frames.media import to_uint8
from train_denoiser import TEXT_TOKENS

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from contact_sheet import draw_contact_sheet

SETTINGS = ("prompts", "steps", "guidance", "dtype", "text_tokens")
"""What tells one row of a stored table from another."""


def generate_clips(pipe: CogVideoXPipeline, scenes: list[Scene], options: argparse.Namespace):
    """Clips `[T, H, W, 3]` uint8 of scenes, each from its own seed."""
    for start in range(0, len(scenes), options.batch):
        chunk = scenes[start : start + options.batch]
        generators = [
            torch.Generator().manual_seed(options.seed + start + i) for i in range(len(chunk))
        ]
        frames = pipe(
            [scene.caption() for scene in chunk],
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            generator=generators,
            max_sequence_length=options.text_tokens,
            output_type="np",
        ).frames
        for clip in frames:
            yield to_uint8(clip)
        print(json.dumps({"clips": start + len(chunk), "of": len(scenes)}), flush=True)


def score(options: argparse.Namespace) -> dict[str, object]:
    pipe = CogVideoXPipeline.from_pretrained(
        options.model, torch_dtype=getattr(torch, options.dtype), local_files_only=True
    )
    pipe.set_progress_bar_config(disable=True)
    scenes = split_scenes()[1][: options.prompts]
    started = time.monotonic()
    clips = list(generate_clips(pipe, scenes, options))
    elapsed_s = time.monotonic() - started
    results = [compare(read_clip(clip), scene) for clip, scene in zip(clips, scenes, strict=True)]
    if options.sheet:
        rows = [
            (f"{s.colour} {s.shape} {s.direction}", c) for s, c in zip(scenes, clips, strict=True)
        ]
        draw_contact_sheet(rows[:12], options.sheet, scale=1.0)
    for scene, clip, result in zip(scenes, clips, results, strict=True):
        if not all(result.values()):
            print(json.dumps({"wanted": vars(scene), "read": vars(read_clip(clip))}), flush=True)
    share = {name: sum(r[name] for r in results) / len(results) for name in ATTRIBUTES}
    return {
        "prompts": len(results),
        "all_four": sum(all(r.values()) for r in results) / len(results),
        **share,
        "steps": options.steps,
        "guidance": options.guidance,
        "dtype": options.dtype,
        "text_tokens": options.text_tokens,
        "seconds_a_clip": round(elapsed_s / len(results), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=OUT)
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=6.0)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--text-tokens", type=int, default=TEXT_TOKENS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--out", type=Path, help="put the row into this JSON file")
    options = parser.parse_args()
    table = score(options)
    print(json.dumps(table), flush=True)
    if options.out:
        store(table, options.out)


def store(table: dict[str, object], path: Path) -> None:
    """Put a row into a file of rows, in the place of one with the same settings."""
    held = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in held if any(row[name] != table[name] for name in SETTINGS)]
    report = {"command": "python training/score.py", "machine": describe_machine()}
    path.write_text(json.dumps({**report, "rows": [*rows, table]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
