"""Speed of a rescaled forward in fp16 over the plain forward in fp16, paired in one run.

Two copies of one module: the first runs in fp16 as it is (weights in range, so nothing is NaN), the
second was made to overflow and rescaled. They are called in turns, and the ratio of each pair is
kept: a machine that slows down slows down both. Explicit multiplies are all that can cost time.

    python benchmarks/speed.py
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from rescale import overflow  # noqa: E402 (the paths are set above)

from models.rescaling_models import (  # noqa: E402
    WAYS,
    Call,
    make_example,
    measure_call,
    run_calls,
)
from stopdown.devices.device_choice import choose_device  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.memory.speed import time_runs  # noqa: E402
from stopdown.scaling.folding.folds import cast_, fold_scaling  # noqa: E402
from stopdown.scaling.trials.search import find_scaling  # noqa: E402

DEVICE = choose_device("cpu")

CLASSES = (
    ("CogVideoX rotary", "residual"),
    ("CogView3-Plus", "residual"),
    ("T5", "residual"),
    ("SD UNet", "residual"),
    ("CogVideoX VAE", "feature maps"),
)


def make_pair(name: str, way: str) -> tuple[list[Call], list[Call], int]:
    """Calls of a plain module in fp16, of a rescaled one, and its explicit multiplies."""
    plain, plain_calls = make_example(name)
    cast_(plain, torch.float16)
    module, calls = make_example(name)
    _, measured = overflow(module, calls, [measure_call(*call) for call in calls], WAYS[way])
    scaling = find_scaling(module, measured)
    cast_(module, torch.float16, fold_scaling(module, scaling))
    return plain_calls, calls, len(scaling.multiplies)


def measure(name: str, way: str, pairs: int, repeats: int) -> dict[str, Any]:
    plain, rescaled, multiplies = make_pair(name, way)
    ratios = []
    for turn in range(pairs + 1):
        order = (plain, rescaled) if turn % 2 else (rescaled, plain)
        spent = {
            id(calls): time_runs(
                DEVICE, functools.partial(run_calls, calls, torch.float16), repeats
            )
            for calls in order
        }
        ratios.append(spent[id(rescaled)] / spent[id(plain)])
    kept = sorted(ratios[1:])  # the first pair warms up
    return {
        "class": name,
        "way": way,
        "multiplies": multiplies,
        "ratio_median": statistics.median(kept),
        "ratio_quartiles": [kept[len(kept) // 4], kept[-1 - len(kept) // 4]],
        "pairs": len(kept),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, way in CLASSES:
        rows.append(measure(name, way, options.pairs, options.repeats))
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "command": f"python benchmarks/speed.py --pairs {options.pairs}",
        "machine": describe_machine(),
        "ratio_median": statistics.median(row["ratio_median"] for row in rows),
        "rows": rows,
    }
    path = ROOT / "benchmarks" / "results" / "speed.json"
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
