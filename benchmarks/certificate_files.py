"""Certificate files: what they cover, what checking them costs, and which changes of them are refused.

`tiny` plans every tiny pipeline as it is with an fp32 residual stream, and made to overflow with its stream
as it is, and writes and checks each certificate. `classes` does that with each class of the rescale table,
made to overflow and scaled from bounds. `full` takes the checkpoints of `full_size_runs.py`, one at a time,
from a temporary folder. The checker is a process of its own, without torch (of `classes` a function).
`mutations` changes the certificate of a component and its weights at random, one change at a time. The
seal is made anew after each change, so that it is not what refuses; what the derivation lets pass is
checked once more with the old seal.

    python benchmarks/certificate_files.py tiny
    python benchmarks/certificate_files.py classes
    python benchmarks/certificate_files.py mutations text_encoder transformer --changes 1000
    python benchmarks/certificate_files.py full CogVideoX-5B
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import stopdown_verify  # noqa: E402 (the path is set above)

RESULTS = ROOT / "benchmarks" / "results"
STORED = RESULTS / "certificate_files.json"
CHECKPOINTS = ("CogVideoX-2B", "CogVideoX-5B", "T5-XXL", "CogView3-Plus-3B", "Z-Image", "SVD-XT")
_CHECK = """
import json, os, resource, sys, time, numpy
import stopdown_verify
begun, spent = time.perf_counter(), time.process_time()
found = json.load(open(sys.argv[1]))
try:
    lines = stopdown_verify.check_certificate(found, __import__("pathlib").Path(sys.argv[2]))
except stopdown_verify.Refused as error:
    lines = [f"Refused. {error}"]
assert "torch" not in sys.modules
print(json.dumps({"lines": lines, "check_s": time.perf_counter() - begun,
                  "check_cpu_s": time.process_time() - spent,
                  "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def certify(folder: Path, path: Path, residual: str, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Plan a folder, write its certificate and check it; one row."""
    from stopdown.plans.certificate_files import write_certificate
    from stopdown.plans.certified import Scope, certify_plan
    from stopdown.sources.sources import resolve_source

    source, spent = resolve_source(folder), time.process_time()
    plan = certify_plan(source, residual=residual, scope=Scope(only))
    planned = time.process_time()
    made = write_certificate(plan, source, path)
    written = time.process_time()
    command = [sys.executable, "-c", _CHECK, str(path), str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        **row,
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
    from safetensors.torch import save_model

    from models.rescaling_models import EXAMPLES, WAYS, make_example, measure_call
    from stopdown import rescale_
    from stopdown.graph.capture import name_parameters
    from stopdown.plans.certificate_files import export_calls
    from stopdown.records import ComponentPlan
    from stopdown.scaling.measurement import Captures

    module, calls = make_example(name)
    overflow(module, calls, [measure_call(*x) for x in calls], WAYS[EXAMPLES[name].ways[0]])
    rescaling = rescale_(module, calls=calls, ranges="bound")
    rescaling.undo()
    entry = ComponentPlan("module", precision="fp16", scaling=rescaling.scaling)
    (folder / "module").mkdir()
    save_model(module, str(folder / "module" / "a.safetensors"))
    captures = Captures()
    captured = [(captures.take(call), *call[1:]) for call in calls]
    load = name_parameters(module).__getitem__
    stated = export_calls(module, entry, captured, folder, ["a.safetensors"], load)
    stopdown_verify.check_component(stated, folder, write=True)
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


# changes


def _nodes(stated: dict[str, Any], rng: random.Random, holds: Callable[[Any], bool]) -> Any:
    found = [n for graph in stated["graphs"] for n in graph["nodes"] if holds(n)]
    return rng.choice(found) if found else None


def change_bound(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """Another mantissa or exponent, lower or higher."""
    node = _nodes(stated, rng, lambda n: n["bound"] and n["bound"][0])
    if rng.random() < 0.5:
        node["bound"][1] += rng.choice((-3, -2, -1, 1, 2, 3))
    else:
        node["bound"][0] = int(node["bound"][0] * rng.choice((0.5, 0.9, 0.99, 1.01, 1.1, 2)))
    return True


def change_no_bound(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """A bound where there is none, or none where there is one."""
    node = _nodes(stated, rng, lambda n: True)
    node["bound"] = [1, 0] if node["bound"] is None else None
    return True


def change_rule(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """Another rule for the same inputs."""
    node = _nodes(stated, rng, lambda n: n["from"])
    node["rule"] = rng.choice([x for x in stopdown_verify.RULES if x != node["rule"]])
    return True


def change_function(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """Another function of one value."""
    node = _nodes(stated, rng, lambda n: n["rule"] in ("same", "bounded"))
    known = (*stopdown_verify.KEEPING, *stopdown_verify.SMALLER, *stopdown_verify.SATURATING)
    node["function"] = rng.choice([x for x in known if x != node["function"]])
    return True


def change_edge(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """Another value as an input."""
    graph = rng.choice(stated["graphs"])
    node = rng.choice([n for n in graph["nodes"] if n["from"]])
    others = [n["id"] for n in graph["nodes"] if n["id"] not in (*node["from"], node["id"])]
    node["from"][rng.randrange(len(node["from"]))] = rng.choice(others)
    return True


def change_edges(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """An input too few or too many."""
    node = _nodes(stated, rng, lambda n: n["from"])
    node["from"] = node["from"][1:] if rng.random() < 0.5 else [*node["from"], node["from"][0]]
    return True


def change_attribute(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """A shape, a dimension, a number, a limit of an input."""
    others = ("bound", "exponents", "number_exponent", "by", "eps")

    def list_keys(node: dict[str, Any]) -> list[str]:
        return [k for k, x in node.items() if k not in others and _is_number(x)]

    node = _nodes(stated, rng, list_keys)
    key = rng.choice(list_keys(node))
    step = rng.choice((-1, 1, 2))
    if isinstance(node[key], list):
        node[key][rng.randrange(len(node[key]))] += step
    else:
        node[key] = not node[key] if isinstance(node[key], bool) else node[key] + step
    return True


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) or (
        isinstance(x, list) and bool(x) and isinstance(x[0], int)
    )


def change_name(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """Another tensor as the weight or bias of an operation."""
    node = _nodes(stated, rng, lambda n: "weight" in n)
    key = rng.choice([k for k in ("weight", "bias") if k in node])
    node[key] = rng.choice([x for x in stated["weights"] if x != node[key]])
    return True


def change_fold(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """Another exponent of a weight."""
    entry = stated["weights"][rng.choice([*stated["weights"]])]
    if entry["exponents"] and rng.random() < 0.7:
        rng.choice(entry["exponents"])[3] += rng.choice((-2, -1, 1, 2))
    else:
        entry["exponents"] = [*entry["exponents"], [0, 0, 1 << 40, rng.choice((-1, 1))]]
    return True


def change_exponent(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """Another exponent of a value, of an eps, of a number or of a multiply."""
    node = _nodes(stated, rng, lambda n: True)
    key = rng.choice([k for k in ("exponents", "eps", "by", "number_exponent") if k in node])
    step = rng.choice((-2, -1, 1, 2))
    node[key] = [x + step for x in node[key]] if isinstance(node[key], list) else node[key] + step
    return True


def change_weight(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """One bit of one value in a file of weights."""
    path = folder / stated["component"] / rng.choice(stated["files"])
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[rng.randrange(begin, len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return True


def change_hash(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """One digit of a hash."""
    entry = stated["weights"][rng.choice([*stated["weights"]])]
    at = rng.randrange(64)
    digit = rng.choice([x for x in "0123456789abcdef" if x != entry["sha256"][at]])
    entry["sha256"] = entry["sha256"][:at] + digit + entry["sha256"][at + 1 :]
    return True


def change_coverage(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """An entry too few or too many in the lists of what is not covered and not read."""
    key = rng.choice(("uncovered", "unread"))
    if stated[key] and rng.random() < 0.5:
        stated[key].pop(rng.randrange(len(stated[key])))
    else:
        node = _nodes(stated, rng, lambda n: True)
        added = f"0:{node['id']}" if key == "uncovered" else rng.choice([*stated["weights"]])
        if added in stated[key]:
            return False
        stated[key].append(added)
    return True


def change_tensors(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """A tensor too few in the list of weights, or one that is in no file."""
    if rng.random() < 0.5:
        stated["weights"].pop(rng.choice([*stated["weights"]]))
    else:
        key = rng.choice([*stated["weights"]])
        stated["weights"][f"{key}.other"] = copy.deepcopy(stated["weights"][key])
    return True


def change_nodes(stated: dict[str, Any], rng: random.Random, folder: Path) -> bool:
    """A value too few, or twice."""
    nodes = rng.choice(stated["graphs"])["nodes"]
    at = rng.randrange(len(nodes))
    if rng.random() < 0.5:
        nodes.pop(at)
    else:
        nodes.insert(at, copy.deepcopy(nodes[at]))
    return True


CHANGES = {
    "bound": change_bound, "bound or none": change_no_bound, "rule": change_rule,
    "function": change_function, "edge": change_edge, "number of edges": change_edges,
    "attribute or limit": change_attribute, "weight of an operation": change_name,
    "exponent of a weight": change_fold, "exponent of a value": change_exponent,
    "bit of a weight": change_weight, "hash": change_hash, "coverage list": change_coverage,
    "list of tensors": change_tensors, "value left out or doubled": change_nodes,
}  # fmt: skip


def mutate(
    certificate: dict[str, Any], folder: Path, scratch: Path, kind: str, rng: random.Random
) -> str:
    """Make one change: `derivation` or `seal`, by what refused it, else `accepted`; "" without a change."""
    changed = copy.deepcopy(certificate)
    stated = rng.choice(changed["components"])
    changed["components"] = [stated]  # the others are as they were
    where = folder
    if kind == "bit of a weight":
        where = scratch
        shutil.rmtree(scratch / stated["component"], ignore_errors=True)
        shutil.copytree(folder / stated["component"], scratch / stated["component"])
    if not CHANGES[kind](stated, rng, where):
        return ""
    before, changed["seal"] = certificate["seal"], stopdown_verify.seal(changed)
    try:
        stopdown_verify.check_certificate(changed, where)
    except stopdown_verify.Refused:
        return "derivation"
    others = [x for x in certificate["components"] if x["component"] != stated["component"]]
    order = [x["component"] for x in certificate["components"]]
    parts = sorted([*others, stated], key=lambda x: order.index(x["component"]))
    whole = {**certificate, "components": parts}
    return "seal" if stopdown_verify.seal(whole) != before else "accepted"


def run_mutations(component: str, changes: int, seed: int) -> None:
    """Count what is refused, by class of change, of one component's certificate."""
    from stopdown.testing import save_pipeline

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = save_pipeline("cogvideox", Path(place) / "model", overflow=component)
        path = Path(place) / "certificate.json"
        certify(folder, path, "native", only=(component,))
        certificate = json.loads(path.read_text())
        counts = {kind: {"derivation": 0, "seal": 0, "accepted": 0} for kind in CHANGES}
        done = 0
        while done < changes:
            kind = [*CHANGES][done % len(CHANGES)]
            found = mutate(certificate, folder, Path(place) / "scratch", kind, rng)
            if found:
                counts[kind][found] += 1
                done += 1
            if done % 50 == 0:
                print(done, counts, flush=True)
                row = {"component": component, "seed": seed, "changes": done, "counts": counts}
                store("mutations", row, ("component",))


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
             "beside other work; the checker runs by itself, without torch.", ""]  # fmt: skip
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
    for row in report.get("mutations", []):
        lines += [f"## Changed certificates: {row['component']}", "",
                  f"{row['changes']} random changes (seed {row['seed']}), one at a time, of the",
                  "certificate of this component of the tiny CogVideoX, made to overflow. The seal",
                  "is made anew after each. *By the seal*: the derivation holds for the changed file, too",
                  "(another graph of which the same is true), and only the seal shows the change.", "",
                  "| changed | refused by the derivation | refused by the seal alone | accepted |",
                  "|---|--:|--:|--:|"]  # fmt: skip
        lines += [
            f"| {kind} | {x['derivation']} | {x['seal']} | {x['accepted']} |"
            for kind, x in row["counts"].items()
        ]
        sums = [
            sum(x[k] for x in row["counts"].values()) for k in ("derivation", "seal", "accepted")
        ]
        lines += [f"| all | {sums[0]} | {sums[1]} | {sums[2]} |", ""]
    lines += [
        "`python benchmarks/certificate_files.py tiny`, `… classes`, `… full`, `… mutations`",
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
    parser.add_argument("part", choices=("tiny", "classes", "mutations", "full"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--residual", nargs="+", default=["fp32", "native"])
    options = parser.parse_args()
    if options.part == "tiny":
        run_tiny(options.names)
    elif options.part == "classes":
        run_classes(options.names)
    elif options.part == "full":
        run_full(options.names, options.residual)
    else:
        for name in options.names or ("text_encoder", "transformer"):
            run_mutations(name, options.changes, options.seed)


if __name__ == "__main__":
    main()
