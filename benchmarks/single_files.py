"""Converted single files in the programs that read them: models × readers, errors against fp32.

    export STOPDOWN_COMFYUI=CHECKOUT:CHECKOUT STOPDOWN_SGM=CHECKOUT PYTHONPATH=PACKAGES
    python benchmarks/single_files.py

Each model (`models/single_file_models.py`) is a real class, tiny, with random weights in bf16 and made to
overflow in fp16. Its file has the names of its authors. It is planned from one call and converted; then
Diffusers (`from_single_file`, or `from_pretrained` where the names are its own), the loader and model
code of ComfyUI, and Stability-AI's sgm read both files. `svd: …` are the parts of one file that was
written from a folder. An error is the relative L2 difference from the original in fp32 in the same reader;
`nan` is an output that is not finite. Norms of `svd-unet` have an eps in sgm that is ten times Diffusers'.
The result goes to results/single_files.json, and as a table to results/single_files.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from models.single_file_models import MODELS  # noqa: E402
from readers.single_file_readers import (  # noqa: E402
    SGM,
    UNREAD_BY_DIFFUSERS,
    compare,
    convert_model,
    measure_errors,
    measure_svd,
    place_runs,
    run_in_diffusers,
    run_many_in_comfyui,
)
from stopdown.devices.environment import describe_machine  # noqa: E402

RESULT = Path(__file__).parent / "results" / "single_files.json"
COLUMNS = ("fp16", "bf16", "converted fp16", "converted fp32")


def main() -> None:
    """Measure every model with every reader."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place, name) for name in options.models}
        files = {name: convert_model(name, folder) for name, folder in folders.items()}
        for name in options.models:
            if name not in UNREAD_BY_DIFFUSERS:
                errors = compare(name, run_in_diffusers, files[name], folders[name])
                rows.append({"model": name, "reader": "Diffusers", **errors})
        for program, root, names in list_programs(options.models):
            runs = {name: place_runs(files[name]) for name in names}
            found = run_many_in_comfyui(root, runs, Path(place), may_fail=True, program=program)
            reader = read_version(Path(root))
            rows += [{"model": x, "reader": reader, **measure_errors(found[x])} for x in found]
            if "svd-unet" in names:
                parts = measure_svd(root, program, Path(tempfile.mkdtemp(dir=place)))
                rows += [{"model": f"svd: {x}", "reader": reader, **y} for x, y in parts.items()]
    order = [*options.models, *dict.fromkeys(row["model"] for row in rows if ":" in row["model"])]
    rows.sort(key=lambda row: order.index(row["model"]))
    result = {
        "command": "STOPDOWN_COMFYUI=CHECKOUTS STOPDOWN_SGM=CHECKOUT python benchmarks/single_files.py",
        "machine": describe_machine(),
        "diffusers": importlib.metadata.version("diffusers"),
        "rows": [{key: _name(value) for key, value in row.items()} for row in rows],
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    RESULT.with_suffix(".md").write_text(describe(rows), encoding="utf-8")


def list_programs(models: list[str]) -> list[tuple[str, str, list[str]]]:
    """Programs that variables name: which, the checkout, and those of the models that it has."""
    comfyui = [name for name in models if MODELS[name].inputs]
    roots = filter(None, os.environ.get("STOPDOWN_COMFYUI", "").split(":"))
    found = [("comfyui", root, comfyui) for root in roots]
    if sgm := os.environ.get("STOPDOWN_SGM"):
        found.append(("sgm", sgm, [name for name in models if name in SGM]))
    return found


def read_version(root: Path) -> str:
    """The name and version of a checkout, of ComfyUI or of sgm."""
    name, path = ("ComfyUI", root / "comfyui_version.py")
    if not path.is_file():
        name, path = ("sgm", root / "sgm" / "__init__.py")
    (version,) = re.findall(
        r'^__version__ = "(.*)"', path.read_text(encoding="utf-8"), re.MULTILINE
    )
    return f"{name} {version}"


def _name(value: Any) -> Any:
    return str(value) if value != value else value  # JSON has no NaN


def describe(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, with how many times nearer than bf16."""
    lines = ["| model | reader | fp16 | bf16 | converted fp16 | times nearer | converted fp32 |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|")
    for row in rows:
        cells = [f"{row[key]:.2e}" for key in COLUMNS]
        nearer = row["bf16"] / row["converted fp16"]
        cells.insert(3, f"{nearer:.1f}")
        lines.append(f"| {row['model']} | {row['reader']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
