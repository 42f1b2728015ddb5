"""What Stopdown answers to fixed questions, as data: the same before and after the code was changed.

Exponents of every class of `rescale.py`, made to overflow in each way, from measured ranges and from
bounds; the findings of `check` on planted faults and on healthy pipelines; what `explain` says of each
report; the predicted peak of every strategy on tiny pipelines. Nothing is run in 16 bits, so no
answer depends on the processor's fp16; two processors may still round a measured range differently.

    python benchmarks/answers.py collect before.json
    python benchmarks/answers.py collect after.json --only exponents check
    python benchmarks/answers.py compare before.json after.json    # exit code 1 when they differ
"""

# ruff: noqa: E402 (the path is set above them)
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import explain
from rescale import measure_calls, overflow, prepare_class

from models.check_faults import FAULTS, call_of, check_fault, load_healthy, plant_fault
from models.rescaling_models import EXAMPLES, WAYS
from stopdown.dtype_rules.check import check
from stopdown.errors import StopdownError
from stopdown.memory.forecast import predict_all
from stopdown.pipelines.skeletons import copy_skeleton
from stopdown.records import Scaling
from stopdown.scaling.folds import read_headroom
from stopdown.scaling.search import find_scaling, scale_calls
from stopdown.testing import PIPELINE_NAMES, make_pipeline

Answers = Iterator[tuple[str, Any]]
"""Question and answer, one at a time."""

EARLIER_NAMES = {"fp32-island": "fp32-module", '"island-': '"fp32-module-'}
"""What answers called kinds and faults before: collections of then are compared under today's names."""

HEALTHY = (torch.float32, torch.bfloat16)
STORED_DIGITS = 4
"""Headroom is stored with so many decimals, in bits."""


def ask_exponents() -> Answers:
    """Every class and way of the table: from measured ranges, plainly and with an fp32 residual."""
    for name in EXAMPLES:
        prepared = prepare_class(name)
        for way in EXAMPLES[name].ways:
            module = prepared.module
            module.load_state_dict(prepared.before)
            _, measured = overflow(module, prepared.calls, prepared.plain, WAYS[way])
            yield f"{name} / {way}", attempt(lambda m=module, x=measured: find_scaling(m, x))
            if prepared.stream is not None:
                ranges = measure_calls(module, prepared.calls, prepared.streamed)
                found = attempt(lambda m=module, x=ranges, s=prepared.stream: find_scaling(m, x, s))
                yield f"{name} / {way} / fp32 residual", found


def ask_bounds() -> Answers:
    """Every class in its first way: from bounds alone."""
    for name, example in EXAMPLES.items():
        prepared = prepare_class(name)
        module, calls = prepared.module, [[call] for call in prepared.calls]
        overflow(module, prepared.calls, prepared.plain, WAYS[next(iter(example.ways))])
        find = partial(scale_calls, ranges="bound", verify=False)
        yield name, attempt(lambda m=module, c=calls, f=find: f(m, c))


def attempt(find: Callable[[], Scaling]) -> Any:
    """A scaling as data; the first line of the error where there is none."""
    try:
        return describe_scaling(find())
    except (StopdownError, ValueError) as error:
        return {"error": str(error).splitlines()[0]}


def describe_scaling(scaling: Scaling) -> dict[str, Any]:
    """All of a scaling that decides what a module computes, and what it promises."""
    return {
        "exponents": dict(sorted(scaling.exponents.items())),
        "eps": dict(sorted(scaling.eps.items())),
        "multiplies": dict(sorted(scaling.multiplies.items())),
        "fp32": sorted(scaling.fp32_modules),
        "outputs": {str(key): value for key, value in sorted(scaling.outputs.items())},
        "pinned": sorted(scaling.pinned),
        "headroom_bits": round(read_headroom(scaling), STORED_DIGITS),
        "certified": scaling.certified,
        "values": scaling.values,
        "uncertain": len(scaling.uncertain),
        "limits": dict(sorted(scaling.limits.items())),
    }


def ask_check() -> Answers:
    """The findings on each planted fault, and on the same pipelines healthy."""
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            found = check_fault(fault, plant_fault(fault, Path(folder) / "model"))
        yield fault.name, sorted(f"{x.kind} at {x.module_path}" for x in found)
    for name in PIPELINE_NAMES:
        for dtype in HEALTHY:
            pipe = load_healthy(name, dtype)
            found = check(pipe, device="a100", arguments=call_of(name))
            yield f"{name} {dtype}", sorted(f"{x.kind} at {x.module_path}" for x in found)


def ask_explain() -> Answers:
    """What each report is put down to, with its facts and by its message alone."""
    cases = explain.read_cases()
    for case in cases:
        yield case.report, explain.list_answers(f"{case.shown}\n{case.facts}")
    for message in [*explain.collect_messages(cases), *explain.read_unrelated()]:
        yield message, explain.list_answers(message)


def ask_memory() -> Answers:
    """The predicted peak of every strategy, in bytes, for two steps of each tiny pipeline."""
    for name in PIPELINE_NAMES:
        fit = predict_all(copy_skeleton(make_pipeline(name)), call_of(name), steps=2)
        yield name, {one.strategy.name: one.peak_bytes for one in fit.predictions}


QUESTIONS: dict[str, Callable[[], Answers]] = {
    "explain": ask_explain,
    "memory": ask_memory,
    "check": ask_check,
    "exponents": ask_exponents,
    "bounds": ask_bounds,
}


def collect(path: Path, only: list[str]) -> None:
    """Ask, and store after each answer, so that an interrupted collection goes on."""
    stored: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for subject in only:
        answers = stored[subject] = {}
        for question, answer in QUESTIONS[subject]():
            answers[question] = answer
            path.write_text(json.dumps(stored, indent=1) + "\n")
            print(f"{subject}: {question}", flush=True)


def read_answers(path: Path) -> dict[str, Any]:
    """A collection, under today's names."""
    text = path.read_text()
    for before, today in EARLIER_NAMES.items():
        text = text.replace(before, today)
    return dict(json.loads(text))


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The differences, one line each; subjects that only one of the two was asked are left out."""
    lines: list[str] = []
    for subject in [x for x in before if x in after]:
        old, new = before[subject], after[subject]
        for question in sorted({*old, *new}):
            lines += _differ(f"{subject}: {question}", old.get(question), new.get(question))
    return lines


def _differ(place: str, old: Any, new: Any) -> list[str]:
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [x for key in keys for x in _differ(f"{place}: {key}", old.get(key), new.get(key))]
    return [f"{place}: {json.dumps(old)} is now {json.dumps(new)}"]


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("path", type=Path)
    collecting.add_argument("--only", nargs="*", choices=QUESTIONS, default=list(QUESTIONS))
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "collect":
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        collect(options.path, options.only)
        return 0
    lines = compare(read_answers(options.before), read_answers(options.after))
    print("\n".join(lines) or "Every answer is the same.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
