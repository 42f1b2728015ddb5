"""Draw the clips of the training scenes once, in parts that are kept on disk.

Both trainings read them. Any number of processes may draw: each part is a file, and drawn by whoever is
asked for it. A clip of a scene and another of the same scene differ in sizes, places and speeds.

    cd training && python -m solids.clips                     # all parts
    cd training && python -m solids.clips --first 0 --last 4  # the first four, for the autoencoder
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import numpy as np

from solids.scenes import FRAMES, SIDE, draw_scene, split_scenes

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints" / "solids"
PART = 102
PARTS = 40
"""Together a clip of each training scene."""


@functools.cache
def pick_scenes() -> np.ndarray:
    """Return which training scene each clip shows; after all of them come the same again."""
    return np.random.default_rng(1).permutation(len(split_scenes()[0]))


def load_part(out: Path, part: int) -> np.ndarray:
    """Return the clips of a part, `[PART, T, H, W, 3]` uint8, read from disk as needed; draw them first."""
    path = out / f"clips-{part:03d}.npy"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        scenes = split_scenes()[0]
        clips = np.empty((PART, FRAMES, SIDE, SIDE, 3), np.uint8)
        for i in range(PART):
            clip = part * PART + i
            clips[i] = draw_scene(scenes[pick_scenes()[clip % len(scenes)]], clip)
        np.save(path.with_suffix(".new.npy"), clips)
        path.with_suffix(".new.npy").replace(path)
    return np.load(path, mmap_mode="r")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw clips of training scenes.")
    parser.add_argument("--out", type=Path, default=CHECKPOINTS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=PARTS, help="the part after the last one")
    options = parser.parse_args()
    for part in range(options.first, options.last):
        load_part(options.out, part)
        print(json.dumps({"part": part, "of": options.last}), flush=True)


if __name__ == "__main__":
    main()
