"""How long answers take: each command in a process of its own, start-up and imports included.

Every case is a fresh process, in turns, so that what else the machine does meets all of them. A loop of
plain Python is timed before each as a yardstick: where it takes longer than the shortest, so does
everything beside it. `first step` is the time until the denoiser is called for the first time;
beside it stands the same of a script that loads the same files with Diffusers and calls the pipeline.

    python benchmarks/answer_times.py --repeats 3
    python benchmarks/answer_times.py --only "fit CogVideoX-5B" --repeats 1    # keeps the others
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PROMPT = "a red circle moving left on a grey background"
STEPS = ("--steps", "2")


@dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
        words: of the command line, `OUT` for a new file; or the name of a function here.
        goal_s: within which it is to be answered; None for what is only measured beside.
    """

    words: tuple[str, ...]
    goal_s: float | None


CASES = {
    "plan shapes --steps 2": Case(("plan", "shapes", *STEPS, "-o", "OUT.json"), 12),
    "fit shapes": Case(("fit", "shapes", "--memory", "50MiB", *STEPS), 8),
    "plan shapes": Case(("plan", "shapes", "-o", "OUT.json"), 10),
    "generate shapes, first step": Case(("reach_step",), 4),
    "Diffusers alone, first step": Case(("reach_step_plainly",), None),
    "check CogVideoX-5B": Case(("check_configs", "CogVideoX-5B"), 10),
    "fit CogVideoX-2B": Case(("predict_memory", "CogVideoX-2B"), 30),
    "fit CogVideoX-5B": Case(("predict_memory", "CogVideoX-5B"), 30),
}


def end_at_first_step() -> None:
    """End this process when a denoiser is called; its first module is torch, as everybody's."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    def end(module: Any, args: Any) -> None:
        if type(module).__name__ == "CogVideoXTransformer3DModel":
            os._exit(0)

    register_module_forward_pre_hook(end)


def run_command(*words: str) -> None:
    """A command line, as `stopdown` runs it."""
    from stopdown.app.cli import main

    sys.argv[1:] = words
    sys.exit(main())


def reach_step() -> None:
    """`stopdown generate`, until its first denoising step."""
    end_at_first_step()
    with tempfile.TemporaryDirectory() as folder:
        run_command("generate", "shapes", PROMPT, *STEPS, "-o", f"{folder}/a.mp4")


def reach_step_plainly() -> None:
    """What a short script of Diffusers does until then; in fp32, as the CPU takes it."""
    end_at_first_step()
    import torch
    from diffusers import DiffusionPipeline

    folder = ROOT / "src" / "stopdown" / "models" / "shapes"
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe(PROMPT, num_inference_steps=2)


def check_configs(name: str) -> None:
    """The check of a full-size model in fp16 on a V100, from its configs alone."""
    from full_size_configs import CALLS, write_configs

    from stopdown.dtype_rules.check import find_source, inspect_pipeline

    with tempfile.TemporaryDirectory() as folder:
        source = find_source(write_configs(name, Path(folder) / "model"))
        inspect_pipeline(source, precision="fp16", device="v100", arguments=CALLS.get(name))


def predict_memory(name: str) -> None:
    """Every strategy of a full-size model at its default size on a GPU, without weights."""
    from full_folders import write_configs

    from stopdown.memory.forecast import predict_all
    from stopdown.number_formats import FORMATS
    from stopdown.pipelines.requests import Request, build_arguments
    from stopdown.pipelines.skeletons import build_skeleton
    from stopdown.sources.sources import resolve_source

    with tempfile.TemporaryDirectory() as folder:
        source = resolve_source(write_configs(name, Path(folder) / "model"))
        dtype = FORMATS["fp16" if name == "CogVideoX-2B" else "bf16"].torch_dtype
        pipe = build_skeleton(source, dict.fromkeys(source.components, dtype))
        request = Request(prompt=PROMPT, steps=50)
        predict_all(pipe, build_arguments(pipe, request), steps=50, on_cpu=False)


FUNCTIONS: dict[str, Callable[..., None]] = {
    one.__name__: one for one in (reach_step, reach_step_plainly, check_configs, predict_memory)
}


def answer(words: tuple[str, ...]) -> None:
    """Answer one question in this process."""
    name, *rest = words
    if name in FUNCTIONS:
        FUNCTIONS[name](*rest)
    else:
        run_command(*words)


def measure(case: Case) -> dict[str, float]:
    """Wall and processor seconds of one fresh process, and its peak of memory."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.replace("OUT", f"{folder}/out") for word in case.words]
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, __file__, "--answer", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        said = process.stderr.read() if process.stderr else b""
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - begun
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"{' '.join(words)} failed: {said.decode()[-2000:]}")
    return {
        "wall_s": round(wall_s, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_gib": round(usage.ru_maxrss / 2**20, 2),
    }


def time_yardstick() -> float:
    """Processor seconds of a fixed loop."""
    begun = time.process_time()
    sum(i * i for i in range(5 * 10**6))
    return time.process_time() - begun


def collect(names: list[str], repeats: int) -> dict[str, Any]:
    """The cases in turns; medians, and every single figure."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            yardstick = time_yardstick()
            runs[name].append({**measure(CASES[name]), "yardstick_s": round(yardstick, 3)})
            print(name, json.dumps(runs[name][-1]), flush=True)
    return {
        name: {
            "goal_s": CASES[name].goal_s,
            **{key: statistics.median(run[key] for run in found) for key in found[0]},
            "runs": found,
        }
        for name, found in runs.items()
    }


def list_lines(report: dict[str, Any]) -> list[str]:
    """The table as Markdown."""
    lines = [
        "# How long answers take",
        "",
        "| question | goal | processor | wall | memory | yardstick |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, row in report["answers"].items():
        goal = f"{row['goal_s']:g} s" if row["goal_s"] else ""
        lines.append(
            f"| {name} | {goal} | {row['cpu_s']:.1f} s | {row['wall_s']:.1f} s | "
            f"{row['peak_gib']:.2f} GiB | {row['yardstick_s']:.2f} s |"
        )
    repeats = min(len(row["runs"]) for row in report["answers"].values())
    made = (
        f"Medians of {repeats} fresh processes" if repeats > 1 else "One fresh process for each row"
    )
    shortest = min(run["yardstick_s"] for row in report["answers"].values() for run in row["runs"])
    return [
        *lines,
        "",
        f"{made}, imports included. Wall time includes time that the machine spent on other work. The "
        "yardstick is a fixed loop that is timed before each process. Its shortest time was "
        f"{shortest:.2f} s; in a row with a longer time, the processor was slower or shared. "
        f"Threads: {report['threads']}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--answer", nargs=argparse.REMAINDER, help="answer in this process")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.answer:
        answer(tuple(options.answer))
        return
    from stopdown.devices.environment import describe_machine

    path = RESULTS / "answer_times.json"
    before = json.loads(path.read_text())["answers"] if path.exists() else {}
    found = {**before, **collect(options.only, options.repeats)}
    threads = os.environ.get("OMP_NUM_THREADS")
    report = {
        "command": f"python benchmarks/answer_times.py --repeats {options.repeats}",
        "threads": f"OMP_NUM_THREADS={threads}" if threads else "as many threads as it likes",
        "machine": describe_machine(),
        "answers": {name: found[name] for name in CASES if name in found},
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    path.with_suffix(".md").write_text("\n".join(list_lines(report)) + "\n")


if __name__ == "__main__":
    main()
