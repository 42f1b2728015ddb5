"""How long a plan takes, with the code of an earlier commit and with today's.

The narrow CogVideoX has CogVideoX-5B's layers at an eighth of their width and random weights; the others
are checkpoints at their full size. Each plan is made in a fresh process, without a plan that was kept, in
turns; processor seconds are those of that process and of those that it starts. Beside the narrow one stands
what Diffusers takes to import, load the pipeline and make its first step in bf16, at the plan's sizes.
With one thread all is planned in one process; with more, a second one may plan the smaller components,
and captures and bounds are those of the first.

    python benchmarks/run.py planning_time ead08c38 --repeats 1
    python benchmarks/planning_time.py ead08c38 --threads 2
    python benchmarks/planning_time.py ead08c38 --models SVD-XT
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import resource
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

from default_run import REQUESTS, write_model

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NARROW, NARROWER = "narrow CogVideoX", 8


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


def plan_once(folder: str, threads: int) -> dict[str, Any]:
    """Make the plan in this process; return what it took, and its captures."""
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
    torch.set_num_threads(threads)
    wall, processor = time.perf_counter(), _measure_processor()
    plan = make_plan(folder)
    scalings = {x.component: x.in_force for x in plan.components}
    found = [
        (name, sorted(x.exponents.items()), x.fp32_modules, x.outputs) if x is not None else name
        for name, x in scalings.items()
    ]
    peaks = [
        resource.getrusage(x).ru_maxrss for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return {
        "processor_s": round(_measure_processor() - processor, 1),
        "captures_s": round(spent["captures"], 1),
        "bounds_s": round(spent["bounds"], 1),
        "wall_s": round(time.perf_counter() - wall, 1),
        "peak_mib": [x >> 10 for x in peaks],
        "captures": dict(captures),
        "values": {x: [y.bounded, y.values] for x, y in scalings.items() if y is not None},
        "plan": hashlib.sha256(repr(found).encode()).hexdigest()[:16],
    }


def _measure_processor() -> float:
    """Return the processor seconds of this process and of its ended children."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(x.ru_utime + x.ru_stime for x in used)


def step_once(folder: str, threads: int) -> dict[str, Any]:
    """Load the pipeline with Diffusers in this process and make one step; return seconds by the clock."""
    begun = time.perf_counter()
    import diffusers
    import torch

    torch.set_num_threads(threads)
    imported = time.perf_counter()
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
    loaded = time.perf_counter()
    pipe("a red circle", num_inference_steps=1, output_type="latent", guidance_scale=1.0)
    return {
        "imports_s": round(imported - begun, 1),
        "load_s": round(loaded - imported, 1),
        "first_step_s": round(time.perf_counter() - loaded, 1),
    }


def extract(commit: str, folder: Path) -> Path:
    """The package's source at a commit."""
    kept = subprocess.run(
        ["git", "archive", commit, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(fileobj=io.BytesIO(kept.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def collect(name: str, commit: str, repeats: int, threads: int) -> dict[str, list[dict[str, Any]]]:
    """Run each way on a model, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        ways = {commit: extract(commit, Path(folder, "before")), "now": ROOT / "src"}
        turns = [way for _ in range(repeats) for way in ways]
        if name == NARROW:
            write_folder(Path(folder, "model"))
            turns.append("Diffusers")
        else:
            write_model(name, Path(folder, "model"))
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in turns}
        for way in turns:
            with tempfile.TemporaryDirectory() as cache:
                what = "--step" if way == "Diffusers" else "--once"
                command = [
                    sys.executable,
                    __file__,
                    what,
                    f"{folder}/model",
                    "--threads",
                    f"{threads}",
                ]
                env = {**os.environ, "STOPDOWN_CACHE": cache, "HF_HUB_OFFLINE": "1"}
                env["PYTHONPATH"] = str(ways.get(way, ROOT / "src"))
                done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            runs[way].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, way, json.dumps(runs[way][-1]), flush=True)
    return runs


def _name(model: str, threads: int) -> str:
    return model if threads == 1 else f"{model}, {threads} threads"


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of a model's runs, and whether all plans are the same."""
    ways = {
        way: {
            key: statistics.median(run[key] for run in found)
            for key in found[0]
            if key.endswith("_s")
        }
        for way, found in runs.items()
    }
    plans = {run["plan"] for found in runs.values() for run in found if "plan" in run}
    return {"same_plan": len(plans) == 1, "ways": ways, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", help="the earlier one")
    parser.add_argument(
        "--models", nargs="*", default=[NARROW], choices=[NARROW, *sorted(REQUESTS)]
    )
    parser.add_argument("--once", metavar="FOLDER", help="plan in this process")
    parser.add_argument(
        "--step", metavar="FOLDER", help="load and step with Diffusers in this process"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.once or options.step:
        run = plan_once if options.once else step_once
        made = run(options.once or options.step, options.threads)
        print(json.dumps(made))
        return
    if options.commit is None:
        parser.error("give the earlier commit")
    from stopdown.devices.environment import describe_machine

    path = RESULTS / "planning_time.json"
    for name in options.models:
        row = summarise(collect(name, options.commit, options.repeats, options.threads))
        stored = json.loads(path.read_text()).get("rows", {}) if path.exists() else {}
        report = {
            "command": f"python benchmarks/planning_time.py {options.commit} --repeats {options.repeats}",
            "machine": describe_machine(),
            "rows": {**stored, _name(name, options.threads): row},
        }
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
