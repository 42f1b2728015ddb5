"""Calls whose arguments differ from those that exponents were found for: errors against fp32, and bf16's.

Tiny models of 24 classes overflow in fp16. Exponents are found for one call: in a plan, as a repair of the
guard, and as both. Then each optional input and output that the class takes is given by itself (`--table`),
or any of them at once, with other values, sizes, batches and dtypes (`--draws`). What was found is stored
model by model, with the commit of the code; models that are not named keep what was stored, and `--missing`
leaves out those that are.

    python benchmarks/signatures.py                       # both (an hour)
    python benchmarks/signatures.py --table --models T5 Flux
    python benchmarks/signatures.py --draws 2000 --missing
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from revision import describe_code  # noqa: E402

from models.signature_cases import MODELS, MODES, fuzz, run_table  # noqa: E402 (the path is set above)
from stopdown.devices.environment import describe_machine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "signatures.json"
PAGE = RESULTS.with_suffix(".md")


def main() -> None:
    """Run what is asked for, and store it with what was stored before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--draws", type=int, default=0)
    parser.add_argument("--missing", action="store_true", help="leave out models that are stored")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    options = parser.parse_args()
    is_all = not (options.table or options.draws)
    models = "" if options.models is MODELS else f" --models {shlex.join(options.models)}"
    report: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    report["machine"] = describe_machine()
    warnings.simplefilter("ignore")
    if options.table or is_all:
        command = "python benchmarks/signatures.py --table"  # rows of other models are kept
        known = report.get("table", {}).get("models", {})
        if not options.missing:
            known = {name: rows for name, rows in known.items() if name not in options.models}
        report["table"] = {"command": command, "models": known}
        _fill_table(known, [x for x in options.models if x not in known], report)
    if options.draws or is_all:
        count = options.draws or 2000
        command = f"python benchmarks/signatures.py --draws {count}{models}"
        known = report.get("draws", {}) if options.missing else {}
        report["draws"] = {"models": {}, "wrong": [], "total": {}, **known, "command": command}
        report["draws"]["code"] = describe_code()
        _draw(report["draws"], options.models, count, report)


def _fill_table(table: dict[str, Any], models: list[str], report: dict[str, Any]) -> None:
    for name in models:
        begun = time.perf_counter()
        rows = run_table(name)
        if rows is not None:
            table[name] = {**rows, "code": describe_code()}
        print(f"{name}: {json.dumps(rows)} {time.perf_counter() - begun:.0f} s", flush=True)
        _store(report)


def _draw(draws: dict[str, Any], models: list[str], count: int, report: dict[str, Any]) -> None:
    total = Counter(draws["total"])
    for number, name in enumerate(models):
        if name in draws["models"]:
            continue
        begun = time.perf_counter()
        found, wrong = fuzz(name, len(range(number, count, len(models))))
        draws["models"][name] = dict(found)
        draws["wrong"] += wrong
        total.update(found)
        draws["total"] = dict(total)
        seconds = time.perf_counter() - begun
        print(f"{name}: {dict(found)} {wrong} {seconds:.0f} s", flush=True)
        _store(report)
    print(dict(total))


def _store(report: dict[str, Any]) -> None:
    parts = [report[part]["command"] for part in ("table", "draws") if part in report]
    report["command"] = " && ".join(parts)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    lines = [
        "# Calls that exponents were not found for",
        "",
        "Relative error against fp32 of the worst output.",
        "",
        f"| model | argument | bf16 | {' | '.join(MODES)} |",
        f"|---|---|--:|{'--:|' * len(MODES)}",
    ]
    table = report.get("table", {}).get("models", {})
    for name in filter(table.__contains__, MODELS):
        for option, row in table[name].items():
            if option not in ("said", "code"):
                cells = " | ".join(_show(row.get(mode)) for mode in MODES)
                lines.append(f"| {name} | {option} | {_show(row['bf16'])} | {cells} |")
    if "total" in report.get("draws", {}):
        counts = ", ".join(f"{count} {kind}" for kind, count in report["draws"]["total"].items())
        lines += ["", f"Drawn calls (`{report['draws']['command']}`): {counts}."]
    PAGE.write_text("\n".join(lines) + "\n")


def _show(value: float | str | None) -> str:
    return (
        f"{100 * value:.2g} %" if isinstance(value, float) else str(value or "").partition(". ")[0]
    )


if __name__ == "__main__":
    main()
