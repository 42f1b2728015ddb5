"""LoRAs on scaled weights: with their exponents, and as they come.

Tiny pipelines whose denoiser leaves fp16, and a random LoRA in every style of names that Diffusers or PEFT
reads, loaded onto a module with folded exponents. `exact` is how many of the things that are done with
LoRAs (loaded, two at once, fused, taken out…) give the bits of the original in fp32. Errors are relative L2
to fp32; `as it comes` is the LoRA without exponents on those weights, in fp32.

    python benchmarks/loras.py
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for folder in (ROOT / "tests", ROOT / "tests" / "pipelines"):
    sys.path.insert(0, str(folder))

from test_loras import call, list_steps  # noqa: E402

from models.lora_cases import (  # noqa: E402 (the path is set above)
    STYLES,
    draw_lora,
    find_denoiser,
    load_lora,
    make_arguments,
    make_family,
    name_lora,
)
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.numerics import relative_l2  # noqa: E402
from stopdown.scaling import folds  # noqa: E402
from stopdown.scaling.folds import cast_, fold_scaling  # noqa: E402
from stopdown.scaling.rescale import rescale_  # noqa: E402

INTRO = """# LoRAs on scaled weights

Tiny pipelines with scaled weights, and a random LoRA in each style of names. *Exact* counts the
operations on LoRAs (loaded, fused, two at once, removed…) whose result in fp32 has the bits of the
original. The other columns are errors relative to fp32. *As it comes* is the LoRA without exponents on
these weights.
"""


def measure(family: str, style: str, root: Path) -> dict[str, Any]:
    """One family in one style of names, loaded onto folded exponents."""
    first = make_family(family)
    arguments = make_arguments(first, family)
    scaling = rescale_(find_denoiser(first)[1], (), arguments).scaling
    drawn = [draw_lora(first, family, seed=seed) for seed in (0, 1)]
    tensors = [name_lora(x, style, family) for x in drawn]
    original, pipe = make_family(family), make_family(family)
    fold_scaling(find_denoiser(pipe)[1], scaling)
    exact = 0
    steps = list_steps((tensors[0], tensors[1]), root, style == "peft")
    for step in steps.values():
        step(original)
        step(pipe)
        exact += torch.equal(call(original, arguments), call(pipe, arguments))
    row: dict[str, Any] = {"family": family, "style": style, "steps": len(steps), "exact": exact}
    return row | measure_errors(family, scaling, arguments, tensors[0], root)


def measure_errors(
    family: str, scaling: Any, arguments: dict[str, Any], tensors: Any, root: Path
) -> dict[str, Any]:
    """With a LoRA: fp16 under its exponents, bf16, plain fp16, and fp32 with the LoRA as it comes."""
    pipes = {
        name: make_family(family) for name in ("fp32", "fp16", "bf16", "plain fp16", "as it comes")
    }
    rescaling = fold_scaling(find_denoiser(pipes["fp16"])[1], scaling)
    cast_(find_denoiser(pipes["fp16"])[1], torch.float16, rescaling)
    find_denoiser(pipes["bf16"])[1].to(torch.bfloat16)
    find_denoiser(pipes["plain fp16"])[1].to(torch.float16)
    with mock.patch.object(folds, "follow_adapters", return_value=None):
        fold_scaling(find_denoiser(pipes["as it comes"])[1], scaling)
    outputs = {}
    for name, pipe in pipes.items():
        load_lora(pipe, tensors, root, "one")
        dtype = next(find_denoiser(pipe)[1].parameters()).dtype
        outputs[name] = call(pipe, arguments, dtype)
    errors = {
        name: float(relative_l2(x, outputs["fp32"]))
        for name, x in outputs.items()
        if name != "fp32"
    }
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """The rows as Markdown."""
    headings = ("family", "style", "exact", "plain fp16", "bf16", "fp16", "as it comes")
    lines = [" | ".join(headings), " | ".join("---" for _ in headings)]
    for row in rows:
        cells = [row["family"], row["style"], f"{row['exact']} of {row['steps']}"]
        cells += ["NaN" if row[name] is None else f"{row[name]:.2g}" for name in headings[3:]]
        lines.append(" | ".join(cells))
    text = "".join(f"| {line} |\n" for line in lines)
    path.write_text(f"{INTRO}\n`python benchmarks/loras.py`\n\n{text}")


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as text:
        for family, styles in STYLES.items():
            for style in styles:
                rows.append(measure(family, style, Path(text)))
                print(json.dumps(rows[-1]), flush=True)
    record = {
        "machine": describe_machine(),
        "command": "python benchmarks/loras.py",
        "rows": rows,
    }
    (RESULTS / "loras.json").write_text(json.dumps(record, indent=2) + "\n")
    write_table(rows, RESULTS / "loras.md")


if __name__ == "__main__":
    main()
