"""Rescaling over the classes that users run: exact in fp32, and how near fp16 comes to fp32.

Each class is built tiny with random weights (`tests/rescaling_models.py`), made to overflow fp16 in
the ways that its architecture has, and run as it is in fp32, bf16 and fp16, with every module's
output clamped, under autocast, and rescaled. Errors are against fp32, the worst over all outputs of
all calls. Rows of classes that are not run again are kept.

    python benchmarks/rescale.py                          # everything (tens of minutes)
    python benchmarks/rescale.py --classes T5 "SD VAE"
    python benchmarks/rescale.py --table                  # only write the table anew
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from rescaling_models import (  # noqa: E402 (the path is set above)
    EXAMPLES,
    WAYS,
    Call,
    make_example,
    run_calls,
    scale_weights,
)
from stopdown.errors import StopdownError  # noqa: E402
from stopdown.numerics import relative_l2  # noqa: E402
from stopdown.scaling import (  # noqa: E402
    Measured,
    cast_,
    find_scaling,
    fold_scaling,
    measure_again,
    measure_call,
)

RESULTS = ROOT / "benchmarks" / "results"
OVERFLOWS_AT = 1e5
STEP_BITS = 3
MOST_BITS = 36


def measure_row(name: str, way: str) -> dict[str, Any]:
    """One row: a class made to overflow in one way, under every precision."""
    module, calls = make_example(name)
    started = time.perf_counter()
    measured = [measure_call(*call) for call in calls]
    captured_s = time.perf_counter() - started
    bits, measured = overflow(module, calls, measured, WAYS[way])
    row: dict[str, Any] = {"class": name, "way": way, "scaled_bits": bits}
    row["peak"] = peak_of(measured)
    reference = run_calls(calls, torch.float32)
    row |= {"bf16": run_cast(module, calls, torch.bfloat16, reference)}
    row |= {"fp16": run_cast(module, calls, torch.float16, reference)}
    row |= {"clamped fp16": run_clamped(module, calls, reference)}
    row |= {"autocast fp16": run_autocast(calls, reference)}
    started = time.perf_counter()
    scaling = find_scaling(module, measured)
    row |= {"captured_s": captured_s, "solved_s": time.perf_counter() - started}
    rescaling = fold_scaling(module, scaling)
    row["exact"] = all(map(torch.equal, run_calls(calls, torch.float32), reference))
    cast_(module, torch.float16, rescaling)
    row["rescaled fp16"] = describe_error(run_calls(calls, torch.float16), reference)
    rescaling.undo()
    row |= {
        "folds": len(scaling.exponents),
        "multiplies": len(scaling.multiplies),
        "islands": list(scaling.islands),
        "island_flops": scaling.island_flops,
        "headroom_bits": scaling.headroom_bits,
        "pinned": sorted(scaling.pinned),
    }
    return row


def overflow(
    module: torch.nn.Module, calls: list[Call], measured: list[Measured], pattern: str
) -> tuple[int, list[Measured]]:
    """Scale the weights of a way until some fp16 value overflows; the bits, and the new ranges."""
    bits = 0
    while peak_of(measured) < OVERFLOWS_AT and bits < MOST_BITS:
        if not scale_weights(module, pattern, STEP_BITS):
            raise ValueError(f"no weight matches {pattern}")
        bits += STEP_BITS
        bare = [replace(x, ranges={}) for x in measured]
        measured = [
            measure_again(x, module, args, kwargs)
            for x, (_, args, kwargs) in zip(bare, calls, strict=True)
        ]
    return bits, measured


def peak_of(measured: list[Measured]) -> float:
    """Largest magnitude of any fp16 value that an operation makes."""
    return max(
        part.amax
        for call in measured
        for node in call.capture.graph.graph.nodes
        if node.op == "call_function" and _is_fp16(node)
        for part in call.ranges.get(node.name, ())
    )


def _is_fp16(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16


def run_cast(
    module: torch.nn.Module, calls: list[Call], dtype: torch.dtype, reference: list[torch.Tensor]
) -> dict[str, float]:
    """Errors of the module as it is, cast to a dtype."""
    cast = cast_(module, dtype)
    found = describe_error(run_calls(calls, dtype), reference)
    cast.undo()
    return found


def run_clamped(
    module: torch.nn.Module, calls: list[Call], reference: list[torch.Tensor]
) -> dict[str, float]:
    """Errors in fp16 when the output of every module is clamped to fp16's range."""
    hooks = [x.register_forward_hook(_clamp) for x in module.modules()]
    found = run_cast(module, calls, torch.float16, reference)
    for hook in hooks:
        hook.remove()
    return found


def _clamp(module: torch.nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, torch.Tensor) and output.dtype == torch.float16:
        return output.nan_to_num(0.0, 65504, -65504)
    return output


def run_autocast(calls: list[Call], reference: list[torch.Tensor]) -> dict[str, float]:
    """Errors of the fp32 module under autocast to fp16."""
    with torch.autocast("cpu", dtype=torch.float16):
        return describe_error(run_calls(calls, torch.float32), reference)


def describe_error(outputs: list[torch.Tensor], reference: list[torch.Tensor]) -> dict[str, float]:
    """Relative 2-norm and worst element over the largest one, the worst of all outputs."""
    pairs = list(zip(outputs, reference, strict=True))
    if not all(bool(x.isfinite().all()) for x in outputs):
        return {"l2": math.inf, "worst": math.inf}
    worst = [float((x.float() - y.float()).abs().max() / y.abs().max()) for x, y in pairs]
    return {"l2": max(relative_l2(x, y) for x, y in pairs), "worst": max(worst)}


def measure_classes(names: list[str]) -> None:
    """Measure rows class by class and store each as soon as it is there."""
    for name in names:
        for way in EXAMPLES[name].ways:
            try:
                row = measure_row(name, way)
            except (StopdownError, ValueError) as error:
                row = {"class": name, "way": way, "failure": str(error)}
            store_rows({**load_rows(), f"{name} / {way}": row})
            print(name, way, row, flush=True)


def load_rows() -> dict[str, dict[str, Any]]:
    """The rows stored before, by class and way."""
    path = RESULTS / "rescale.json"
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def store_rows(rows: dict[str, dict[str, Any]]) -> None:
    """Write the rows as JSON and as a table."""
    import diffusers
    import transformers

    versions = {x.__name__: x.__version__ for x in (torch, diffusers, transformers)}
    stored = {"command": "python benchmarks/rescale.py", "versions": versions, "rows": rows}
    (RESULTS / "rescale.json").write_text(json.dumps(stored, indent=1) + "\n")
    (RESULTS / "rescale.md").write_text(format_table(rows, versions))


def format_table(rows: dict[str, dict[str, Any]], versions: dict[str, str]) -> str:
    """The rows as Markdown, with the medians that the goals are about."""
    done = [x for x in rows.values() if "failure" not in x]
    ratios = [x["bf16"]["l2"] / x["rescaled fp16"]["l2"] for x in done]
    exact = sum(x["exact"] for x in done)
    classes = {x["class"] for x in rows.values()}
    whole = {
        c for c in classes if all("failure" not in x for x in rows.values() if x["class"] == c)
    }
    lines = [
        "# Rescaling: tiny models made to overflow fp16",
        "",
        f"`python benchmarks/rescale.py`, CPU, {versions}. Relative 2-norm errors against fp32, the",
        "worst output of each row; `inf` is NaN or Inf. Random weights: what the table shows is",
        "that the method is exact and what it loses, not what a checkpoint does.",
        "",
        f"{len(classes)} classes, {len(whole)} solved in every way tried; {len(done)} of {len(rows)}"
        f" rows solved, {exact} of them bit for bit exact in fp32;"
        f" median bf16 : rescaled fp16 = {statistics.median(ratios):.1f}.",
        "",
        "| class | overflow | peak | exact in fp32 | bf16 | fp16 | clamped fp16 | autocast fp16 |"
        " rescaled fp16 | bf16 : rescaled | folds | multiplies | FLOPs in fp32 |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*lines, *map(format_row, rows.values())]) + "\n"


def format_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    if "failure" in row:
        return (
            f"| {row['class']} | {row['way']} | | not solved: {row['failure'][:200]} |" + " |" * 9
        )
    errors = [f"{row[x]['l2']:.5f}" for x in
              ("bf16", "fp16", "clamped fp16", "autocast fp16", "rescaled fp16")]  # fmt: skip
    ratio = row["bf16"]["l2"] / row["rescaled fp16"]["l2"]
    cells = [
        row["class"],
        row["way"],
        f"{row['peak']:.1e}",
        "yes" if row["exact"] else "**no**",
        *errors,
        f"{ratio:.1f}",
        str(row["folds"]),
        str(row["multiplies"]),
        f"{row['island_flops']:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    if options.table:
        store_rows(load_rows())
    else:
        measure_classes(options.classes)


if __name__ == "__main__":
    main()
