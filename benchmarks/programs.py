"""Rescaling of the classes of programs without Diffusers pipelines, taken from their checkouts.

Each class is built tiny with random weights (`tests/models/foreign_models.py`), made to overflow fp16 in
the ways that its architecture has, and brought to fp16 by `rescale_` and `cast_`, as a user would:
exponents, what stays in fp32, or the fall-back by hooks, and the note that says why. Errors are
against fp32, the worst over all outputs of all calls. Where the program's code does not run in 16 bits
as it stands, because it mixes dtypes, bf16 is run with the same casts as fp16. Two of the programs have
a package of one name, so each is measured in a process of its own. Rows that are not run again are kept.

    python benchmarks/programs.py                          # programs whose variables are set (minutes)
    python benchmarks/programs.py --classes "sgm VideoUNet"
    python benchmarks/programs.py --row "ComfyUI SDXL UNet" residual --seeds 16   # one row, other weights
    python benchmarks/programs.py --table                  # only write the table anew
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from rescale import OVERFLOWS_AT, clamp_output, describe_error, name_machine  # noqa: E402

from models.foreign_models import (  # noqa: E402 (the path is set above)
    EXAMPLES,
    VARIABLES,
    WAYS,
    find_missing,
    make_foreign,
)
from models.rescaling_models import Call, scale_weights  # noqa: E402
from models.rescaling_models import run_calls as run_given  # noqa: E402
from stopdown import cast_, rescale_  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.errors import StopdownError  # noqa: E402
from stopdown.numerics import measure_amax  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
STEP_BITS = 2
MOST_BITS = 40


def measure_class(name: str) -> None:
    """Measure the rows of a class and store each as soon as it is there."""
    for way in EXAMPLES[name].ways:
        row: dict[str, Any] = {"class": name, "program": EXAMPLES[name].program, "way": way}
        try:
            row |= measure_row(name, way)
        except (StopdownError, ValueError) as error:
            row |= {"failure": str(error)}
        store_rows({**load_rows(), f"{name} / {way}": row})
        print(name, way, row, flush=True)


def measure_row(name: str, way: str, seed: int = 0) -> dict[str, Any]:
    """One row: a class made to overflow in one way, and brought to fp16."""
    module, calls = make_foreign(name, seed)
    row: dict[str, Any] = {"scaled_bits": overflow(module, calls, WAYS[way])}
    row["peak"] = find_peak(module, calls)
    reference = run_calls(calls, torch.float32)
    row["fp16"] = run_plain(module, calls, torch.float16, reference)
    row["clamped fp16"] = run_clamped(module, calls, reference)
    started = time.perf_counter()
    rescaling = rescale_(module, calls=calls)
    row["solved_s"] = time.perf_counter() - started
    row["exact"] = all(map(torch.equal, run_calls(calls, torch.float32), reference))
    cast_(module, torch.float16, rescaling)
    row["rescaled fp16"] = describe_error(run_calls(calls, torch.float16), reference)
    scaling = rescaling.scaling
    rescaling.undo()
    row["bf16"] = run_plain(module, calls, torch.bfloat16, reference)
    row["bf16 runs"] = row["bf16"] is not None
    if row["bf16"] is None:
        cast = cast_(module, torch.bfloat16, without_exponents(scaling))
        row["bf16"] = describe_error(run_calls(calls, torch.bfloat16), reference)
        cast.undo()
    return row | {
        "folds": len(scaling.exponents),
        "multiplies": len(scaling.multiplies),
        "fp32_modules": list(scaling.fp32_modules),
        "fp32_flops": scaling.fp32_flops,
        "note": scaling.note,
        "pinned": sorted(scaling.pinned),
    }


def without_exponents(scaling: Any) -> Any:
    """The casts of a scaling alone."""
    from dataclasses import replace

    return replace(scaling, exponents={}, eps={}, multiplies={}, outputs={}, fp32_modules=())


def run_calls(calls: list[Call], dtype: torch.dtype) -> list[torch.Tensor]:
    """As `rescaling_models.run_calls`, of copies: some of the code adds into what it is given."""
    copied = [(call, *copy.deepcopy((args, dict(kwargs)))) for call, args, kwargs in calls]
    return run_given(copied, dtype)


def overflow(module: torch.nn.Module, calls: list[Call], pattern: str) -> int:
    """Scale the weights of a way until some value of a module overflows fp16; the bits.

    Raises:
        ValueError: the way has no weights here, or none of its values grows.
    """
    bits = 0
    while find_peak(module, calls) < OVERFLOWS_AT:
        if not scale_weights(module, pattern, STEP_BITS):
            raise ValueError(f"no weight matches {pattern}")
        bits += STEP_BITS
        if bits > MOST_BITS:
            raise ValueError(f"no value grows with {pattern}")
    return bits


def find_peak(module: torch.nn.Module, calls: list[Call]) -> float:
    """The largest magnitude that a linear, convolution or other module without parts returns."""
    peaks = [0.0]

    def look(part: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            peaks.append(measure_amax(output))

    leaves = [x for x in module.modules() if not list(x.children())]
    hooks = [x.register_forward_hook(look) for x in leaves]
    outputs = run_calls(calls, torch.float32)
    for hook in hooks:
        hook.remove()
    return max(*peaks, *map(measure_amax, outputs))


def run_plain(
    module: torch.nn.Module, calls: list[Call], dtype: torch.dtype, reference: list[torch.Tensor]
) -> dict[str, float] | None:
    """Errors of the module as it is, cast to a dtype; None where its code does not run so."""
    cast = cast_(module, dtype)
    try:
        return describe_error(run_calls(calls, dtype), reference)
    except RuntimeError:
        return None
    finally:
        cast.undo()


def run_clamped(
    module: torch.nn.Module, calls: list[Call], reference: list[torch.Tensor]
) -> dict[str, float] | None:
    """Errors in fp16 with every module's output clamped; None where the code does not run so."""
    hooks = [x.register_forward_hook(clamp_output) for x in module.modules()]
    try:
        return run_plain(module, calls, torch.float16, reference)
    finally:
        for hook in hooks:
            hook.remove()


def load_rows() -> dict[str, dict[str, Any]]:
    """The rows stored before, by class and way."""
    path = RESULTS / "programs.json"
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def measure_spread(name: str, way: str, seeds: int) -> None:
    """How far one row's ratio depends on which random weights it has; stored beside the rows."""
    found = []
    for seed in range(seeds):
        row = measure_row(name, way, seed)
        found.append({
            "seed": seed, "exact": row["exact"], "bf16": row["bf16"]["l2"],
            "rescaled fp16": row["rescaled fp16"]["l2"], "folds": row["folds"],
        })  # fmt: skip
        print(json.dumps(found[-1] | {"bf16 : rescaled": find_ratio(row)}), flush=True)
    path = RESULTS / "programs.json"
    known = json.loads(path.read_text()).get("seeds", {}) if path.exists() else {}
    store_rows(load_rows(), {**known, f"{name} / {way}": found})


def store_rows(rows: dict[str, dict[str, Any]], seeds: dict[str, Any] | None = None) -> None:
    """Write the rows as JSON and as a table; with what other seeds gave, where that is new."""
    import diffusers
    import transformers

    versions = {x.__name__: x.__version__ for x in (torch, diffusers, transformers)}
    machine = describe_machine()
    known = [f"{name} / {way}" for name, example in EXAMPLES.items() for way in example.ways]
    rows = {key: rows[key] for key in known if key in rows}
    path = RESULTS / "programs.json"
    if seeds is None:
        seeds = json.loads(path.read_text()).get("seeds", {}) if path.exists() else {}
    stored = {
        "command": "python benchmarks/programs.py",
        "machine": machine,
        "versions": versions,
        "rows": rows,
        "seeds": seeds,
    }
    path.write_text(json.dumps(stored, indent=1) + "\n")
    table = format_table(rows, name_machine(machine, versions)) + format_seeds(seeds)
    path.with_suffix(".md").write_text(table)


def format_seeds(seeds: dict[str, Any]) -> str:
    """One line for each row that was measured with other random weights as well."""
    lines = []
    for name, found in seeds.items():
        ratios = sorted(x["bf16"] / x["rescaled fp16"] for x in found)
        mean = math.prod(ratios) ** (1 / len(ratios))
        lines.append(
            f"\n{name}, with {len(found)} seeds: bf16 : rescaled is {ratios[0]:.1f} to {ratios[-1]:.1f}, "
            f"geometric mean {mean:.1f}; {sum(x['exact'] for x in found)} exact in fp32. Each is a single "
            "draw of roundings.\n"
        )
    return "".join(lines)


COLUMNS = ("fp16", "clamped fp16", "bf16", "rescaled fp16")


def format_table(rows: dict[str, dict[str, Any]], machine: str) -> str:
    """The rows as Markdown, with the share that is solved and the median."""
    done = [x for x in rows.values() if is_solved(x)]
    classes = {x["class"] for x in rows.values()}
    exact = sum(x["exact"] for x in done)
    folded = sum(x["folds"] > 0 for x in done)
    share = len(done) / max(len(rows), 1)
    ratio = statistics.median(map(find_ratio, done)) if done else math.nan
    lines = [
        "# Rescaling: other programs' own classes made to overflow fp16",
        "",
        f"`python benchmarks/programs.py` on {machine}.",
        "",
        "Classes of ComfyUI, Stability-AI's generative-models, imaginAIry and CogVideo's SAT code, taken",
        "from their checkouts, tiny and with random weights. Errors against fp32, relative 2-norm, the",
        "worst output of each row; `inf` is NaN or Inf, `refused` a dtype error of the program's own code.",
        "A row is solved when it is bit for bit exact in fp32, finite in fp16 and nearer to fp32 than",
        "bf16. Where the code mixes dtypes, bf16 is given the same casts as fp16.",
        "",
        f"{len(classes)} classes; {len(done)} of {len(rows)} rows solved ({share:.0%}), {exact} exact in"
        f" fp32, {folded} by exponents. Median bf16 : rescaled fp16 = {ratio:.1f}.",
        "",
        f"| class | overflow | peak | exact in fp32 | {' | '.join(COLUMNS)} | bf16 : rescaled | folds |"
        " multiplies | FLOPs in fp32 | what stayed in fp32, and why |",
        f"|---|---|--:|---|{'--:|' * (len(COLUMNS) + 4)}---|",
    ]
    return "\n".join([*lines, *map(format_row, rows.values())]) + "\n"


def is_solved(row: dict[str, Any]) -> bool:
    """Exact, finite, and nearer than bf16."""
    return "failure" not in row and row["exact"] and find_ratio(row) > 1


def find_ratio(row: dict[str, Any]) -> float:
    """bf16's error over that of rescaled fp16."""
    return float(row["bf16"]["l2"] / row["rescaled fp16"]["l2"])


def format_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    if "failure" in row:
        why = " ".join(row["failure"].split())[:300]
        return (
            f"| {row['class']} | {row['way']} | | not solved |{' |' * (len(COLUMNS) + 4)} {why} |"
        )
    cells = [
        row["class"],
        row["way"],
        f"{row['peak']:.1e}",
        "yes" if row["exact"] else "**no**",
        *("refused" if row[x] is None else f"{row[x]['l2']:.5f}" for x in COLUMNS),
        f"{find_ratio(row):.1f}",
        str(row["folds"]),
        str(row["multiplies"]),
        f"{row['fp32_flops']:.0%}",
        describe_fp32(row),
    ]
    return f"| {' | '.join(cells)} |"


def describe_fp32(row: dict[str, Any]) -> str:
    """The modules that stay in fp32, and the note of the fall-back."""
    named = ", ".join(f"`{x}`" for x in row["fp32_modules"][:3])
    more = len(row["fp32_modules"]) - 3
    return " ".join([named, f"and {more} more" * (more > 0), " ".join(row["note"].split())[:300]])


def measure_apart(names: list[str]) -> None:
    """Each program in a process of its own; those whose checkout is not here are named."""
    for program in VARIABLES:
        wanted = [name for name in names if EXAMPLES[name].program == program]
        if wanted and (missing := find_missing(program)):
            print(f"{program}: not measured, {' and '.join(missing)} not set")
        elif wanted:
            command = [sys.executable, __file__, "--here", "--classes", *wanted]
            subprocess.run(command, check=True)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--here", action="store_true", help="in this process: classes of one program"
    )
    parser.add_argument(
        "--seeds", type=int, default=0, help="with --row: with so many seeds, stored"
    )
    parser.add_argument("--row", nargs=2, metavar=("CLASS", "WAY"), help="print a row, store none")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    if options.row and options.seeds:
        measure_spread(*options.row, options.seeds)
    elif options.row:
        print(json.dumps(measure_row(*options.row)))
    elif options.table:
        store_rows(load_rows())
    elif options.here:
        for name in options.classes:
            measure_class(name)
    else:
        measure_apart(options.classes)


if __name__ == "__main__":
    main()
