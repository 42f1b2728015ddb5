"""The fault matrix: every kind of fault, in every component, at every moment, under every scheduler.

Each case of `models/fault_cases.py` runs on a tiny pipeline of real classes in fp16: once guarded, and
once with the detector switched off. Where exponents are what mends a fault, the error of the pixels
against fp32 stands beside that of the same pipeline planned in advance: its exponents found from all
calls of a run in fp32, and in force from the first call on.

    python benchmarks/fault_matrix.py                # everything (tens of minutes)
    python benchmarks/fault_matrix.py --only wan     # cases whose name a pattern finds; others are kept
    python benchmarks/fault_matrix.py --resume       # only cases that are not stored yet
    python benchmarks/fault_matrix.py --table        # only write the table anew
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from models.fault_cases import (  # noqa: E402 (the path is set above)
    NOISE_LEVEL,
    STEPS,
    Case,
    check,
    list_all,
    run_case,
)
from models.injected_faults import inject  # noqa: E402
from models.pipeline_calls import call_pipeline  # noqa: E402
from stopdown import testing  # noqa: E402
from stopdown.component_call_names import name_component  # noqa: E402
from stopdown.component_calls.components import find_callees  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.module_calls.call_interception import find_module  # noqa: E402
from stopdown.pipelines.tiny_pipelines import overflow_  # noqa: E402
from stopdown.plans.call_recorder import record_run  # noqa: E402
from stopdown.plans.exponents import scale_component  # noqa: E402
from stopdown.records import Scaling  # noqa: E402
from stopdown.scaling.folding.folds import cast_, fold_scaling  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
JSON_FILE, TABLE_FILE = RESULTS / "fault_matrix.json", RESULTS / "fault_matrix.md"

MOST_BEYOND_PLANNED = 1.1
"""Factor by which a repaired run may be further from fp32 than one that was planned in advance, where
fp16 itself is beyond `NOISE_LEVEL`: a tiny Wan whose encoder overflows is at 0.0020 or 0.0057, by the
processor's kernels."""


def measure_case(case: Case) -> dict[str, Any]:
    """One row: what the guard did, and whether the same check fails with the detector off."""
    begun = time.perf_counter()
    outcome = run_case(case)
    guarded_s = time.perf_counter() - begun
    repair = next(iter(outcome.repairs), None)
    switched_off = run_case(case, watching=False)
    is_mended = case.lasting and case.kind in ("range", "clamp")
    planned = finite(measure_planned(case)) if is_mended else None
    noise = max(NOISE_LEVEL, MOST_BEYOND_PLANNED * (planned or 0.0))
    row: dict[str, Any] = {
        "case": str(case),
        "pipeline": case.pipeline,
        "component": case.component,
        "kind": case.kind,
        "moment": case.moment,
        "scheduler": case.scheduler,
        "lasting": case.lasting,
        "passes": passes(case, outcome, noise),
        "passes_switched_off": passes(case, switched_off, noise),
        "faults": len(outcome.repairs),
        "rmse": finite(outcome.rmse),
        "rmse_switched_off": finite(switched_off.rmse),
        "is_equal": outcome.is_equal,
        "guarded_s": round(guarded_s, 2),
    }
    if repair is not None:
        row |= {
            "module_path": repair.module_path,
            "action": repair.action,
            "replays": sum(found.replays for found in outcome.repairs),
            "tried": list(repair.tried),
        }
    if is_mended:
        row["rmse_planned"] = planned
    return row


def finite(value: float) -> float | None:
    """The value for JSON, which has no infinity."""
    return value if np.isfinite(value) else None


def passes(case: Case, outcome: Any, noise: float) -> bool:
    """Whether what came of a case is what must."""
    try:
        check(case, outcome, noise)
    except (AssertionError, ValueError):
        return False
    return True


def measure_planned(case: Case) -> float:
    """RMSE to fp32 of the same fault from the first call on, with exponents that were found before."""
    key = (case.pipeline, case.component, case.kind)
    if key not in _PLANNED:
        _PLANNED[key] = _measure_planned(case)
    return _PLANNED[key]


_PLANNED: dict[tuple[str, str, str], float] = {}


def _measure_planned(case: Case) -> float:
    reference, scaling = _plan_case(case)
    pipe, module = _open_case(case, torch.float16)  # loaded as the repaired one was
    with _faulty_from_start(pipe, module, case):
        rescaling = fold_scaling(module, scaling)
        cast_(module, torch.float16, rescaling)
        pixels = call_pipeline(pipe, case.pipeline, steps=STEPS)
    return float(np.sqrt(np.mean((pixels - reference) ** 2)))


def _plan_case(case: Case) -> tuple[np.ndarray[Any, Any], Scaling]:
    """The pixels of fp32, and exponents from all calls of a run there."""
    pipe, module = _open_case(case, torch.float32)
    with _faulty_from_start(pipe, module, case):
        reference = call_pipeline(pipe, case.pipeline, steps=STEPS)
        recorded = record_run(pipe, lambda: call_pipeline(pipe, case.pipeline, steps=STEPS))
        calls = recorded[name_component(case.component)]
        return reference, scale_component(module, calls)[0]


def _open_case(case: Case, dtype: torch.dtype) -> tuple[Any, torch.nn.Module]:
    """A pipeline that has run before, and the component at fault."""
    pipe = testing.make_pipeline(case.pipeline, dtype=dtype)
    call_pipeline(pipe, case.pipeline, steps=STEPS)
    callees = find_callees(pipe)
    return pipe, next(find_module(x) for x in callees if x.name == case.component)


def _faulty_from_start(pipe: Any, module: torch.nn.Module, case: Case) -> Any:
    if case.kind == "range":
        overflow_(module)
        return contextlib.nullcontext()
    return inject(pipe, case.component, step=0, kind=case.kind, lasting=True)


def load_rows() -> dict[str, dict[str, Any]]:
    """The rows that are stored, by the name of their case."""
    if not JSON_FILE.exists():
        return {}
    rows = json.loads(JSON_FILE.read_text(encoding="utf-8"))["rows"]
    return {row["case"]: row for row in rows}


def store_rows(rows: dict[str, dict[str, Any]]) -> None:
    """Write rows and table."""
    kept = [rows[str(case)] for case in list_all() if str(case) in rows]
    stored = {
        "command": "python benchmarks/fault_matrix.py",
        "machine": describe_machine(),
        "steps": STEPS,
        "rows": kept,
    }
    JSON_FILE.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    TABLE_FILE.write_text(format_tables(kept), encoding="utf-8")


def format_tables(rows: list[dict[str, Any]]) -> str:
    """The matrix by kind and component, by scheduler, and the errors of what exponents mended."""
    good = sum(row["passes"] for row in rows)
    off = sum(not row["passes_switched_off"] for row in rows)
    once = sum(row["faults"] > 0 and row["replays"] == row["faults"] for row in rows)
    twice = sum(row["faults"] > 1 for row in rows)
    lines = [
        "# Fault matrix",
        "",
        f"`python benchmarks/fault_matrix.py`, CPU, tiny pipelines of real classes, {STEPS} steps, fp16.",
        f"{len(rows)} of the {len(list_all())} cases of `list_all` were run: in {good} the fault is found",
        "at the right module path and step and repaired with the right pixels; in",
        f"{once} one call is run again for each fault (in {twice} larger values of a later call, or of an",
        f"autoencoder's other direction, are a second fault); with the detector off {off} fail the same",
        "check. Each cell is passed of tried.",
        "",
        *format_grid(rows, "kind", lambda row: row["component"].removesuffix("_2")),
        "",
        *format_grid(rows, "pipeline", lambda row: row["kind"]),
        "",
        *format_grid(rows, "scheduler", lambda row: row["moment"]),
        "",
        *format_errors(rows),
    ]
    failed = [row for row in rows if not row["passes"]]
    if failed:
        lines += ["", "Not as it should be:", "", *map(describe_failure, failed)]
    return "\n".join(lines) + "\n"


def describe_failure(row: dict[str, Any]) -> str:
    """A line about a case that fails."""
    place, replays = row.get("module_path", "-"), row.get("replays", 0)
    did = f"{row.get('action', 'nothing')} at {place}, {replays} replays"
    return f"- {row['case']}: {did}, RMSE {row['rmse']}. {' '.join(row.get('tried', []))}"


def format_grid(
    rows: list[dict[str, Any]], first: str, second: Callable[[dict[str, Any]], str]
) -> Iterator[str]:
    """A table of passed of tried over two properties of a row."""
    columns = sorted({second(row) for row in rows})
    yield f"| {first} | {' | '.join(columns)} |"
    yield "|---" + "|--:" * len(columns) + "|"
    for name in dict.fromkeys(row[first] for row in rows):
        cells = []
        for column in columns:
            found = [row["passes"] for row in rows if row[first] == name and second(row) == column]
            cells.append(f"{sum(found)} of {len(found)}" if found else "")
        yield f"| {name or 'its own'} | {' | '.join(cells)} |"


def format_errors(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Errors of repaired runs beside those of runs that were planned in advance."""
    mended = [row for row in rows if row.get("rmse_planned") and row["rmse"]]
    if not mended:
        return
    ratios = [row["rmse"] / row["rmse_planned"] for row in mended]
    yield "RMSE of the pixels to those of fp32, repaired and planned in advance, of faults of range that"
    yield f"stay. Median of repaired : planned {statistics.median(ratios):.2f}, largest {max(ratios):.2f}."
    yield "A plan is in force from the first step on. Where the fault begins later, the steps before it are"
    yield "plain fp16 in the repaired run, whose rounding differs."
    yield ""
    yield "| pipeline | component | kind | moment | action | repaired | planned | ratio | seconds |"
    yield "|---|---|---|---|---|--:|--:|--:|--:|"
    for row, ratio in zip(mended, ratios, strict=True):
        yield (
            f"| {row['pipeline']} | {row['component']} | {row['kind']} | {row['moment']} | "
            f"{row.get('action', '')} | {row['rmse']:.5f} | {row['rmse_planned']:.5f} | {ratio:.2f} | "
            f"{row['guarded_s']:.1f} |"
        )


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = load_rows()
    chosen = () if options.table else [c for c in list_all() if re.search(options.only, str(c))]
    chosen = [case for case in chosen if not (options.resume and str(case) in rows)]
    for number, case in enumerate(chosen):
        try:
            row = rows[str(case)] = measure_case(case)
        except Exception as error:  # one case that cannot be measured does not end the others
            print(number + 1, len(chosen), case, f"not measured: {error}"[:300], flush=True)
            continue
        print(
            number + 1, len(chosen), case, row["passes"], not row["passes_switched_off"], flush=True
        )
        if number % 20 == 19:
            store_rows(rows)
    store_rows(rows)


if __name__ == "__main__":
    main()
