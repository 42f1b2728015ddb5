"""Rescaling of the classes that users run: bit-identical in fp32, and the error in fp16.

Each class is built tiny with random weights (`tests/models/rescaling_models.py`), made to overflow fp16 in
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from models.rescaling_models import (  # noqa: E402 (the path is set above)
    EXAMPLES,
    WAYS,
    Call,
    make_example,
    measure_call,
    run_calls,
    scale_weights,
)
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.errors import ScalingError, StopdownError  # noqa: E402
from stopdown.numerics import relative_l2  # noqa: E402
from stopdown.records import ResidualStream, Scaling  # noqa: E402
from stopdown.scaling.exponents.problem import MeasuredCall, find_kept_clamps  # noqa: E402
from stopdown.scaling.folding.folds import cast_, fold_scaling, read_headroom  # noqa: E402
from stopdown.scaling.graph.range_measurement import run_capture  # noqa: E402
from stopdown.scaling.trials.call_search import plan_stream, scale_calls  # noqa: E402
from stopdown.scaling.trials.measurement import Captures, measure_again  # noqa: E402
from stopdown.scaling.trials.residual import measure_wide_flops  # noqa: E402
from stopdown.scaling.trials.search import find_scaling  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
OVERFLOWS_AT = 1e5
STEP_BITS = 3
MOST_BITS = 36


@dataclass(frozen=True)
class Prepared:
    """A class as it is built, captured; the captures hold for every way to make it overflow.

    Attributes:
        plain, streamed: its calls, captured as they are and with an fp32 residual stream.
        stream: of the latter; None when there is none, and why stands in `note`.
        healthy: bf16's error over fp16's, before it is made to overflow.
        before: its weights as they were drawn.
    """

    module: torch.nn.Module
    calls: list[Call]
    plain: list[MeasuredCall]
    streamed: list[MeasuredCall]
    stream: ResidualStream | None
    note: str
    healthy: float
    captured_s: float
    before: dict[str, torch.Tensor]


def prepare_class(name: str) -> Prepared:
    """Build a class, capture its calls, and see how near fp16 comes while nothing overflows."""
    module, calls = make_example(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    started = time.perf_counter()
    plain = [measure_call(*call) for call in calls]
    captured_s = time.perf_counter() - started
    stream, note = None, ""
    try:
        stream = plan_stream(module, calls, Captures())
    except ScalingError as error:
        note = error.what
    streamed = [] if stream is None else [measure_call(*call, stream=stream) for call in calls]
    reference = run_calls(calls, torch.float32)
    errors = [run_cast(module, calls, x, reference)["l2"] for x in (torch.bfloat16, torch.float16)]
    return Prepared(
        module, calls, plain, streamed, stream, note, errors[0] / errors[1], captured_s, before
    )


def measure_row(prepared: Prepared, name: str, way: str) -> dict[str, Any]:
    """One row: a class made to overflow in one way, under every precision."""
    module, calls = prepared.module, prepared.calls
    module.load_state_dict(prepared.before)
    bits, measured = overflow(module, calls, prepared.plain, WAYS[way])
    row: dict[str, Any] = {"class": name, "way": way, "scaled_bits": bits}
    row |= {"peak": peak_of(measured), "healthy": prepared.healthy}
    reference = run_reference(prepared)
    row |= {"bf16": run_cast(module, calls, torch.bfloat16, reference)}
    row |= {"fp16": run_cast(module, calls, torch.float16, reference)}
    row |= {"clamped fp16": run_clamped(module, calls, reference)}
    row |= {"autocast fp16": run_autocast(calls, reference)}
    started = time.perf_counter()
    scaling = find_scaling(module, measured)
    if scaling.fp32_modules:
        scaling = scale_calls(module, [[call] for call in calls])
    row |= {"captured_s": prepared.captured_s, "solved_s": time.perf_counter() - started}
    row |= run_scaled(module, calls, scaling, reference, "rescaled fp16")
    row |= {
        "folds": len(scaling.exponents),
        "multiplies": len(scaling.multiplies),
        "outputs in fp32": len(scaling.outputs),
        "fp32_modules": list(scaling.fp32_modules),
        "fp32_flops": scaling.fp32_flops,
        "fp32_bytes": share_bytes(module, scaling.fp32_modules),
        "wide_flops": max(measure_wide_flops(x.capture) for x in measured),
        "headroom_bits": read_headroom(scaling),
        "pinned": sorted(scaling.pinned),
    }
    return row | measure_streamed(prepared, reference)


def run_reference(prepared: Prepared) -> list[torch.Tensor]:
    """The outputs in fp32; of a model whose clamp is part of it (Sana), with the clamp."""
    kept = [find_kept_clamps(x.capture) for x in prepared.plain]
    if not any(kept):
        return run_calls(prepared.calls, torch.float32)
    outputs: list[torch.Tensor] = []
    for (_, args, kwargs), known, clamps in zip(prepared.calls, prepared.plain, kept, strict=True):
        found = run_capture(known.capture, prepared.module, args, kwargs, known.blocks, clamps)[1]
        outputs += [x for x in found if x.is_floating_point()]
    return outputs


def measure_streamed(prepared: Prepared, reference: list[torch.Tensor]) -> dict[str, Any]:
    """The part of a row with the residual stream in fp32, or why there is none."""
    if prepared.stream is None:
        return {"residual_note": prepared.note}
    module, calls = prepared.module, prepared.calls
    measured = measure_calls(module, calls, prepared.streamed)
    try:
        scaling = find_scaling(module, measured, prepared.stream)
        if scaling.fp32_modules:
            kinds = [[call] for call in calls]
            scaling = scale_calls(module, kinds, "fp32")
    except StopdownError as error:
        return {"residual_note": str(error)}
    found = run_scaled(module, calls, scaling, reference, "fp32 residual")
    found["residual_exact"] = found.pop("exact")
    wide = max(measure_wide_flops(x.capture) for x in measured)
    return found | {"residual_flops": scaling.fp32_flops + wide}


def run_scaled(
    module: torch.nn.Module,
    calls: list[Call],
    scaling: Scaling,
    reference: list[torch.Tensor],
    column: str,
) -> dict[str, Any]:
    """Whether a scaling is exact in fp32, and its errors in fp16."""
    before = run_calls(calls, torch.float32)
    rescaling = fold_scaling(module, scaling)
    exact = all(map(torch.equal, run_calls(calls, torch.float32), before))
    cast_(module, torch.float16, rescaling)
    errors = describe_error(run_calls(calls, torch.float16), reference)
    rescaling.undo()
    return {"exact": exact, column: errors}


def share_bytes(module: torch.nn.Module, fp32_modules: tuple[str, ...]) -> float:
    """Share of the parameters that lie in fp32 modules."""
    sizes = {name: x.numel() for name, x in module.named_parameters()}
    inside = [n for n in sizes if any(not p or n.startswith(f"{p}.") for p in fp32_modules)]
    return sum(sizes[n] for n in inside) / sum(sizes.values())


def overflow(
    module: torch.nn.Module, calls: list[Call], measured: list[MeasuredCall], pattern: str
) -> tuple[int, list[MeasuredCall]]:
    """Scale the weights of a way until some fp16 value overflows; the bits, and the new ranges."""
    bits, measured = 0, measure_calls(module, calls, measured)
    while peak_of(measured) < OVERFLOWS_AT and bits < MOST_BITS:
        if not scale_weights(module, pattern, STEP_BITS):
            raise ValueError(f"no weight matches {pattern}")
        bits += STEP_BITS
        measured = measure_calls(module, calls, measured)
    return bits, measured


def measure_calls(
    module: torch.nn.Module, calls: list[Call], measured: list[MeasuredCall]
) -> list[MeasuredCall]:
    """The same captures with the ranges that the weights give now."""
    return [
        measure_again(replace(x, ranges={}), module, args, kwargs)
        for x, (_, args, kwargs) in zip(measured, calls, strict=True)
    ]


def peak_of(measured: list[MeasuredCall]) -> float:
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
    hooks = [x.register_forward_hook(clamp_output) for x in module.modules()]
    found = run_cast(module, calls, torch.float16, reference)
    for hook in hooks:
        hook.remove()
    return found


def clamp_output(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """A hook: an output in fp16 within the range that fp16 has."""
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
        prepared = prepare_class(name)
        for way in EXAMPLES[name].ways:
            try:
                row = measure_row(prepared, name, way)
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
    machine = describe_machine()
    rows = sort_rows(rows)
    stored = {
        "command": "python benchmarks/rescale.py",
        "machine": machine,
        "versions": versions,
        "rows": rows,
    }
    (RESULTS / "rescale.json").write_text(json.dumps(stored, indent=1) + "\n")
    (RESULTS / "rescale.md").write_text(format_table(rows, name_machine(machine, versions)))


def sort_rows(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows class by class, each class's ways together, in the order of the examples."""
    known = [f"{name} / {way}" for name, example in EXAMPLES.items() for way in example.ways]
    return {key: rows[key] for key in [*known, *rows] if key in rows}


def name_machine(machine: dict[str, Any], versions: dict[str, str]) -> str:
    """The processor, Python and the libraries that made the rows, in one line."""
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {libraries}"


COLUMNS = (
    "bf16", "fp16", "clamped fp16", "autocast fp16", "rescaled fp16", "fp32 residual",
)  # fmt: skip
"""What a row has an error for."""


def format_table(rows: dict[str, dict[str, Any]], machine: str) -> str:
    """The rows as Markdown, with the medians that the goals are about."""
    done = [x for x in rows.values() if "failure" not in x]
    wide = [x for x in done if "fp32 residual" in x]
    exact = sum(x["exact"] for x in done)
    classes = {x["class"] for x in rows.values()}
    whole = {
        c for c in classes if all("failure" not in x for x in rows.values() if x["class"] == c)
    }
    lines = [
        "# Rescaling: tiny models made to overflow fp16",
        "",
        f"`python benchmarks/rescale.py` on {machine}.",
        "",
        "Errors against fp32, the worst output of each row: relative 2-norm / worst element over the",
        "largest one; `inf` is NaN or Inf. Random weights: what the table shows is that the method is",
        "exact and what it loses, not what a checkpoint does. `as built` is bf16 : fp16 of the same model",
        "before it was made to overflow: what one draw of weights and inputs gives when nothing has to be",
        "scaled.",
        "",
        f"{len(classes)} classes, {len(whole)} solved in every way tried; {len(done)} of {len(rows)}"
        f" rows solved, {exact} of them bit for bit exact in fp32. Medians: bf16 : rescaled fp16 ="
        f" {median_ratio(done, 'rescaled fp16'):.1f}; bf16 : fp32 residual ="
        f" {median_ratio(wide, 'fp32 residual'):.1f} ({len(wide)} rows); as built ="
        f" {statistics.median(x['healthy'] for x in done if 'healthy' in x):.1f}.",
        "",
        f"| class | overflow | peak | exact in fp32 | {' | '.join(COLUMNS)} | bf16 : rescaled |"
        " bf16 : fp32 residual | as built | folds | multiplies | FLOPs in fp32 | bytes in fp32 modules |",
        f"|---|---|--:|---|{'--:|' * (len(COLUMNS) + 7)}",
    ]
    return "\n".join([*lines, *map(format_row, rows.values())]) + "\n"


def median_ratio(rows: list[dict[str, Any]], column: str) -> float:
    """Median of bf16's error over that of a column."""
    return statistics.median(x["bf16"]["l2"] / x[column]["l2"] for x in rows)


def format_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    if "failure" in row:
        empty = " |" * (len(COLUMNS) + 7)
        return f"| {row['class']} | {row['way']} | | not solved: {row['failure'][:200]} |{empty}"
    ratios = [
        f"{row['bf16']['l2'] / row[x]['l2']:.1f}" if x in row else ""
        for x in ("rescaled fp16", "fp32 residual")
    ]
    cells = [
        row["class"],
        row["way"],
        f"{row['peak']:.1e}",
        "yes" if row["exact"] and row.get("residual_exact", True) else "**no**",
        *(f"{row[x]['l2']:.5f} / {row[x]['worst']:.5f}" if x in row else "" for x in COLUMNS),
        *ratios,
        f"{row['healthy']:.1f}" if "healthy" in row else "",
        str(row["folds"]),
        str(row["multiplies"]),
        f"{row['fp32_flops'] + row.get('wide_flops', 0):.0%}",
        f"{row.get('fp32_bytes', 0):.0%}",
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
