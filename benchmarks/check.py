"""Planted faults: what `check` finds and when, next to Diffusers, Accelerate, PyTorch and Transformers.

The faults are those of `models/check_faults.py`. Each is checked without weights where they are not its
cause; then each peer gets the same pipeline with weights and says what it says:

- Diffusers: the pipeline is run for two steps;
- Accelerate: the same with its offloading around every component;
- PyTorch: FakeTensorMode alone around every component, inside of Stopdown's dry run;
- Transformers: the same run under its DebugUnderflowOverflow.

Healthy pipelines are checked beside them, and three full-size models from their configs alone, each in
a process of its own.

    python benchmarks/check.py
    python benchmarks/check.py --full-size-only
"""

# ruff: noqa: E402 (the path is set above them)
from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
from full_size_configs import CALLS, MODELS, write_configs

from models.check_faults import (
    FAULTS,
    Fault,
    call_of,
    check_fault,
    load_healthy,
    plant_fault,
    plant_stored,
)
from stopdown.component_calls.components import find_components
from stopdown.devices.environment import describe_machine
from stopdown.dtype_rules.check import check, find_weightless_source, inspect_pipeline
from stopdown.number_formats import FORMATS
from stopdown.pipelines.dry_run import dry_run, make_arguments
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.skeletons import copy_skeleton
from stopdown.testing import PIPELINE_NAMES

RESULTS = ROOT / "benchmarks" / "results"
PEERS = ("Diffusers", "Accelerate", "PyTorch", "Transformers")
Row = dict[str, Any]


def run_fault(fault: Fault) -> Row:
    """One fault: what is found, how long it takes, and what the peers say."""
    with tempfile.TemporaryDirectory() as folder:
        planted = plant_fault(fault, Path(folder) / "model")
        begun = time.perf_counter()
        found = check_fault(fault, planted)
        elapsed = time.perf_counter() - begun
    wanted = (fault.kind, fault.module_path)
    row: Row = {
        "fault": fault.name,
        "class": fault.group,
        "pipeline": fault.pipeline,
        "device": fault.device,
        "kind": fault.kind,
        "module_path": fault.module_path,
        "found": wanted in [(finding.kind, finding.module_path) for finding in found],
        "others": sorted({f.kind for f in found if (f.kind, f.module_path) != wanted}),
        "elapsed_s": round(elapsed, 2),
        "when": "before loading" if not fault.needs_weights else "after loading",
    }
    for name, ask in ASK.items():
        row[name] = ask_peer(ask, fault)
    return row


class Remarks(logging.Handler):
    """What Diffusers logs about dtypes; a list of modules that is empty says nothing."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if re.search(r"kept in float32: \[[^]]", text):
            self.said.append(" ".join(text.split())[:140])


def ask_peer(ask: Callable[[Any, Fault], str], fault: Fault) -> Row:
    """What a peer says of a fault, and when; for Diffusers also what it logs when a model is cast."""
    remarks, logger = Remarks(), logging.getLogger("diffusers")
    logger.addHandler(remarks)
    try:
        answer = _ask(ask, fault)
    finally:
        logger.removeHandler(remarks)
    if ask is run_plainly and remarks.said and answer["when"] == "never":
        return {"when": "when it is cast", "says": remarks.said[0]}
    return answer


def _ask(ask: Callable[[Any, Fault], str], fault: Fault) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        try:
            pipe = make_live(fault, Path(folder) / "model")
        except Exception as error:
            return {"when": "while loading", "says": shorten(error)}
        try:
            with quiet(), around(fault):
                says = ask(pipe, fault)
        except Exception as error:
            return {"when": "at the first step", "says": shorten(error)}
    return {"when": "never", "says": says}


def make_live(fault: Fault, folder: Path) -> Any:
    """The pipeline of a fault with its weights, as a user has it."""
    if not fault.stored:
        pipe = load_healthy(fault.pipeline, fault.dtype)
        return fault.plant(pipe) or pipe
    if fault.pipeline == "sana":
        raise RuntimeError("not run: the fault is planted into configs only")
    source = find_weightless_source(plant_stored(fault, folder))
    return load_pipeline(source, torch_dtypes=FORMATS[str(fault.precision)].torch_dtype)


def shorten(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:140]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what libraries print; warnings are kept for `run_plainly`."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def around(fault: Fault) -> Any:
    if fault.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=fault.autocast)


def run_plainly(pipe: Any, fault: Fault) -> str:
    """Two steps; what is said when nothing is raised."""
    arguments = {**call_of(fault.pipeline), **dict(fault.arguments)}
    arguments["num_inference_steps"] = 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = pipe(**arguments, generator=torch.Generator().manual_seed(0), output_type="np")
    pixels = np.asarray(output[0], dtype=np.float32)
    said = [str(w.message) for w in caught if "invalid value" in str(w.message)]
    state = "NaN in the result" if np.isnan(pixels).any() else "nothing"
    return f"{state}{'; ' + said[0][:80] if said else ''}"


def run_offloaded(pipe: Any, fault: Fault) -> str:
    from accelerate import cpu_offload

    for module in find_components(pipe).values():
        if not hasattr(module, "_hf_hook"):
            cpu_offload(module, execution_device=torch.device("cpu"))
    return run_plainly(pipe, fault)


def run_fake(pipe: Any, fault: Fault) -> str:
    """Every component under FakeTensorMode, and nobody who listens."""
    skeleton = copy_skeleton(pipe)
    given = {**make_arguments(skeleton), **call_of(fault.pipeline), "num_inference_steps": 2}
    dry_run(skeleton, given)
    return "nothing"


def run_debugged(pipe: Any, fault: Fault) -> str:
    from transformers.debug_utils import DebugUnderflowOverflow

    for module in find_components(pipe).values():
        DebugUnderflowOverflow(module, max_frames_to_save=1)
    return run_plainly(pipe, fault)


ASK: dict[str, Callable[[Any, Fault], str]] = dict(
    zip(PEERS, (run_plainly, run_offloaded, run_fake, run_debugged), strict=True)
)


def run_healthy() -> list[Row]:
    """Healthy pipelines in fp32 and bf16 on devices that have them, and their findings."""
    rows = []
    for name in PIPELINE_NAMES:
        for dtype, device in ((torch.float32, "v100"), (torch.bfloat16, "a100")):
            pipe = load_healthy(name, dtype)
            found = check(pipe, device=device, arguments=call_of(name))
            rows.append(
                {
                    "pipeline": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "device": device,
                    "findings": [f"{f.kind} at {f.module_path}" for f in found],
                }
            )
    return rows


def measure_full_size(name: str) -> Row:
    """One model from its configs: seconds, memory and findings."""
    begun, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        source = find_weightless_source(write_configs(name, Path(folder) / "model"))
        checked = inspect_pipeline(
            source, precision="fp16", device="v100", arguments=CALLS.get(name)
        )
    return {
        "model": name,
        "elapsed_s": round(time.perf_counter() - begun, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "findings": [f"{f.kind} at {f.module_path}" for f in checked.findings],
        "unseen": [reason for _, reason in checked.seen.unseen],
    }


def run_full_size() -> list[Row]:
    rows = []
    for name in MODELS:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def write_results(parts: dict[str, list[Row]]) -> None:
    """The table as JSON and as text; parts that were not run are kept from the last time."""
    path = RESULTS / "check.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    report = {
        **before,
        "command": "python benchmarks/check.py",
        "machine": describe_machine(),
        **parts,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    (RESULTS / "check.md").write_text("\n".join(list_lines(report)) + "\n")


def list_lines(report: dict[str, Any]) -> list[str]:
    faults, healthy = report.get("faults", []), report.get("healthy", [])
    lines = ["# What `check` finds", ""]
    if faults:
        lines += list_faults(faults)
    if healthy:
        clean = sum(not row["findings"] for row in healthy)
        lines += [
            "",
            f"Healthy: {clean} of {len(healthy)} pipelines (nine classes, fp32 for a V100 and bf16 "
            "for an A100) have no finding. Those in fp16 by a plan are in the slow tests.",
        ]
    if report.get("full_size"):
        lines += list_full_size(report["full_size"])
    return lines


def list_faults(rows: list[Row]) -> list[str]:
    found = sum(row["found"] for row in rows)
    early = sum(row["when"] == "before loading" and row["found"] for row in rows)
    pipelines = {row["pipeline"] for row in rows}
    lines = [
        f"{found} of {len(rows)} planted faults in {len(pipelines)} pipelines are found at their "
        f"module path, {early} of them without weights. What the peers say of the same pipelines, with "
        "weights, run on this CPU:",
        "",
        "| who | before loading or running | at the first step | never | fails itself | not run |",
        "|---|--:|--:|--:|--:|--:|",
        f"| `stopdown check` | {found} | | {len(rows) - found} | | |",
    ]
    for peer in PEERS:
        said = [tell_when(row[peer]) for row in rows]
        first = said.count("at the first step")
        # Fake tensors need no run, only somebody who calls the components as the pipeline does.
        early = said.count("while loading") + said.count("when it is cast")
        places = (first, 0) if peer == "PyTorch" else (early, first)
        rest = (said.count(word) for word in ("never", "fails itself", "not run"))
        lines.append(f"| {peer} | {' | '.join(map(str, (*places, *rest)))} |")
    lines += [
        "",
        "`never` is what they say on this CPU, which takes some mixtures that a GPU refuses; where "
        "the result is NaN it says so. Accelerate's hooks move tensors and leave their dtypes alone.",
    ]
    lines += [
        "",
        "| fault | pipeline | for | found as | at | Diffusers | Accelerate | FakeTensor alone | "
        "Transformers' debugger |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [say(row[peer]) for peer in PEERS]
        mark = row["kind"] if row["found"] else f"**missed**: {row['kind']}"
        lines.append(
            f"| {row['fault']} | {row['pipeline']} | {row['device']} | {mark} | `{row['module_path']}` | "
            f"{' | '.join(cells)} |"
        )
    return lines


OWN_CRASHES = ("abs_cpu", "unsupported format string")
"""What the debugger raises about itself: it takes the magnitude of booleans, and formats a tensor."""


def tell_when(answer: Row) -> str:
    """When a peer speaks; `fails itself` when what it raises is not about the fault."""
    says = str(answer["says"])
    if "not run" in says:
        return "not run"
    return "fails itself" if any(crash in says for crash in OWN_CRASHES) else str(answer["when"])


def say(answer: Row) -> str:
    text = str(answer["says"]).replace("|", "/")[:90]
    return f"{tell_when(answer)}: {text}"


def list_full_size(rows: list[Row]) -> list[str]:
    lines = [
        "",
        "## Full size, from configs alone, in fp16 for a V100",
        "",
        "| model | wall | CPU time | memory | findings |",
        "|---|--:|--:|--:|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['elapsed_s']:.0f} s | {row['cpu_s']:.0f} s | "
            f"{row['peak_bytes'] / 2**30:.2f} GiB | {'; '.join(row['findings']) or 'none'} |"
        )
    return [
        *lines,
        "",
        "Importing the libraries is not counted. The machine's two cores were shared with other work: "
        "CPU time is what a free machine needs.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--one", choices=list(MODELS), help="measure one model in this process")
    parser.add_argument("--full-size-only", action="store_true")
    parser.add_argument("--table-only", action="store_true", help="write the text from the JSON")
    parser.add_argument("--only", nargs="*", help="run these faults again and keep the others")
    options = parser.parse_args()
    if options.only:
        report = json.loads((RESULTS / "check.json").read_text())
        again = {fault.name: run_fault(fault) for fault in FAULTS if fault.name in options.only}
        write_results({"faults": [again.get(row["fault"], row) for row in report["faults"]]})
        return
    if options.one:
        print(json.dumps(measure_full_size(options.one)))
        return
    if options.table_only:
        report = json.loads((RESULTS / "check.json").read_text())
        (RESULTS / "check.md").write_text("\n".join(list_lines(report)) + "\n")
        return
    if not options.full_size_only:
        rows = []
        for fault in FAULTS:
            rows.append(run_fault(fault))
            print(json.dumps(rows[-1]), flush=True)
        write_results({"faults": rows, "healthy": run_healthy()})
    write_results({"full_size": run_full_size()})


if __name__ == "__main__":
    main()
