"""Every way to load a model combined with every change to it: verdicts, and errors next to bf16's.

python benchmarks/ways_in.py                  # all cells (an hour)
python benchmarks/ways_in.py --models sdxl --ways fp16 guard
python benchmarks/ways_in.py --changes "foreign hook" "replaced class"
python benchmarks/ways_in.py --missing        # cells that this code has not stored: it goes on
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from revision import describe_code  # noqa: E402

from models.small_ways import fill_small, list_small_cells  # noqa: E402 (the path is set above)
from models.ways_in import CHANGES, COMMANDS, MODELS, WAYS, Outcome, Table, list_cells  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "ways_in.json"
PAGE = RESULTS.with_suffix(".md")


def main() -> None:
    """Fill the cells that are asked for, and store each with those that were stored before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=[*WAYS, *COMMANDS], choices=[*WAYS, *COMMANDS])
    parser.add_argument("--changes", nargs="+", default=list(CHANGES), choices=list(CHANGES))
    parser.add_argument("--missing", action="store_true", help="leave out cells of this code")
    options = parser.parse_args()
    stored: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    stored |= {"machine": describe_machine(), "command": "python benchmarks/ways_in.py"}
    cells: dict[str, Any] = stored.setdefault("cells", {})
    warnings.simplefilter("ignore")
    done = {x for x, cell in cells.items() if options.missing and cell["code"] == describe_code()}
    for cell in list_small_cells() if options.changes == list(CHANGES) else ():
        key = f"{cell.end} ({cell.order}) | {cell.way}"
        if key not in done:
            _store(stored, key, fill_small(cell))
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder))
        for name, way, change in list_cells():
            key = f"{name}: {change} | {way}"
            is_asked = name in options.models and way in options.ways and change in options.changes
            if is_asked and key not in done:
                _store(stored, key, table.fill(name, way, change))


def _store(stored: dict[str, Any], key: str, outcome: Outcome) -> None:
    stored["cells"][key] = {**asdict(outcome), "code": describe_code()}
    stored["counts"] = dict(Counter(x["verdict"] for x in stored["cells"].values()))
    print(f"{key}: {outcome.verdict} {outcome.error:.3g} (bf16 {outcome.bf16:.3g})", flush=True)
    RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(_draw(stored))


def _draw(stored: dict[str, Any]) -> str:
    """Write a table: a row for each change, a column for each way, errors in per cent."""
    rows: dict[str, dict[str, Any]] = {}
    for key, cell in stored["cells"].items():
        change, _, way = key.rpartition(" | ")
        rows.setdefault(change, {})[way] = cell
    ways = [*WAYS, *COMMANDS]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(stored["counts"].items()))
    lines = ["# Every way in beside every change", "", f"`{stored['command']}`: {counts}.", ""]
    lines += [
        "Errors in per cent of fp32's result; *r*: repaired and reported; *refused*: in one sentence.",
        "",
        "| change | bf16 | " + " | ".join(ways) + " |",
        "|---|" + "--:|" * (len(ways) + 1),
    ]
    for change, found in rows.items():
        bf16 = max(x["bf16"] for x in found.values())
        cells = [_describe(found.get(way)) for way in ways]
        lines.append(f"| {change} | {100 * bf16:.2g} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _describe(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    if cell["verdict"] == "refused":
        return "refused"
    mark = {"right": "", "repaired": " *r*", "wrong": " **wrong**"}[cell["verdict"]]
    return f"{100 * cell['error']:.2g}{mark}"


if __name__ == "__main__":
    main()
