"""How long answers take: each command in its own process, with start-up and imports.

Every case is a fresh process, in turns, so that what else the machine does meets all of them. A loop of
plain Python is timed before each: where it takes longer than the shortest, so does everything beside it.
`first step` is the time until the denoiser is called for the first time; beside it stands the same of a
script that loads the same files with Diffusers and calls the pipeline. The goals were set on a machine
where that script took 3.1 s, so each time is also stated as if it took 3.1 s here.

    python benchmarks/answer_times.py --repeats 3
    python benchmarks/answer_times.py --only "fit shapes" --repeats 1    # keeps the others
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

TINY = (
    "cogvideox",
    "cogvideox-image",
    "cogvideox-video",
    "cogview3plus",
    "flux",
    "sd",
    "sdxl",
    "svd",
    "wan",
)
"""The pipelines of `stopdown.testing`, at the sizes that they make by default."""

LARGE = ("CogVideoX-5B", "FLUX.1-dev", "SDXL", "SVD-XT", "Wan2.1-T2V-14B")
"""The configurations and headers of checkpoints, at the sizes that they make by default."""

YARDSTICK = "Diffusers alone, first step"
GOALS_S = 3.1
"""What that took on the machine that the goals were set for."""


@dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
        words: of the command line, `OUT` for a new file, `FOLDER:NAME` for a model; or the name of a
            function here.
        goal_s: within which it is to be answered; None for what is only measured beside.
    """

    words: tuple[str, ...]
    goal_s: float | None


CASES = {
    "fit shapes": Case(("fit", "shapes", "--memory", "50MiB", *STEPS), 8),
    "plan shapes": Case(("plan", "shapes", "-o", "OUT.json"), 10),
    "generate shapes, first step": Case(("reach_step",), 4),
    YARDSTICK: Case(("reach_step_plainly",), None),
    "check CogVideoX-5B": Case(("check_configs", "CogVideoX-5B"), 10),
    **{
        f"fit {name} --device t4": Case(("fit", f"FOLDER:{name}", "--device", "t4"), 5)
        for name in TINY
    },
    **{
        f"fit {name} --device t4": Case(("fit", f"FOLDER:{name}", "--device", "t4"), 10)
        for name in LARGE
    },
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

    from stopdown.dtype_rules.check import find_weightless_source, inspect_pipeline

    with tempfile.TemporaryDirectory() as folder:
        source = find_weightless_source(write_configs(name, Path(folder) / "model"))
        inspect_pipeline(source, precision="fp16", device="v100", arguments=CALLS.get(name))


def write_model(name: str, parent: Path) -> Path:
    """A folder with a tiny pipeline, or with the configurations and headers of a checkpoint."""
    from full_folders import write_configs

    from stopdown.testing import save_pipeline

    folder = parent / name
    if folder.exists():
        return folder
    if name in TINY:
        return save_pipeline(name, folder)
    return write_configs(name, folder, with_headers=True)


FUNCTIONS: dict[str, Callable[..., None]] = {
    one.__name__: one for one in (reach_step, reach_step_plainly, check_configs)
}


def answer(words: tuple[str, ...]) -> None:
    """Answer one question in this process."""
    name, *rest = words
    if name in FUNCTIONS:
        FUNCTIONS[name](*rest)
    else:
        run_command(*words)


def measure(case: Case, models: Path) -> dict[str, float]:
    """Wall and processor seconds of one fresh process, and its peak of memory.

    Args:
        models: where folders of models are kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [
            str(write_model(word.removeprefix("FOLDER:"), models))
            if word.startswith("FOLDER:")
            else word.replace("OUT", f"{folder}/out")
            for word in case.words
        ]
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
    with tempfile.TemporaryDirectory() as models:
        for name in [name for _ in range(repeats) for name in names]:
            yardstick = time_yardstick()
            taken = measure(CASES[name], Path(models))
            runs[name].append({**taken, "yardstick_s": round(yardstick, 3)})
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
        "| question | goal | at the goals' speed | wall | processor | memory | loop |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    ratio = GOALS_S / report["answers"][YARDSTICK]["wall_s"]
    for name, row in report["answers"].items():
        goal = f"{row['goal_s']:g} s" if row["goal_s"] else ""
        lines.append(
            f"| {name} | {goal} | {ratio * row['wall_s']:.1f} s | {row['wall_s']:.1f} s | "
            f"{row['cpu_s']:.1f} s | {row['peak_gib']:.2f} GiB | {row['yardstick_s']:.2f} s |"
        )
    repeats = min(len(row["runs"]) for row in report["answers"].values())
    made = (
        f"Medians of {repeats} fresh processes" if repeats > 1 else "One fresh process for each row"
    )
    shortest = min(run["yardstick_s"] for row in report["answers"].values() for run in row["runs"])
    return [
        *lines,
        "",
        f"{made}, imports included. Wall time includes time that the machine spent on other work. "
        f"The goals were set where Diffusers alone took {GOALS_S} s to its first step; the third column is "
        "the wall time by that ratio. A fixed loop is timed before each process. Its shortest time was "
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
