"""CogVideoX-5B at full size on a real card: what one command takes, and what each format costs there.

A folder with the real configurations is written, every component at its full size, weights in bf16 drawn as
in `full_size_runs.py`, on the card. Then, each in a process of its own:

- *one command*: `generate MODEL PROMPT --precision fp16` for a video of the model's own size within
  `--limit`, which PyTorch's allocator keeps to: more is an error, as on a card of that size. It makes its
  plan. *second run*: the same, with the kept plan.
- *calls*: one call of the transformer with fp32's arguments in each format, at the model's own size without
  guidance: its error against fp32, and the median of three times.
- *measure*: `plan --measure` there.
- *host*: the plan of *one command* again, its products computed by the processor.

    python benchmarks/on_card.py --folder FOLDER
    python benchmarks/on_card.py --folder FOLDER --stages calls --layers 2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

from default_run import GIB, PROMPT, write_model  # noqa: E402 (the path is set above)

NAME = "CogVideoX-5B"
STAGES = ("one command", "second run", "calls", "measure", "host")
REPEATS = 3


def write(options: argparse.Namespace) -> dict[str, Any]:
    """Write the checkpoint."""
    folder = options.folder / "model"
    return {"bytes": write_model(NAME, folder, device=options.device, layers=options.layers)}


def make_request(options: argparse.Namespace, **other: Any) -> dict[str, Any]:
    return {"frames": options.frames, "height": options.height, "width": options.width, **other}


def run_command(options: argparse.Namespace) -> dict[str, Any]:
    """Generate a video within the limit."""
    import torch

    from stopdown.app.generate_command import GenerateOptions, generate

    if options.device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.limit * GIB / whole)
    record = generate(
        GenerateOptions(
            source=str(options.folder / "model"), prompt=PROMPT, device=options.device, steps=2,
            precision="fp16", memory=f"{options.limit:g}GiB", quiet=True, force=True,
            output=str(options.folder / "out.mp4"), **make_request(options),
        )
    )  # fmt: skip
    return {
        "stages_s": record.stages_s, "elapsed_s": record.elapsed_s, "strategy": record.strategy,
        "own_s": record.own_s, "peak_bytes": record.peak_bytes, "peak_source": record.peak_source,
        "memory": None if record.memory is None else dataclasses.asdict(record.memory),
        "precisions": {x.component: x.precision for x in record.decisions},
        "findings": [str(x) for x in record.findings],
        "repairs": [f"{x.component}: {x.action}" for x in record.repairs],
        "steps_down": [dataclasses.asdict(x) for x in record.steps_down],
        "calls": [dataclasses.asdict(x) for x in record.calls],
    }  # fmt: skip


def load_pipe(options: argparse.Namespace, precision: Any) -> Any:
    import stopdown

    pipe = stopdown.load(
        options.folder / "model", precision=precision, device=options.device, memory="none",
        guard=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def time_call(run: Callable[[], Any], options: argparse.Namespace, repeats: int) -> float:
    """Return the median of a call's seconds."""
    import torch

    def wait() -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(repeats):
        wait()
        begun = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def run_calls(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one call of the transformer in each format, with fp32's arguments."""
    import torch

    from stopdown.devices.device_memory import free_memory

    precisions = {"fp32": "fp32", "bf16": "bf16", "plain fp16": "fp16-plain", "fp16": "fp16"}
    measured = options.folder / "measured.json"
    if measured.exists():
        precisions["fp16 after measuring"] = str(measured)
    rows, kept = dict[str, Any](), dict[str, Any]()
    for name, precision in precisions.items():
        with torch.no_grad():
            rows[name] = measure_call(name, load_pipe(options, precision), kept, options)
        print("ROW", name, json.dumps(rows[name]), flush=True)
        free_memory()
    return rows


def measure_call(
    name: str, pipe: Any, kept: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure a call of one format; the first, fp32's, keeps its arguments and output for the others."""
    import torch
    from torch.utils import _pytree as pytree

    import stopdown
    from stopdown.devices.device_memory import free_memory
    from stopdown.numerics import relative_l2

    model = pipe.transformer
    if not kept:
        keep_call(pipe, kept, options)
    pipe.text_encoder = None
    free_memory()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(name, torch.float16)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, kept["call"]
    )
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def run() -> torch.Tensor:
        found: torch.Tensor = model(*args, **kwargs)[0]
        return found

    output = run().float()
    expected = kept.setdefault("output", output.cpu())
    is_finite = bool(output.isfinite().all())
    row = {
        "non_finite": int((~output.isfinite()).sum()), "values": output.numel(),
        "error": relative_l2(output.cpu(), expected) if is_finite else None,
        "call_s": time_call(run, options, 1 if name == "fp32" else REPEATS),
    }  # fmt: skip
    if options.device == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    if name in ("bf16", "fp16"):
        with stopdown.guard(pipe, announce=lambda text: None):
            row["same_bits"] = bool((run().float() == output).all())
            row["guarded_s"] = time_call(run, options, REPEATS)
    return row


def keep_call(pipe: Any, kept: dict[str, Any], options: argparse.Namespace) -> None:
    """Keep the arguments of the transformer's first call at the size that was asked for."""
    import torch
    from torch.utils import _pytree as pytree

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        kept.setdefault(
            "call", pytree.tree_map_only(torch.Tensor, torch.clone, (args, dict(kwargs)))
        )

    hook = pipe.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    pipe(
        prompt=PROMPT, num_frames=options.frames, height=options.height, width=options.width,
        num_inference_steps=1, guidance_scale=1.0, output_type="latent",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    hook.remove()


def run_measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make the plan that `plan --measure` makes."""
    from stopdown.pipelines.requests import Request
    from stopdown.plans.plan_files import write_plan
    from stopdown.runtime.plan_maker import make_plan

    request = Request(**make_request(options, steps=1))
    made = make_plan(
        str(options.folder / "model"), measure=True, prompts=(PROMPT,), request=request,
        device=options.device,
    )  # fmt: skip
    write_plan(made, options.folder / "measured.json")
    return {
        x.component: {
            "precision": x.precision, "bounded": x.in_force.bounded, "values": x.in_force.values,
            "reasons": x.reasons,
        }
        for x in made.components
    }  # fmt: skip


def run_host(options: argparse.Namespace) -> dict[str, Any]:
    """Certify with the processor alone."""
    from stopdown.bounds import near_weights
    from stopdown.devices.environment import choose_device
    from stopdown.pipelines.requests import Request
    from stopdown.plans.certified import certify_plan

    near_weights.KINDS = ()
    request = Request(prompt=PROMPT, **make_request(options))
    made = certify_plan(
        str(options.folder / "model"), precision="fp16", residual="fp32",
        device=choose_device(options.device), request=request,
    )  # fmt: skip
    return {x.component: [x.in_force.bounded, x.in_force.values] for x in made.components}


RUNS = {
    "weights": write, "one command": run_command, "second run": run_command,
    "calls": run_calls, "measure": run_measure, "host": run_host,
}  # fmt: skip


def run_stage(stage: str, options: argparse.Namespace) -> dict[str, Any]:
    begun, cpu = time.perf_counter(), time.process_time()
    try:
        row = RUNS[stage](options)
    except Exception:  # the next stage may work
        row = {"failure": traceback.format_exc()[-4000:]}
    return {**row, "whole_s": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu}


def main() -> None:
    """Run each stage in a process of its own, and store what they say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the model is written, and kept"
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=15.0, help="GiB of the card for a run")
    parser.add_argument("--layers", type=int, default=0, help="of transformer and T5; 0 for all")
    parser.add_argument("--frames", type=int, default=49)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=720)
    parser.add_argument("--output", type=Path, default=RESULTS / "on_card.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(run_stage(options.one, options)), flush=True)
        return
    import os

    import torch

    from stopdown.devices.environment import describe_machine

    rows: dict[str, Any] = {}
    environment = {**os.environ, "STOPDOWN_CACHE": str(options.folder / "cache")}
    written = () if (options.folder / "model").exists() else ("weights",)
    for stage in (*written, *options.stages):
        command = [sys.executable, __file__, *sys.argv[1:], "--one", stage]
        done = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert done.stdout is not None
        row = {"failure": "nothing was said"}
        for line in done.stdout:
            if line.startswith("RESULT "):
                row = json.loads(line.removeprefix("RESULT "))
            else:
                print(line, end="", flush=True)
        done.wait()
        rows[stage] = row
        print(stage, json.dumps(row)[:3000], flush=True)
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else options.device
        report = {
            "command": "python benchmarks/on_card.py --folder FOLDER", "card": card,
            "machine": describe_machine(), "layers": options.layers, "limit_gib": options.limit,
            "request": make_request(options), "rows": rows,
        }  # fmt: skip
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
