"""Stopdown's overhead: the same pipeline call, plain and guarded, in turns in one process.

Two figures come out. The *own share* is the time that Stopdown's code measured around the very calls
that Diffusers made, over the whole of a run. The *paired ratio* is the wall time of a guarded run over
that of the plain run beside it; its spread shows how much of it is noise. Start-up is left aside.

    python benchmarks/generate.py --repeats 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from stopdown import load
from stopdown.devices.environment import describe_machine
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.runtime.guard import guard

RESULTS = Path(__file__).parent / "results"
PROMPT = "a red circle moving left on a grey background"


def time_plain(pipe: Any, request: Request) -> float:
    begun = time.perf_counter()
    with torch.no_grad():
        pipe(**build_arguments(pipe, request))
    return time.perf_counter() - begun


def time_guarded(pipe: Any, request: Request) -> tuple[float, float]:
    """Seconds of the run, and of Stopdown's own code in it."""
    begun = time.perf_counter()
    with guard(pipe) as handle, torch.no_grad():
        pipe(**build_arguments(pipe, request))
    return time.perf_counter() - begun, handle.record.own_s


def run(source: str, precision: str, steps: int, repeats: int) -> dict[str, Any]:
    pipe = load(source, precision=precision, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    request = Request(prompt=PROMPT, steps=steps)
    time_plain(pipe, request)
    ratios, shares = [], []
    for turn in range(repeats):
        if turn % 2:
            plain_s = time_plain(pipe, request)
            guarded_s, own_s = time_guarded(pipe, request)
        else:
            guarded_s, own_s = time_guarded(pipe, request)
            plain_s = time_plain(pipe, request)
        ratios.append(guarded_s / plain_s)
        shares.append(own_s / guarded_s)
        print(json.dumps({"pair": turn, "ratio": ratios[-1], "own_share": shares[-1]}), flush=True)
    return {
        "own_share_median": statistics.median(shares),
        "own_share_worst": max(shares),
        "paired_ratio_median": statistics.median(ratios),
        "paired_ratio_range": [min(ratios), max(ratios)],
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="shapes")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    result = run(options.source, options.precision, options.steps, options.repeats)
    arguments = " ".join(f"--{name} {value}" for name, value in vars(options).items())
    report = {
        "command": f"python benchmarks/generate.py {arguments}",
        "machine": describe_machine(),
        **result,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "generate.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
