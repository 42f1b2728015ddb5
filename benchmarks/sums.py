"""Sums in fp16 by a certificate: which linear layers, why not the others, and what it costs in precision.

Each class of the rescale table is made to overflow and scaled from bounds; then its linear layers are
summed in fp32, in fp16 where the certificate allows it (`auto`, in pieces of at most 1024 terms; `fp16`,
whole sums), and in fp16 everywhere. The bundled pipeline runs two steps in the same ways by a certified
plan. Sums in fp16 are emulated: the accumulator is rounded after each group of 16 products. `--kinds` looks
at linear layers, convolutions, scores and softmax-weighted sums of attention one kind at a time: how large
their sums get with the exponents in place, and what the error is if they alone are summed in fp16.

    python benchmarks/sums.py
    python benchmarks/sums.py --kinds --classes T5 "SVD UNet"
    python benchmarks/sums.py --classes T5 Flux
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from rescale import overflow  # noqa: E402 (the path is set above)

from models.rescaling_models import (  # noqa: E402
    EXAMPLES,
    WAYS,
    make_example,
    measure_call,
    run_calls,
)
from stopdown import apply_plan, load, rescale_  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.errors import StopdownError  # noqa: E402
from stopdown.interception.accumulation import find_sums, summing_in_fp16  # noqa: E402
from stopdown.interception.patches import Patches  # noqa: E402
from stopdown.numerics import relative_l2  # noqa: E402
from stopdown.plans.applier import put_sums  # noqa: E402
from stopdown.plans.certified import certify_plan  # noqa: E402
from stopdown.plans.fp16_sums import choose_sums, list_refused  # noqa: E402
from stopdown.records import Accumulation, ComponentPlan, Plan, Scaling  # noqa: E402
from stopdown.scaling.folds import cast_  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
WAYS_TO_SUM = ("fp32", "auto", "fp16", "everywhere")


def make_scaled(name: str) -> tuple[torch.nn.Module, Any, Any, float | None, Any]:
    """Make one class overflow, and scale it from bounds.

    Returns:
        The module in fp32, its calls, what they give, bf16's error, and the rescaling.
    """
    module, calls = make_example(name)
    way = EXAMPLES[name].ways[0]
    overflow(module, calls, [measure_call(*call) for call in calls], WAYS[way])
    right = run_calls(calls, torch.float32)
    with cast_(module, torch.bfloat16):
        bf16 = compare(run_calls(calls, torch.bfloat16), right)
    rescaling = rescale_(module, calls=calls, ranges="bound")
    return module, calls, right, bf16, rescaling


def measure_class(name: str) -> dict[str, Any]:
    """One class, made to overflow: counts, reasons and errors against fp32."""
    module, calls, right, bf16, rescaling = make_scaled(name)
    cast_(module, torch.float16, rescaling)
    errors = {}
    for mode in WAYS_TO_SUM:
        with Patches() as patches, summing(mode):
            put_sums(module, choose(rescaling.scaling, mode), patches)
            errors[mode] = compare(run_calls(calls, torch.float16), right)
    return {"name": name, **count(rescaling.scaling), "bf16": bf16, "errors": errors}


KINDS = ("product", "convolution", "attention scores", "attention")


def measure_kinds(name: str) -> dict[str, Any]:
    """One class, made to overflow and scaled from bounds: sums and errors by kind of operation."""
    module, calls, right, bf16, rescaling = make_scaled(name)
    sums = find_sums(module, lambda: run_calls(calls, torch.float32))
    cast_(module, torch.float16, rescaling)
    found = {}
    for kind in KINDS:
        own = [x for x in sums if x.operation == kind]
        if own:
            with summing_in_fp16(kind):
                error = compare(run_calls(calls, torch.float16), right)
            beyond = sum(not x.fits for x in own)
            found[kind] = {
                "places": len(own),
                "beyond": beyond,
                "largest": own[0].largest,
                "error": error,
            }
    with summing_in_fp16("none of them"):
        wide = compare(run_calls(calls, torch.float16), right)
    return {"name": name, "bf16": bf16, "fp32": wide, "kinds": found}


def format_kinds(row: dict[str, Any]) -> str:
    """One line: the places and the largest sum of each kind, and how much nearer than bf16."""
    if "failure" in row:
        return f"| {row['name']} | {row['failure'][:90]} | | | | |"
    cells = [row["name"], f"{row['bf16'] / row['fp32']:.1f}" if row["fp32"] else "not finite"]
    for kind in KINDS:
        x = row["kinds"].get(kind)
        if x is None:
            cells.append("")
            continue
        ratio = f"{row['bf16'] / x['error']:.1f}" if x["error"] else "not finite"
        beyond = f", {x['beyond']} beyond" if x["beyond"] else ""
        cells.append(f"{ratio} ({x['places']}{beyond}, {x['largest']:.3g})")
    return f"| {' | '.join(cells)} |"


def choose(scaling: Scaling, mode: str) -> Accumulation:
    entry = ComponentPlan("module", "", "", "fp16", scaling)
    plan = Plan("", "", "", "fp16", {}, (entry,), (), 0, "cpu", 0.0)
    made = choose_sums(plan, "fp32" if mode == "everywhere" else mode).components[0].accumulation
    return made or Accumulation()


def count(scaling: Scaling) -> dict[str, Any]:
    """How many linear layers are summed in fp16 by `auto`, and why the others are not."""
    taken = choose(scaling, "auto")
    entry = ComponentPlan("module", "", "", "fp16", scaling, accumulation=taken)
    refused = list_refused(entry)
    return {
        "linears": len(scaling.sums), "taken": len(taken.fp16_sums), "refused": refused,
        "longest": max((x.terms for x in scaling.sums.values()), default=0),
    }  # fmt: skip


def summing(mode: str) -> Any:
    """The emulation, which heeds the switch that each layer sets; off where nothing sums in fp16."""
    if mode == "everywhere":
        return summing_in_fp16()
    return _heeding() if mode != "fp32" else nullcontext()


class _heeding:
    """The emulation with the switch off outside of the layers that turn it on."""

    def __enter__(self) -> None:
        self._emulation = summing_in_fp16()
        self._emulation.__enter__()
        torch.backends.cuda.matmul.allow_fp16_accumulation = False

    def __exit__(self, *error: Any) -> None:
        self._emulation.__exit__(*error)


def compare(found: list[torch.Tensor], right: list[torch.Tensor]) -> float | None:
    """Relative error of the worst output; None where it is not finite."""
    pairs = list(zip(found, right, strict=True))
    if not all(x.isfinite().all() for x, _ in pairs):
        return None
    return max(relative_l2(x.float(), y) for x, y in pairs)


def measure_shapes() -> dict[str, Any]:
    """The bundled pipeline, two steps, its latents."""
    plan = certify_plan("shapes")
    right = run_shapes("fp32", None, nullcontext)
    errors = {}
    for mode in WAYS_TO_SUM:
        summed = plan if mode == "everywhere" else choose_sums(plan, mode)
        errors[mode] = compare(
            [run_shapes("fp32", summed, lambda mode=mode: summing(mode))], [right]
        )
    entries = [x.scaling for x in plan.components]
    sums = {f"{i}.{path}": x for i, s in enumerate(entries) for path, x in s.sums.items()}
    bf16 = compare([run_shapes("bf16", None, nullcontext)], [right])
    whole = dataclasses.replace(entries[0], sums=sums)
    return {"name": "shapes, 2 steps", **count(whole), "bf16": bf16, "errors": errors}


def run_shapes(precision: str, plan: Plan | None, context: Callable[[], Any]) -> torch.Tensor:
    pipe = load("shapes", precision=precision, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    if plan is not None:
        apply_plan(pipe, plan)
    with torch.no_grad(), context():
        latents: torch.Tensor = pipe(
            "a green square moving left on a beige background",
            num_inference_steps=2,
            guidance_scale=4,
            generator=torch.Generator().manual_seed(0),
            max_sequence_length=16,
            output_type="latent",
        ).frames
    return latents.float()


def write_results(rows: list[dict[str, Any]]) -> None:
    report = _read()
    report |= {"command": "python benchmarks/sums.py", "machine": describe_machine(), "rows": rows}
    (RESULTS / "sums.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = [
        "# Sums in fp16 by a certificate",
        "",
        "`python benchmarks/sums.py`: how many linear layers of each class (made to overflow, scaled from",
        "bounds) may sum in fp16, and how many times nearer to fp32 the result is than bf16's: summed in",
        "fp32, in fp16 where the certificate allows it, and in fp16 everywhere, attention and matrix",
        "products included. Emulated, rounded after each group of 16 products.",
        "",
        "| class | linear layers | longest sum | fp16 | refused | fp32 sums | auto | whole | everywhere |",
        "|---|--:|--:|--:|---|--:|--:|--:|--:|",
        *map(format_row, rows),
        "",
    ]
    if kinds := report.get("kinds"):
        lines += [
            "## By kind of operation",
            "",
            "`python benchmarks/sums.py --kinds`: how many times nearer to fp32 than bf16 the result is if",
            "this kind alone is summed in fp16, and in brackets the places, how many have sums that",
            "leave fp16 in these calls, and the largest sum on its way. Exponents are from bounds; calls",
            "are those of the class. *fp32*: every sum in fp32, rounded once.",
            "",
            "| class | fp32 | linear and matrix products | convolutions | attention scores | attention |",
            "|---|--:|---|---|---|---|",
            *map(format_kinds, kinds),
            "",
        ]
    (RESULTS / "sums.md").write_text("\n".join(lines))


def _read() -> dict[str, Any]:
    path = RESULTS / "sums.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return stored


def run_kinds(names: list[str]) -> None:
    """Measure classes by kind, and put their rows beside the stored ones."""
    for name in names:
        try:
            row = measure_kinds(name)
        except (StopdownError, ValueError, RuntimeError) as error:
            row = {"name": name, "failure": str(error)[:300]}
        report = _read()
        report["kinds"] = [x for x in report.get("kinds", []) if x["name"] != name] + [row]
        (RESULTS / "sums.json").write_text(json.dumps(report, indent=1) + "\n")
        write_results(report["rows"])
        print(json.dumps(row)[:600], flush=True)


def format_row(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"| {row['name']} | {row['failure'][:90]} | | | | | | | |"
    ratios = [
        f"{row['bf16'] / x:.1f}" if x else "not finite" for x in map(row["errors"].get, WAYS_TO_SUM)
    ]
    first = next((f"{len(row['refused'])}, as {p}: {why}" for p, why in row["refused"].items()), "")
    cells = [row["name"], row["linears"], row["longest"], row["taken"], first, *ratios]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--classes", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--kinds", action="store_true", help="One kind of operation at a time.")
    options = parser.parse_args()
    if options.kinds:
        run_kinds(options.classes)
        return
    rows = [measure_shapes()]
    print(json.dumps(rows[-1])[:600], flush=True)
    for name in options.classes:
        try:
            row = measure_class(name)
        except (StopdownError, ValueError, RuntimeError) as error:
            row = {"name": name, "failure": str(error)[:300]}
        if row.get("linears") or "failure" in row:
            rows.append(row)
        print(json.dumps(row)[:600], flush=True)
        write_results(rows)


if __name__ == "__main__":
    main()
