"""How the rescaling of modules ends that are drawn at random from the table of operations.

Each seed draws a small module of one to four steps (`models/drawn_graphs.py`), rescales it for one input
and holds it against what it was, for that input and six others, and against bf16.

    OMP_NUM_THREADS=1 python benchmarks/random_graphs.py --count 5000       # hours on one core
    OMP_NUM_THREADS=1 python benchmarks/random_graphs.py --first 0 --count 100 --print > first.log
    python benchmarks/random_graphs.py --join first.log second.log          # parts of one run
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from models.drawn_graphs import SOLVED, Verdict, judge  # noqa: E402 (the path is set above)
from stopdown.devices.environment import describe_machine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


def summarise(found: Sequence[Verdict]) -> dict[str, Any]:
    """Counts of how modules ended, and their errors beside bf16's."""
    solved = [x for x in found if x.outcome in SOLVED]
    ratios = sorted(x.bf16 / x.error for x in solved if x.bf16 and x.error)
    ratios_by = {
        name: [x.bf16 / x.error for x in solved if x.outcome == name and x.bf16 and x.error]
        for name in SOLVED
    }
    refused = Counter(_shorten(x.why) for x in found if x.outcome == "refused")
    return {
        "modules": len(found),
        "overflow_in_plain_fp16": sum(x.overflows for x in found),
        "outcomes": dict(Counter(x.outcome for x in found).most_common()),
        "bf16_error_over_ours": {
            "median": _round(statistics.median(ratios or [0.0])),
            "5 %": _round(ratios[len(ratios) // 20] if ratios else 0.0),
            "least": _round(min(ratios, default=0.0)),
            "medians": {k: _round(statistics.median(v)) for k, v in ratios_by.items() if v},
        },
        "seconds": {
            "median": _round(statistics.median(x.seconds for x in found)),
            "most": _round(max(x.seconds for x in found)),
        },
        "refused": dict(refused.most_common()),
        "wrong": [asdict(x) for x in found if not x.is_right],
    }


def _shorten(why: str) -> str:
    """What kind of refusal it is, without names and numbers."""
    for words in (
        "No exponents keep",
        "not bit for bit",
        "is not finite in fp32",
        "In fp16 with casts",
    ):
        if words in why:
            return words
    return why[:60]


def _round(figure: float) -> float:
    return float(f"{figure:.3g}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--print", action="store_true", help="store nothing")
    parser.add_argument("--join", nargs="+", type=Path, help="count what these runs have printed")
    options = parser.parse_args()
    if options.join:
        lines = [x for path in options.join for x in path.read_text().splitlines()]
        known = [Verdict(**json.loads(x)) for x in lines if x.startswith('{"')]
        store(sorted({x.seed: x for x in known}.values(), key=lambda x: x.seed))
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found = list[Verdict]()
    for seed in range(options.first, options.first + options.count):
        with torch.no_grad():
            found.append(judge(seed))
        if options.print or not found[-1].is_right:
            print(json.dumps(asdict(found[-1])), flush=True)
        is_last = seed + 1 == options.first + options.count
        if not options.print and (is_last or len(found) % 50 == 0):
            store(found)
    print(json.dumps(summarise(found), indent=1))


def store(found: Sequence[Verdict]) -> None:
    """Write the counts of the seeds so far, beside those of runs of other seeds."""
    path = RESULTS / "random_graphs.json"
    known = json.loads(path.read_text())["runs"] if path.exists() else []
    first, last = found[0].seed, found[-1].seed
    runs = [x for x in known if x["seeds"][1] < first or x["seeds"][0] > last]
    runs.append({
        "seeds": [first, last], "machine": describe_machine(),
        "versions": {"torch": torch.__version__}, **summarise(found),
    })  # fmt: skip
    runs.sort(key=lambda x: x["seeds"])
    totals = sum((Counter(x["outcomes"]) for x in runs), Counter[str]())
    stored = {
        "command": "python benchmarks/random_graphs.py",
        "machine": describe_machine(),
        "modules": sum(x["modules"] for x in runs),
        "overflow_in_plain_fp16": sum(x["overflow_in_plain_fp16"] for x in runs),
        "outcomes": dict(totals.most_common()),
        "wrong": sum(len(x["wrong"]) for x in runs),
        "runs": runs,
    }
    path.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
