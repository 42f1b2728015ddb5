"""How long a plan takes, with the code of an earlier commit and with today's.

The folder has CogVideoX-5B's layers at an eighth of their width and random weights. Each plan is made in a
fresh process, without a plan that was kept, in turns; processor seconds are those of that process.

    python benchmarks/run.py planning_time ead08c38 --repeats 1
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NARROWER = 8


def write_folder(folder: Path) -> None:
    """A CogVideoX pipeline with 42 layers, 24 of T5, and random weights in fp16."""
    import diffusers
    import torch
    from full_folders import make_t5

    from stopdown.pipelines.tiny_pipelines import make_t5_tokenizer

    torch.manual_seed(0)
    text = 4096 // NARROWER
    parts = {
        "text_encoder": make_t5(24, d_model=text, d_ff=10240 // NARROWER, num_heads=64 // NARROWER),
        "transformer": diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=48 // NARROWER,
            num_layers=42,
            text_embed_dim=text,
            use_rotary_positional_embeddings=True,
            sample_width=90,
            sample_height=60,
            sample_frames=49,
        ),
        "vae": diffusers.AutoencoderKLCogVideoX(
            block_out_channels=tuple(x // NARROWER for x in (128, 256, 256, 512)),
            norm_num_groups=32 // NARROWER,
            scaling_factor=0.7,
        ),
    }
    for part in parts.values():
        part.half()
    scheduler = diffusers.CogVideoXDDIMScheduler(snr_shift_scale=1.0)
    pipe = diffusers.CogVideoXPipeline(**parts, tokenizer=make_t5_tokenizer(), scheduler=scheduler)
    pipe.save_pretrained(folder)


def plan_once(folder: str) -> dict[str, Any]:
    """Make the plan in this process; what its captures took."""
    import torch

    from stopdown import make_plan
    from stopdown.scaling import certificate
    from stopdown.scaling.graph import capture

    captures, spent = Counter[str](), Counter[str]()

    def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            made = run(*given, **named)
            spent[name] += time.process_time() - began
            captures.update([made.component] if name == "captures" else [])
            return made

        return call

    export = timed("captures", capture._ShadowCall.export)
    capture._ShadowCall.export = export  # type: ignore[method-assign]
    certificate.bound_call = timed("bounds", certificate.bound_call)
    torch.set_num_threads(1)
    wall, processor = time.perf_counter(), time.process_time()
    plan = make_plan(folder)
    found = [(x.component, x.precision, x.scaling, x.reasons) for x in plan.components]
    return {
        "processor_s": round(time.process_time() - processor, 1),
        "captures_s": round(spent["captures"], 1),
        "bounds_s": round(spent["bounds"], 1),
        "wall_s": round(time.perf_counter() - wall, 1),
        "captures": dict(captures),
        "plan": hashlib.sha256(repr(found).encode()).hexdigest()[:16],
    }


def extract(commit: str, folder: Path) -> Path:
    """The package's source at a commit."""
    kept = subprocess.run(
        ["git", "archive", commit, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(fileobj=io.BytesIO(kept.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def collect(commit: str, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Each way's runs, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        ways = {commit: extract(commit, Path(folder, "before")), "now": ROOT / "src"}
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        write_folder(Path(folder, "model"))
        for way in [way for _ in range(repeats) for way in ways]:
            with tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, __file__, "--once", f"{folder}/model"]
                env = {**os.environ, "STOPDOWN_CACHE": cache, "HF_HUB_OFFLINE": "1"}
                env["PYTHONPATH"] = str(ways[way])
                done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            runs[way].append(json.loads(done.stdout.splitlines()[-1]))
            print(way, json.dumps(runs[way][-1]), flush=True)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", help="the earlier one")
    parser.add_argument("--once", metavar="FOLDER", help="plan in this process")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(plan_once(options.once)))
        return
    if options.commit is None:
        parser.error("give the earlier commit")
    from stopdown.devices.environment import describe_machine

    runs = collect(options.commit, options.repeats)
    ways = {
        way: {
            key: statistics.median(run[key] for run in found)
            for key in ("processor_s", "captures_s", "bounds_s", "wall_s")
        }
        for way, found in runs.items()
    }
    plans = {run["plan"] for found in runs.values() for run in found}
    report = {
        "command": f"python benchmarks/planning_time.py {options.commit} --repeats {options.repeats}",
        "machine": describe_machine(),
        "threads": 1,
        "same_plan": len(plans) == 1,
        "ways": ways,
        "runs": runs,
    }
    (RESULTS / "planning_time.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
