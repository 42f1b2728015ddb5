"""Text and image encoders of Diffusers' pipelines: rescaled, in fp16 and certified.

The classes are read from the annotations of the pipelines (`models/encoder_models.py`). Each is built tiny
with random weights and called as pipelines do: without a mask, with one of two prompts padded on the right
or left, with hidden states if a pipeline asks for them. Its values are made to leave fp16: the residual
stream, or, if hidden states are returned, what a block computes before it writes the stream. Exponents rest
on one call; errors are those of another call, against fp32, the worst of all outputs.

    python benchmarks/encoders.py                            # all classes (half an hour)
    python benchmarks/encoders.py --classes Qwen3Model       # some; the rows of others are kept
    python benchmarks/encoders.py --classes Qwen3Model --mask left --states --ranges bound   # one row
    python benchmarks/encoders.py --table                    # only write the table anew
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from models.encoder_models import (  # noqa: E402 (the path is set above)
    ENCODERS,
    MASKS,
    NOT_BUILT,
    asks_for_states,
    list_encoders,
    make_call,
    make_encoder,
    run_encoder,
)
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.errors import StopdownError  # noqa: E402
from stopdown.numerics import relative_l2  # noqa: E402
from stopdown.scaling.folding.folds import cast_  # noqa: E402
from stopdown.scaling.rescale import rescale_  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
STREAM = re.compile(
    r"(o_proj|out_proj|down_proj|\.o|\.wo|fc2|output\.dense|4h_to_h|attention\.dense|conv_2|\.linear2)\."
)
WRITTEN = re.compile(r"(v_proj|\.v|\.value|up_proj|wi_1)\.(weight|bias)$")
READ = re.compile(r"(o_proj|out_proj|\.o|attention\.output\.dense|down_proj|\.wo)\.weight$")
MOST_BITS = 40
LARGEST_OUTPUT = 2.0**12


def overflow(name: str, module: torch.nn.Module, call: Any, way: str) -> int:
    """Make a module's values larger until plain fp16 is wrong; by how many bits, 0 for not at all.

    `residual`: what writes the stream. `inner`: what a block's last matrix reads, which gets smaller by as
    much, so the block's result stays what it is.
    """
    with torch.no_grad():
        wanted = run_encoder(call, torch.float32)
        for bits in range(2, MOST_BITS, 2):
            for key, parameter in module.named_parameters():
                if (way == "residual" and STREAM.search(key)) or (
                    way == "inner" and WRITTEN.search(key)
                ):
                    parameter.mul_(4.0)
                elif way == "inner" and READ.search(key):
                    parameter.mul_(0.25)
            wanted = run_encoder(call, torch.float32)
            if measure_error(module, name, call, torch.float16, wanted) > 0.3:
                return bits
    return 0


def measure_error(
    module: torch.nn.Module, name: str, call: Any, dtype: torch.dtype, wanted: list[torch.Tensor]
) -> float:
    """The worst error of the outputs of a plain cast; inf for NaN and Inf."""
    low = copy.deepcopy(module).to(dtype)
    method = ENCODERS[name].method
    return worst(run_encoder((getattr(low, method) if method else low, *call[1:]), dtype), wanted)


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest relative error of several outputs; inf for NaN and Inf."""
    errors = [float(relative_l2(x, y)) for x, y in zip(found, wanted, strict=True)]
    return max(x if math.isfinite(x) else math.inf for x in errors)


def measure_row(name: str, mask: str, *, states: bool, ranges: str) -> dict[str, Any]:
    """One class, called in one way, with exponents that rest on one thing."""
    row: dict[str, Any] = {"class": name, "mask": mask, "states": states, "ranges": ranges}
    for way in ("inner",) if states else ("residual", "inner"):
        module = make_encoder(name)
        call = make_call(name, module, mask, states=states)
        other = make_call(name, module, mask, states=states, seed=2)
        row |= {"overflow": way, "bits": overflow(name, module, other, way)}
        wanted = run_encoder(other, torch.float32)
        if max(float(x.abs().max()) for x in wanted) < LARGEST_OUTPUT:
            break  # else what it returns is the stream, which would leave fp16 itself
    row["bf16"] = measure_error(module, name, other, torch.bfloat16, wanted)
    row["plain fp16"] = measure_error(module, name, other, torch.float16, wanted)
    started = time.perf_counter()
    try:
        rescaling = rescale_(module, calls=[call], ranges=ranges)
    except StopdownError as error:
        return row | {"refused": " ".join(str(error).split())}
    except Exception as error:  # what this table is there to find
        return row | {"bare": f"{type(error).__name__}: {error}"}
    scaling = rescaling.scaling
    row["elapsed_s"] = round(time.perf_counter() - started, 1)
    row["exact"] = all(map(torch.equal, run_encoder(other, torch.float32), wanted))
    cast_(module, torch.float16, rescaling)
    row["fp16"] = worst(run_encoder(other, torch.float16), wanted)
    row["certified"] = scaling.bounded / scaling.values if scaling.values else None
    row["uncertain"] = list(scaling.uncertain)[:8] if ranges != "measured" else []
    row["fp32 modules"] = list(scaling.fp32_modules)
    row["outputs in fp32"] = len(scaling.outputs)
    return row


def list_rows(name: str, pipelines: set[str]) -> list[tuple[str, bool, str]]:
    """The masks, with and without hidden states, and what ranges rest on."""
    masks = MASKS[:1] if ENCODERS[name].sees else MASKS
    rows = [(masks[-1], False, "measured"), *((mask, False, "bound") for mask in masks)]
    if asks_for_states(pipelines):
        rows += [(masks[-1], True, ranges) for ranges in ("measured", "bound")]
    return rows


def _name_row(row: dict[str, Any]) -> tuple[str, str, bool, str]:
    return row["class"], row["mask"], row["states"], row["ranges"]


def write_table(record: dict[str, Any], path: Path) -> None:
    """The rows as Markdown, and what they come to."""
    rows = record["rows"]
    text = [f"# {__doc__.splitlines()[0]}\n\n", *_describe(rows)]
    text.append("\nClasses that annotations name and that have no row: ")
    text.append("; ".join(f"{x} ({why})" for x, why in NOT_BUILT.items()) + ".\n\n")
    heads = ("class", "mask", "hidden states", "overflow", "ranges", "exact in fp32", "plain fp16",
             "bf16", "fp16", "bf16 : fp16", "certified", "fp32 modules", "outputs in fp32",
             "options of its command")  # fmt: skip
    text.append(_line(heads) + _line(["---"] * len(heads)))
    for row in rows:
        text.append(_line(_cells(row)))
    text.append(
        "\nA row's command is `python benchmarks/encoders.py` with the options in its last column.\n"
    )
    path.write_text("".join(text))


def _describe(rows: list[dict[str, Any]]) -> list[str]:
    solved = [x for x in rows if math.isfinite(x.get("fp16", math.inf))]
    ratios = [x["bf16"] / x["fp16"] for x in solved]
    shares = [x["certified"] or 0 for x in solved if x["ranges"] == "bound"]
    classes = {x["class"] for x in rows}
    return [
        f"{len(classes)} classes, {len(rows)} rows; {sum(x.get('exact', False) for x in rows)} exact in "
        f"fp32; {len(solved)} finite in fp16; {sum('refused' in x for x in rows)} refused; "
        f"{sum('bare' in x for x in rows)} that end in an error which is not ours. bf16's error over "
        f"fp16's: median {statistics.median(ratios):.1f}, least {min(ratios):.1f}. With bounds "
        f"90 % of the fp16 values or more are certified in {sum(x >= 0.9 for x in shares)} of "
        f"{len(shares)} rows.\n"
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    first = [
        row["class"],
        row["mask"],
        "yes" if row["states"] else "no",
        row["overflow"],
        row["ranges"],
    ]
    states = " --states" if row["states"] else ""
    options = f"`--classes {row['class']} --mask {row['mask']}{states} --ranges {row['ranges']}`"
    if "fp16" not in row:
        return [*first, row.get("refused", row.get("bare", "")), *[""] * 7, options]
    share = "" if row["ranges"] == "measured" else f"{row['certified'] or 0:.1%}"
    return [
        *first,
        "yes" if row["exact"] else "no",
        *(f"{row[x]:.2g}" for x in ("plain fp16", "bf16", "fp16")),
        f"{row['bf16'] / row['fp16']:.1f}",
        share,
        ", ".join(row["fp32 modules"]),
        str(row["outputs in fp32"]),
        options,
    ]


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", nargs="+")
    parser.add_argument("--mask", choices=MASKS, help="of these classes this row alone")
    parser.add_argument("--states", action="store_true", help="that row has hidden states")
    parser.add_argument("--ranges", choices=("measured", "bound"), help="of that row")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    path = RESULTS / "encoders.json"
    record = json.loads(path.read_text()) if path.exists() else {"rows": []}
    named = list_encoders()
    chosen = [] if options.table else options.classes or sorted(ENCODERS)
    warnings.simplefilter("ignore")
    for name in chosen:
        listed = list_rows(name, named.get(name, set()))
        one = (options.mask, options.states, options.ranges)
        rows = [x for x in listed if options.mask is None or x == one]
        if not rows:
            parser.error(f"{name} has no such row; its rows are {listed}")
        made = {}
        for mask, states, ranges in rows:
            row = measure_row(name, mask, states=states, ranges=ranges)
            print(json.dumps(row), flush=True)
            made[_name_row(row)] = row
        found = {_name_row(x): x for x in record["rows"]} | made
        mine = [found[name, *x] for x in listed if (name, *x) in found]
        others = [x for x in record["rows"] if x["class"] != name]
        record = {
            "machine": describe_machine(),
            "command": "python benchmarks/encoders.py",
            "rows": sorted(others + mine, key=lambda x: x["class"]),
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
    write_table(record, path.with_suffix(".md"))


if __name__ == "__main__":
    main()
