"""The whole bundled pipeline in pure fp16 with a plan: error, score and finite values over many prompts.

A plan is made from its own prompts, then each prompt runs in fp32, bf16 and planned fp16 with the
same noise, in turns. Errors are those of the pixels against fp32's; the checker of `training/` reads
what each clip shows. Each prompt's row is kept as it comes, and a second start goes on behind it.

    python benchmarks/shapes_fp16.py --prompts 20
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "training"))

from checker import compare, read_clip  # noqa: E402 (the path is set above)
from scenes import Scene, split_scenes  # noqa: E402
from stopdown import apply_plan, load, make_plan  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.frames.media import to_uint8  # noqa: E402
from stopdown.records import Plan  # noqa: E402
from stopdown.runtime.guard import guard  # noqa: E402

RESULTS = Path(__file__).parent / "results"
PRECISIONS = ("fp32", "bf16", "fp16 by plan")
TEXT_TOKENS = 16


def open_pipes(plan: Plan) -> dict[str, Any]:
    """The pipeline once in each precision."""
    pipes = {name: load("shapes", precision=name, device="cpu") for name in ("fp32", "bf16")}
    pipes["fp16 by plan"] = load("shapes", precision="fp32", device="cpu")
    apply_plan(pipes["fp16 by plan"], plan)
    for pipe in pipes.values():
        pipe.set_progress_bar_config(disable=True)
    return pipes


def list_dtypes(pipe: Any) -> list[str]:
    """Every dtype among a pipeline's floating parameters."""
    modules = [x for x in pipe.components.values() if isinstance(x, torch.nn.Module)]
    found = {p.dtype for module in modules for p in module.parameters() if p.is_floating_point()}
    return sorted(str(dtype).removeprefix("torch.") for dtype in found)


def run(pipe: Any, scene: Scene, seed: int, options: argparse.Namespace) -> tuple[np.ndarray, int]:
    """Pixels `[T, H, W, 3]` fp32 in 0..1, and how many outputs of components were not finite.

    Raises:
        NonFiniteError: at the first such output; there is no row for a run that fails.
    """
    with torch.no_grad(), guard(pipe, on_fault="raise") as handle:
        frames = pipe(
            scene.caption(),
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            generator=torch.Generator().manual_seed(seed),
            max_sequence_length=TEXT_TOKENS,
            output_type="np",
        ).frames[0]
    return frames, sum(call.non_finite for call in handle.record.calls)


def measure_prompt(
    pipes: dict[str, Any], scene: Scene, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": scene.caption(), "seed": seed}
    reference = None
    for name in PRECISIONS:
        begun = time.perf_counter()
        pixels, faults = run(pipes[name], scene, seed, options)
        reference = pixels if reference is None else reference
        row[name] = {
            "rmse": float(np.sqrt(np.mean((pixels - reference) ** 2))),
            "non_finite": faults,
            "right": all(compare(read_clip(to_uint8(pixels)), scene).values()),
            "elapsed_s": round(time.perf_counter() - begun, 2),
        }
    row["ratio"] = row["bf16"]["rmse"] / row["fp16 by plan"]["rmse"]
    return row


def summarise(rows: list[dict[str, Any]], plan: Plan, dtypes: list[str]) -> dict[str, Any]:
    return {
        "prompts": len(rows),
        "score": {name: sum(row[name]["right"] for row in rows) / len(rows) for name in PRECISIONS},
        "rmse_median": {
            name: statistics.median(row[name]["rmse"] for row in rows) for name in PRECISIONS
        },
        "bf16_over_planned_median": statistics.median(row["ratio"] for row in rows),
        "bf16_over_planned_worst": min(row["ratio"] for row in rows),
        "non_finite": sum(row[name]["non_finite"] for row in rows for name in PRECISIONS),
        "parameter_dtypes": dtypes,
        "fp32_modules": {x.component: list(x.in_force.fp32_modules) for x in plan.components},
        "headroom_bits": {x.component: x.in_force.headroom_bits for x in plan.components},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS / "shapes_fp16.json")
    options = parser.parse_args()
    scenes = split_scenes()[1][: options.prompts]
    begun = time.perf_counter()
    plan = make_plan("shapes")
    planned_s = round(time.perf_counter() - begun, 1)
    pipes = open_pipes(plan)
    journal = options.out.with_suffix(".jsonl")
    rows = [json.loads(x) for x in journal.read_text().splitlines()] if journal.exists() else []
    for index in range(len(rows), len(scenes)):
        rows.append(measure_prompt(pipes, scenes[index], options.seed + index, options))
        with journal.open("a") as file:
            print(json.dumps(rows[-1]), file=file)
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "command": f"python benchmarks/shapes_fp16.py --prompts {options.prompts}"
        f" --guidance {options.guidance:g}",
        "machine": describe_machine(),
        "planned_s": planned_s,
        **summarise(rows, plan, list_dtypes(pipes["fp16 by plan"])),
        "rows": rows,
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    journal.unlink()


if __name__ == "__main__":
    main()
