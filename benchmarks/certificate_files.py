"""Certificate files: what they cover, and what writing and checking them costs.

`tiny` plans every tiny pipeline as it is with an fp32 residual stream, and made to overflow with its stream
as it is, and writes and checks each certificate. `classes` does that with each class of the rescale table,
made to overflow and scaled from bounds. `full` takes the checkpoints of `full_size_runs.py`, one at a time,
from a temporary folder. The checker is a process of its own, without torch (of `classes` a function).
Changes of certificates are those of `random_forgeries.py`.

    python benchmarks/certificate_files.py tiny
    python benchmarks/certificate_files.py classes
    python benchmarks/certificate_files.py full CogVideoX-5B
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import stopdown_verify  # noqa: E402 (the path is set above)

RESULTS = ROOT / "benchmarks" / "results"
STORED = RESULTS / "certificate_files.json"
CHECKPOINTS = ("CogVideoX-2B", "CogVideoX-5B", "T5-XXL", "CogView3-Plus-3B", "Z-Image", "SVD-XT")


def check(certificate: Path, folder: Path) -> dict[str, Any]:
    """Run the checker as a program: its output, seconds, and peaks of its memory in bytes.

    `peak_bytes` counts pages of the weights' files, which the system can evict; `own_bytes` doesn't.
    """
    command = [sys.executable, "-m", "stopdown_verify", str(certificate), "--weights", str(folder)]
    with tempfile.TemporaryFile() as output:
        begun, own = time.perf_counter(), 0
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while True:
            done, _, usage = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            own = max(own, _read_own_bytes(process.pid))
            time.sleep(0.02)
        output.seek(0)
        lines = output.read().decode().splitlines()
    return {
        "lines": lines,
        "check_s": time.perf_counter() - begun,
        "check_cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "own_bytes": own,
    }


def _read_own_bytes(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:  # it has ended
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(found[0]) * 1024 if found else 0


def certify(folder: Path, path: Path, residual: str, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Plan a folder, write its certificate and check it; one row."""
    from stopdown.plans.certificate_files import write_certificate
    from stopdown.plans.certified import Scope, certify_plan
    from stopdown.scaling.trials.traced_calls import TracedCalls
    from stopdown.sources.sources import resolve_source

    source = resolve_source(folder)
    spent, begun = time.process_time(), time.perf_counter()
    traced = dict[str, TracedCalls]()
    plan = certify_plan(source, residual=residual, scope=Scope(only), traced=traced)
    planned, planned_at = time.process_time(), time.perf_counter()
    made = write_certificate(plan, source, path, traced)
    written, written_at = time.process_time(), time.perf_counter()
    row = check(path, folder)
    return {
        **row,
        "plan_s": planned_at - begun,
        "write_s": written_at - planned_at,
        "plan_cpu_s": planned - spent,
        "write_cpu_s": written - planned,
        "file_bytes": path.stat().st_size,
        "left": made["left"],
        "components": {x["component"]: _count(x, row["lines"]) for x in made["components"]},
        "planned": {x.component: [x.in_force.bounded, x.in_force.values] for x in plan.components},
    }


def _count(stated: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    """The share of one component, and of what rules its values are."""
    line = next(x for x in [*lines, ""] if x.startswith(f"{stated['component']}: ") or not x)
    words = line.split()
    rules: dict[str, int] = {}
    for graph in stated["graphs"]:
        for node in graph["nodes"]:
            rules[node["rule"]] = rules.get(node["rule"], 0) + 1
    covered, values = (int(words[1]), int(words[3])) if len(words) > 3 else (0, 0)
    return {"covered": covered, "values": values, "uncovered": stated["uncovered"], "rules": rules}


def run_tiny(names: list[str]) -> None:
    """Every tiny pipeline, as it is and made to overflow."""
    from stopdown.testing import PIPELINE_NAMES, save_pipeline

    for name in names or PIPELINE_NAMES:
        large = "unet" if name in ("svd", "sd", "sdxl") else "transformer"
        for overflow, residual in ((None, "fp32"), (large, "native")):
            with tempfile.TemporaryDirectory() as place:
                folder = save_pipeline(name, Path(place) / name, overflow=overflow)
                row = certify(folder, Path(place) / "certificate.json", residual)
                row |= {"name": name, "overflow": overflow or "", "residual": residual}
                store("tiny", row, ("name", "overflow", "residual"))
                print(
                    json.dumps({k: row[k] for k in ("name", "components", "left")})[:600],
                    flush=True,
                )


def run_classes(names: list[str]) -> None:
    """Every class of the rescale table."""
    from models.rescaling_models import EXAMPLES
    from stopdown.errors import StopdownError

    for name in names or EXAMPLES:
        with tempfile.TemporaryDirectory() as place:
            try:
                row = check_class(name, Path(place))
            except (StopdownError, stopdown_verify.Refused, ValueError, RuntimeError) as error:
                row = {"failure": f"{type(error).__name__}: {error}"[:300]}
        store("classes", {"name": name, **row}, ("name",))
        print(name, json.dumps(row)[:400], flush=True)


def check_class(name: str, folder: Path) -> dict[str, Any]:
    """One class, made to overflow and scaled from bounds, its certificate written and checked."""
    from rescale import overflow

    from models.certified_nets import certify_call
    from models.rescaling_models import EXAMPLES, WAYS, make_example, measure_call
    from stopdown import rescale_

    module, calls = make_example(name)
    overflow(module, calls, [measure_call(*x) for x in calls], WAYS[EXAMPLES[name].ways[0]])
    rescaling = rescale_(module, calls=calls, ranges="bound")
    rescaling.undo()
    (stated,) = certify_call(module, calls, folder, rescaling.scaling)["components"]
    spent = time.process_time()
    values, covered, rest = stopdown_verify.check_component(stated, folder)
    return {
        "covered": covered,
        "values": values,
        "uncovered": rest,
        "planned": [rescaling.scaling.bounded, rescaling.scaling.values],
        "check_cpu_s": time.process_time() - spent,
    }


POOL = 16_777_259
"""Values that weights of full size are taken from, beginning anywhere. A prime: no row is repeated."""


def write_model(name: str, folder: Path) -> int:
    """Write a checkpoint of `full_size_runs`, its weights taken from a pool: drawing each takes hours."""
    import full_size_runs
    import torch

    class Pooled(full_size_runs.Draw):
        pool = torch.empty(POOL).normal_(generator=torch.Generator().manual_seed(0))

        def __call__(self, name: str, shape: torch.Size) -> torch.Tensor:
            if len(shape) < 2:
                return super().__call__(name, shape)
            start = int(torch.randint(POOL, (1,), generator=self._generator))
            count = shape.numel()
            turned = self.pool.roll(-start)
            flat = turned.repeat(-(-count // POOL))[:count] if count > POOL else turned[:count]
            tensor = flat.reshape(shape) * (shape.numel() / shape[0]) ** -0.5
            rows = torch.randn(shape[0], generator=self._generator).mul_(0.5).sub_(0.125).exp_()
            tensor *= rows.view(-1, *[1] * (len(shape) - 1))
            return self._enlarge(name, tensor).bfloat16()

    full_size_runs.Draw = Pooled
    return full_size_runs.write_folder(name, folder)


def run_full(names: list[str], residuals: list[str]) -> None:
    """The checkpoints of full size, one at a time."""
    for name in names or CHECKPOINTS:
        place = Path(tempfile.mkdtemp(prefix="certificate-"))
        try:
            size = write_model(name, place / "model")
            print(name, "written", flush=True)
            for residual in residuals:
                row = certify(place / "model", place / "certificate.json", residual)
                row |= {"name": name, "residual": residual, "weight_bytes": size}
                store("full", row, ("name", "residual"))
                print(
                    name, residual, row["components"], row["left"], row["check_cpu_s"], flush=True
                )
        finally:
            shutil.rmtree(place)


def store(section: str, row: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Put a row in the place of the one with the same keys, and write the tables."""
    from stopdown.devices.environment import describe_machine

    report = json.loads(STORED.read_text()) if STORED.is_file() else {}
    rows = [x for x in report.get(section, []) if any(x[k] != row[k] for k in keys)]
    report[section] = [*rows, row]
    report["command"] = "python benchmarks/certificate_files.py tiny"
    report["machine"] = describe_machine()
    STORED.write_text(json.dumps(report, indent=1) + "\n")
    write_tables(report)


def write_tables(report: dict[str, Any]) -> None:
    """The results as Markdown."""
    lines = ["# Certificate files", "",
             "What `stopdown plan --certificate` writes and `stopdown-verify` checks. *Covered*: fp16",
             "values and weights that the checker shows to stay below 65504, of all; *planned*: the same",
             "as the plan counts them, value by value and block by block. Seconds are of the processor,",
             "beside other work. The checker is a process of its own, without torch; its peak of memory",
             "includes pages of the weights' files, which the system can evict.", ""]  # fmt: skip
    for section, title in (("full", "Checkpoints of full size"), ("tiny", "Tiny pipelines")):
        rows = report.get(section, [])
        if not rows:
            continue
        lines += [f"## {title}", "",
                  "| model | residual | component | covered | planned | not covered | file | plan | write "
                  "| check | peak memory |", "|---|---|---|--:|--:|---|--:|--:|--:|--:|--:|"]  # fmt: skip
        for row in rows:
            lines += _format_rows(row)
        lines.append("")
    if rows := report.get("classes", []):
        lines += ["## Classes", "",
                  "Each class of the rescale table, made to overflow and scaled from bounds.", "",
                  "| class | covered | planned | not covered | check |", "|---|--:|--:|---|--:|",
                  *map(_format_class, rows), ""]  # fmt: skip
    lines += [
        "`python benchmarks/certificate_files.py tiny`, `… classes`, `… full`",
        "",
    ]
    (RESULTS / "certificate_files.md").write_text("\n".join(lines))


def _format_rows(row: dict[str, Any]) -> list[str]:
    made = []
    name = f"{row['name']}{', overflowing' if row.get('overflow') else ''}"
    times = (f"{row['file_bytes'] / 1e6:.1f} MB | {row['plan_cpu_s']:.0f} s | {row['write_cpu_s']:.0f} s "
             f"| {row['check_cpu_s']:.0f} s | {row['peak_bytes'] / 2**30:.2f} GiB")  # fmt: skip
    for component, found in row["components"].items():
        planned, rest = row["planned"][component], _list_few(found["uncovered"])
        made.append(f"| {name} | {row['residual']} | {component} | {found['covered']} of {found['values']} "
                    f"| {planned[0]} of {planned[1]} | {rest} | {times} |")  # fmt: skip
        times = " | | | |"
    for component, why in row["left"].items():
        made.append(
            f"| {name} | {row['residual']} | {component} | none | | {why[:120]} | | | | | |"
        )
    return made


def _format_class(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"| {row['name']} | none | | {row['failure'][:120]} | |"
    covered, planned = f"{row['covered']} of {row['values']}", row["planned"]
    return (f"| {row['name']} | {covered} | {planned[0]} of {planned[1]} | {_list_few(row['uncovered'])} "
            f"| {row['check_cpu_s']:.1f} s |")  # fmt: skip


def _list_few(uncovered: list[str]) -> str:
    more = f" and {len(uncovered) - 4} more" if len(uncovered) > 4 else ""
    return ", ".join(sorted({x.partition(":")[2] or x for x in uncovered})[:4]) + more


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=("tiny", "classes", "full"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--residual", nargs="+", default=["fp32", "native"])
    options = parser.parse_args()
    if options.part == "tiny":
        run_tiny(options.names)
    elif options.part == "classes":
        run_classes(options.names)
    else:
        run_full(options.names, options.residual)


if __name__ == "__main__":
    main()
