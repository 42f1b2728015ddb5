"""Peaks of offloading: Stopdown's placements and the hooks of Diffusers and Accelerate, on one pipeline.

A tiny pipeline runs on the simulated device of the tests, which counts each byte that is allocated.
Weights are in fp16 in host memory before each run; `exact` says whether the picture has the bits of the
run with all weights on the device.

    python benchmarks/offload.py
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "tests"))

from device.simulated_device import KIND, load_device  # noqa: E402 (the path is set above)
from models.pipeline_calls import CALLS  # noqa: E402
from stopdown.devices.device_choice import choose_device  # noqa: E402
from stopdown.devices.device_memory import free_memory, peak_memory  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.memory.offloader import Offloader, predict_run  # noqa: E402
from stopdown.testing import make_pipeline  # noqa: E402

KINDS = ("sd", "flux", "cogvideox", "wan")


@contextlib.contextmanager
def place(pipe: Any, kind: str, placement: str) -> Iterator[None]:
    """Put a placement of ours on a pipeline."""
    fit = predict_run(pipe, make_arguments(kind), steps=2, fused=True, device=KIND)
    (taken,) = [x for x in fit.predictions if x.strategy.name == placement]
    with Offloader(pipe, taken, (), fit.strays, device=KIND):
        yield


def group(pipe: Any, kind: str) -> None:
    """Put Diffusers' group offloading on a pipeline."""
    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    pipe.enable_group_offload(torch.device(KIND), offload_type=kind, **options)


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "resident": lambda pipe, _: pipe.to(KIND),
    "component": lambda pipe, kind: place(pipe, kind, "component"),
    "enable_model_cpu_offload": lambda pipe, _: pipe.enable_model_cpu_offload(device=KIND),
    "block": lambda pipe, kind: place(pipe, kind, "block"),
    "enable_group_offload, blocks": lambda pipe, _: group(pipe, "block_level"),
    "enable_group_offload, leaves": lambda pipe, _: group(pipe, "leaf_level"),
    "enable_sequential_cpu_offload": lambda pipe, _: pipe.enable_sequential_cpu_offload(
        device=KIND
    ),
}


def make_arguments(kind: str) -> dict[str, Any]:
    """The arguments of one call."""
    made = {**CALLS[kind], "num_inference_steps": 2, "output_type": "pt"}
    return {**made, "generator": torch.Generator().manual_seed(0)}


def run(kind: str, way: str) -> dict[str, Any]:
    """Run a tiny pipeline in one way; a way that does not run says why."""
    free_memory()  # rings of references keep the pipeline of the last way, with its weights on the device
    pipe = make_pipeline(kind, dtype=torch.float16)
    pipe.set_progress_bar_config(disable=True)
    device = choose_device(KIND)
    try:
        with peak_memory(device) as peak:
            opened = WAYS[way](pipe, kind)
            with opened if hasattr(opened, "__enter__") else contextlib.nullcontext():
                frames = pipe(**make_arguments(kind))[0]
    except Exception as error:  # whatever their hooks make of an unknown device
        return {"pipeline": kind, "way": way, "error": f"{type(error).__name__}: {error}"[:300]}
    flat = frames if isinstance(frames, torch.Tensor) else torch.stack(list(frames))
    return {"pipeline": kind, "way": way, "peak_bytes": peak.peak_bytes, "frames": flat.cpu()}


def main() -> None:
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        load_device(Path(folder)).present(),
        torch.no_grad(),
    ):
        for kind in KINDS:
            wanted = None
            for way in WAYS:
                row = run(kind, way)
                frames = row.pop("frames", None)
                wanted = frames if way == "resident" else wanted
                if frames is not None and wanted is not None:
                    row["exact"] = torch.equal(frames, wanted)
                rows.append(row)
                print(json.dumps(row), flush=True)
    record = {
        "machine": describe_machine(),
        "command": "python benchmarks/offload.py",
        "rows": rows,
    }
    (RESULTS / "offload.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
