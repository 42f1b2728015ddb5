"""OpenVINO in f16, really executed: graphs without exponents and with them, beside torch's own fp16.

A T5, a CLIP, two blocks of CogVideoX and an autoencoder, tiny and with random weights, whose values
overflow inside, are exported to OpenVINO IR and compiled for f16. Errors are relative L2 to fp32 of torch.
Torch is also run with sums that are rounded to fp16 after each of their terms, as OpenVINO does on Arm.

OpenVINO has fp16 on Arm processors and on x86 ones with AVX512-FP16. Where this one has none, a variable
names a Python with openvino and numpy that runs on one. The result is stored beside those of other kinds of
processor. QEMU emulates an Arm processor with fp16:

    STOPDOWN_FP16_PYTHON="env PYTHONPATH=SITE qemu-aarch64-static -L ROOT -cpu neoverse-n1 PYTHON" \\
        python benchmarks/openvino_f16.py

SITE has the wheels of openvino and numpy for aarch64 unpacked, ROOT is a Debian of arm64, and PYTHON its
`ROOT/usr/bin/python3`. Bochs emulates an x86 one with AVX512-FP16; bochs_python.py says what MACHINE is:

    STOPDOWN_FP16_PYTHON="python benchmarks/bochs_python.py -cpu sapphire_rapids MACHINE" \\
        python benchmarks/openvino_f16.py
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "pipelines")]

from test_onnx_openvino import MODELS, list_inputs, plan_model  # noqa: E402 (the path is set above)

from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.export.onnx_openvino import export_component  # noqa: E402
from stopdown.interception import accumulation  # noqa: E402
from stopdown.interception.patches import Patches  # noqa: E402
from stopdown.numerics import iterate_tensors, relative_l2  # noqa: E402
from stopdown.plans.applier import apply_entry  # noqa: E402

VARIABLE = "STOPDOWN_FP16_PYTHON"
READER = ROOT / "tests" / "readers" / "openvino_reader.py"
MISSING = f"OpenVINO has no fp16 on this processor, and {VARIABLE} names no other"


def find_reader() -> list[str] | None:
    """The command of a Python whose OpenVINO has fp16; None where there is none."""
    if importlib.util.find_spec("openvino") is None:
        return None
    import openvino

    if "FP16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return [sys.executable]
    return shlex.split(os.environ.get(VARIABLE, "")) or None


@contextmanager
def summing_after_each() -> Iterator[None]:
    """Sums of fp16 products rounded to fp16 after each term, convolutions included."""
    with (
        mock.patch.object(accumulation, "GROUP", 1),
        accumulation.summing_in_fp16(),
        _Convolutions(),
    ):
        yield


class _Convolutions(TorchFunctionMode):
    """2D convolutions without groups as products, channel after channel for each position."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in (torch.conv2d, functional.conv2d) or args[0].dtype != torch.float16:
            return func(*args, **(kwargs or {}))
        given, weight, bias, stride, padding = args[:5]
        columns = functional.unfold(
            given.float(), weight.shape[2:], padding=padding, stride=stride
        ).half()
        places = weight.shape[2] * weight.shape[3]
        columns = columns.unflatten(1, (given.shape[1], places)).transpose(1, 2).flatten(1, 2)
        made = torch.matmul(weight.permute(0, 2, 3, 1).flatten(1), columns)
        rows = (given.shape[2] + 2 * padding[0] - weight.shape[2]) // stride[0] + 1
        made = made.unflatten(-1, (rows, -1))
        return made if bias is None else made + bias[:, None, None]


def run_torch(module: torch.nn.Module, call: Any) -> torch.Tensor:
    """The first output of a call, with the arguments in the module's dtype."""
    dtype = next(module.parameters()).dtype
    function, *given = call.place(module)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, given
    )
    with torch.no_grad():
        return next(iterate_tensors(function(*args, **kwargs)))


def write_graphs(name: str, folder: Path) -> dict[str, Any]:
    """A model's graphs and inputs into a folder; its output in fp32, and torch's errors in fp16."""
    module, call = MODELS[name]()
    entry = plan_model(module, call)
    exact = run_torch(module, call)
    for label, plan in (("without", None), ("with", entry)):
        export_component(module, plan, call, folder / f"{name}.{label}.xml", form="openvino")
    given = {key: x.numpy() for key, x in list_inputs(module, call).items()}
    np.savez(folder / f"{name}.npz", **given)
    with Patches() as patches:
        apply_entry(module, entry, patches, cast=True)
        errors = {"torch": relative_l2(run_torch(module, call), exact)}
        with summing_after_each():
            errors["torch_same_sums"] = relative_l2(run_torch(module, call), exact)
    return {"exact": exact, **errors}


def measure(names: list[str], reader: list[str]) -> dict[str, Any]:
    """What the reader makes of the graphs: errors, None for those that are not finite, and its record."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        torch_side = {name: write_graphs(name, folder) for name in names}
        done = subprocess.run(
            [*reader, READER, folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{shlex.join(reader)} failed: {done.stderr}")
        record = json.loads(done.stdout.splitlines()[-1])
        rows = {}
        for name, known in torch_side.items():
            exact = known.pop("exact")
            found = {}
            for label in ("without", "with"):
                for precision in ("f32", "f16"):
                    made = torch.from_numpy(np.load(folder / f"{name}.{label}.{precision}.npy"))
                    error = relative_l2(made, exact)
                    found[f"{label} {precision}"] = error if made.isfinite().all() else None
            rows[name] = {**known, **found, "executed": record["graphs"][f"{name}.with"]["f16"]}
    del record["graphs"]
    return {"reader": record, "rows": rows}


def describe_emulator(reader: list[str]) -> str | None:
    """The program that emulates the processor of a reader, and the processor."""
    names = [re.match(r"qemu-[\w-]+|bochs", Path(x).name) for x in reader]
    name = next((x[0] for x in names if x), None)
    return name and f"{name}, {reader[reader.index('-cpu') + 1]}"


def write_table(record: dict[str, Any], path: Path) -> None:
    """The rows as Markdown, processor after processor."""
    lines = [
        "# OpenVINO in f16\n",
        "Tiny models whose values overflow in fp16, exported to OpenVINO IR and run on processors that "
        "have fp16. Errors are relative to fp32 of torch.\n",
        "*Torch, sums in fp16* is torch's fp16 with sums that are rounded to fp16 after every term; "
        "*torch* sums in fp32. *Nodes* counts those that compute, by precision.",
    ]
    for processor, result in record["processors"].items():
        version = result["reader"]["openvino"].split("-")[0]
        lines += [
            f"\n## {processor}\n",
            f"OpenVINO {version} ({result['emulated'] or 'not emulated'}).\n",
            *list_errors(result["rows"]),
            "\nOne product of fp16 matrices in f16, by the number of terms in its sums:\n",
            *list_products(result["reader"]["probe"]["products"]),
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def list_errors(rows: dict[str, Any]) -> Iterator[str]:
    yield "| model | f16 without exponents | f16 with them | torch, sums in fp16 | torch | nodes |"
    yield "| --- | --: | --: | --: | --: | --- |"
    for name, row in rows.items():
        nodes = ", ".join(f"{count} {x}" for x, count in row["executed"]["nodes"].items())
        keys = ("without f16", "with f16", "torch_same_sums", "torch")
        cells = ["NaN" if row[key] is None else f"{row[key]:.2g}" for key in keys]
        yield f"| {' | '.join((name, *cells, nodes))} |"


def list_products(products: dict[str, Any]) -> Iterator[str]:
    yield "| terms | error | rounded once | as numpy, rounded after every term |"
    yield "| --: | --: | --: | --: |"
    for terms, row in products.items():
        share = f"{100 * row['as_rounded_after_each']:.0f} %"
        yield f"| {terms} | {row['rel_err']:.2g} | {row['rounded_once']:.2g} | {share} |"


def store(result: dict[str, Any]) -> None:
    """Beside what other kinds of processor gave with this machine and these versions."""
    path, machine = RESULTS / "openvino_f16.json", describe_machine()
    known = json.loads(path.read_text()) if path.exists() else {}
    others = known["processors"] if known.get("machine") == machine else {}
    record = {
        "machine": machine,
        "command": f"{VARIABLE}=PYTHON python benchmarks/openvino_f16.py",
        "processors": dict(sorted({**others, result["reader"]["machine"]: result}.items())),
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    write_table(record, path.with_suffix(".md"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", choices=list(MODELS), help="print this model's result alone")
    options = parser.parse_args()
    reader = find_reader()
    if reader is None:
        raise SystemExit(f"{MISSING}.")
    result = measure([options.row] if options.row else list(MODELS), reader)
    if options.row:
        print(json.dumps(result))
        return
    store({"emulated": describe_emulator(reader), **result})


if __name__ == "__main__":
    main()
