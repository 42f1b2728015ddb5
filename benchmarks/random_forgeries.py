"""Random forgeries of certificates: how many the checker refuses, and whether what it accepts is true.

Certificates that the package makes, of three small modules (`tests/models/certified_nets.py`) and of two
classes of the rescale table, are changed at random by one that knows the grammar. What `stopdown-verify`
accepts is run on inputs within the stated limits, and must hold. A seed always gives the same forgery.

    OMP_NUM_THREADS=1 python benchmarks/random_forgeries.py --workers 2
    OMP_NUM_THREADS=1 python benchmarks/random_forgeries.py --first 2000 --count 500 --print
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from models.certificate_forgeries import CHANGES, Model, Outcome, forge  # noqa: E402 (the path is set above)
from models.certified_nets import NETS, certify_class, certify_net  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402

STORED = ROOT / "benchmarks" / "results" / "random_forgeries.json"
CLASSES = ("T5 gated", "CLIP text")
"""Of every five forgeries one is of these, whose certificates are longer."""
VERDICTS = ("refused", "true", "false")


def list_rules(model: Model) -> Counter[str]:
    graphs = [g for x in model.certificate["components"] for g in x["graphs"]]
    return Counter(n["rule"] for g in graphs for n in g["nodes"])


def summarise(found: Sequence[Outcome], models: dict[str, Model]) -> dict[str, Any]:
    """Counts by what was changed first and by the certificate, and of which rules the accepted ones are."""
    changes = {kind: Counter(x.verdict for x in found if x.changes[0] == kind) for kind in CHANGES}
    rules = Counter[str]()
    for x in found:
        rules.update(x.rules)
    return {
        "forgeries": len(found),
        **{verdict: sum(x.verdict == verdict for x in found) for verdict in VERDICTS},
        "by_change": {kind: {v: counts[v] for v in VERDICTS} for kind, counts in changes.items()},
        "by_certificate": {
            name: {v: sum((x.model, x.verdict) == (name, v) for x in found) for v in VERDICTS}
            for name in models
        },
        "values_of_certificates": dict(
            sorted(sum(map(list_rules, models.values()), Counter()).items())
        ),
        "values_of_accepted": dict(sorted(rules.items())),
        "false_ones": [{"seed": x.seed, "why": x.why} for x in found if x.verdict == "false"],
    }


def make_models(place: Path) -> dict[str, Model]:
    """What is forged: the small modules, then the classes."""
    made = {name: certify_net(name, place / name) for name in NETS}
    return made | {name: certify_class(name, place / name) for name in CLASSES}


def run_part(seeds: Sequence[int]) -> tuple[list[Outcome], float]:
    """Forgeries of some seeds, and the processor seconds that they took."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    small, long, found = [*NETS], [*CLASSES], []
    with tempfile.TemporaryDirectory() as name:
        place, begun = Path(name), time.process_time()
        models = make_models(place)
        for seed in seeds:
            names = long if seed % 5 == 4 else small
            found.append(forge(models[names[seed // 5 % len(names)]], seed, place / "forged"))
            if found[-1].verdict == "false":
                print(found[-1], flush=True)
    return found, time.process_time() - begun


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--print", action="store_true", help="store nothing")
    options = parser.parse_args()
    last = options.first + options.count - 1
    parts = [range(options.first + k, last + 1, options.workers) for k in range(options.workers)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        done = pool.map(run_part, parts)
    found = sorted((x for part, _ in done for x in part), key=lambda x: x.seed)
    with tempfile.TemporaryDirectory() as name:
        made = summarise(found, make_models(Path(name)))
    print(json.dumps(made, indent=1))
    if not options.print:
        stored = {
            "command": "python benchmarks/random_forgeries.py", "machine": describe_machine(),
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "seeds": [options.first, last], "processor_s": round(sum(x for _, x in done)), **made,
        }  # fmt: skip
        STORED.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
