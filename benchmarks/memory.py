"""Predicted and measured peaks of every strategy, their times, and published figures for comparison.

Four parts, each kept in the results by itself:

    python benchmarks/memory.py measured    # predicted over measured peak, and time, on this CPU
    python benchmarks/memory.py published   # CogVideoX-5B and CogView3-Plus-3B without weights
    python benchmarks/memory.py predicted   # well-known models without weights, at their own sizes
    python benchmarks/memory.py reserved    # what the stored run on an H200 would have been forecast now

Measured peaks are those of PyTorch's own CPU allocator, from the profiler's events, plus the weights
that were there when the run began. Times are ratios to everything resident without any strategy, run
anew before every other one, under the profiler too. Networks are cut in depth and have random weights;
widths are those of the real ones. Tiles are made smaller than the small pictures.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLCogVideoX
from full_folders import write_configs

from stopdown.component_calls.components import find_components
from stopdown.devices.environment import describe_machine
from stopdown.memory.caching_allocator import HOPPER_WORKSPACE_BYTES, WORKSPACE_BYTES
from stopdown.memory.forecast import (
    USABLE_SHARE,
    Fit,
    Room,
    choose_prediction,
    predict_all,
    sort_by_time,
)
from stopdown.memory.offloader import Offloader
from stopdown.memory.speed import Speed
from stopdown.memory.strategies import Prediction
from stopdown.number_formats import FORMATS
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.results import read_frames
from stopdown.pipelines.skeletons import build_skeleton, copy_skeleton
from stopdown.plans.applier import apply_without_weights
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.runtime.plan_maker import make_plan
from stopdown.sources.sources import resolve_source
from stopdown.testing import save_pipeline

RESULTS = Path(__file__).parent / "results"
PROMPT = "a red circle moving left on a grey background"

MEASURED: dict[str, dict[str, Any]] = {
    "shapes": {"steps": 2},
    "CogVideoX-2B, cut": {"steps": 1, "frames": 9, "height": 48, "width": 48},
    "CogView3-Plus-3B, cut": {"steps": 1, "height": 64, "width": 64},
    "SVD-XT, cut": {"steps": 1, "frames": 2, "height": 64, "width": 64},
}
"""What is run for real, and at which size."""

TILE = 32
"""Side of a tile in pixels where a network is cut: its own would hold the whole small picture."""

AS_IT_COMES, OFFLOAD = "as it comes", "model offload"
PUBLISHED: dict[str, list[tuple[str, dict[str, int], str, float, str]]] = {
    "CogVideoX-2B": [
        ("fp16", {}, "resident", 33.0, AS_IT_COMES),
        ("fp16", {}, "component", 19.0, OFFLOAD),
        ("fp16", {}, "component+tiling", 11.0, "model offload and VAE tiling"),
    ],
    "CogVideoX-5B": [
        ("bf16", {}, "resident", 33.0, AS_IT_COMES),
        ("bf16", {}, "component", 19.0, OFFLOAD),
        ("bf16", {}, "component+tiling", 11.0, "model offload and VAE tiling"),
    ],
    "CogView3-Plus-3B": [
        ("bf16", {"height": 512, "width": 512}, "resident", 19.0, AS_IT_COMES),
        ("bf16", {"height": 1024, "width": 1024}, "resident", 23.0, AS_IT_COMES),
        ("bf16", {"height": 2048, "width": 2048}, "resident", 25.0, AS_IT_COMES),
        ("bf16", {"height": 1024, "width": 1024}, "component", 11.0, OFFLOAD),
    ],
}
"""Checkpoint → format, size, strategy, published gigabytes, what they were published for."""

PREDICTED: dict[str, str] = {
    "SDXL": "fp16",
    "SVD-XT": "fp16",
    "CogVideoX-2B": "fp16",
    "CogVideoX-5B": "fp16",
    "CogView3-Plus-3B": "fp16",
    "FLUX.1-dev": "fp16",
    "Wan2.1-T2V-14B": "fp16",
}
"""Checkpoint → the 16-bit format that it is run in."""

SOURCE_OF_PUBLISHED = (
    "CogVideoX: huggingface/diffusers#9150, measured there with the 2B checkpoint in fp16 as peaks of "
    "the CUDA allocator in GiB; quoted for 5B since. CogView3-Plus: its model card."
)


def build_request(name: str, steps: int, **sizes: int) -> Request:
    if name.startswith("SVD"):
        picture = np.zeros((sizes["height"], sizes["width"], 3), np.uint8)
        return Request(image=picture, steps=steps, **sizes)
    return Request(prompt=PROMPT, steps=steps, **sizes)


def make_pipeline(name: str, folder: Path) -> Any:
    """A real pipeline in fp32: the bundled one, or random weights in the configurations."""
    if name == "shapes":
        return load_pipeline(resolve_source("shapes"), torch_dtypes=torch.float32)
    import diffusers
    import transformers

    write_configs(name, folder)
    index = json.loads((folder / "model_index.json").read_text())
    parts: dict[str, Any] = {}
    for part, entry in index.items():
        if not isinstance(entry, list):
            continue
        library, kind = entry
        made = getattr(diffusers if library == "diffusers" else transformers, kind)
        if library == "diffusers":
            parts[part] = made.from_config(made.load_config(folder / part))
        elif (folder / part / "config.json").exists():
            parts[part] = made(made.config_class.from_pretrained(folder / part))
        else:
            parts[part] = made.from_pretrained(folder / part)
    pipe = getattr(diffusers, index["_class_name"])(**parts)
    for module in find_components(pipe).values():
        module.eval()
        shrink_tiles(module)
    return pipe


def shrink_tiles(module: Any) -> None:
    if isinstance(module, AutoencoderKLCogVideoX):
        module.enable_tiling(TILE, TILE, 0.25, 0.25)
        module.disable_tiling()
    elif isinstance(module, AutoencoderKL):
        module.tile_sample_min_size, module.tile_latent_min_size = TILE, TILE // 8


def measure(call: Callable[[], Any]) -> tuple[int, Any]:
    """Peak bytes of PyTorch's allocator during a call, and what the call gave."""
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    live = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, result


def count_owned(pipe: Any) -> int:
    tensors = [x for m in find_components(pipe).values() for x in (*m.parameters(), *m.buffers())]
    return sum({id(s): s.nbytes() for x in tensors if (s := x.untyped_storage())}.values())


def run_measured(name: str) -> dict[str, Any]:
    sizes = dict(MEASURED[name])
    request = build_request(name, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        pipe = make_pipeline(name, Path(folder) / "model")
        pipe.set_progress_bar_config(disable=True)
        begun = time.perf_counter()
        fit = predict_all(
            copy_skeleton(pipe), build_arguments(pipe, request), steps=request.steps or 1
        )
        predicted_s = time.perf_counter() - begun
        rows: list[dict[str, Any]] = []
        plain = None
        for one in fit.predictions:
            if len(rows) % 2 == 0:
                _, plain = measure(lambda: run_timed(pipe, request))
            rows.append(run_strategy(pipe, request, one, fit, Path(folder), plain))
    return {"size": sizes, "prediction_s": round(predicted_s, 2), "strategies": rows}


def run_strategy(
    pipe: Any,
    request: Request,
    prediction: Prediction,
    fit: Fit,
    folder: Path,
    plain: tuple[np.ndarray[Any, Any], float],
) -> dict[str, Any]:
    """Peak and time of one strategy, and how far its frames are from those of `resident`.

    Args:
        plain: frames and seconds of a run without a strategy.
    """
    expected, plain_s = plain
    with Offloader(pipe, prediction, (), fit.strays, store=folder):
        owned = count_owned(pipe)
        peak, (found, elapsed_s) = measure(lambda: run_timed(pipe, request))
    row = {
        "strategy": prediction.strategy.name,
        "predicted_bytes": prediction.peak_bytes,
        "measured_bytes": peak + owned,
        "predicted_over_measured": round(prediction.peak_bytes / (peak + owned), 4),
        "moved_bytes": prediction.moved_bytes,
        "time_ratio": round(elapsed_s / plain_s, 3),
        "largest_difference": float(np.abs(found - expected).max()),
        "error": round(float(np.linalg.norm(found - expected) / np.linalg.norm(expected)), 5),
    }
    print(row, flush=True)
    return row


def run_timed(pipe: Any, request: Request) -> tuple[np.ndarray[Any, Any], float]:
    arguments = build_arguments(pipe, request)
    begun = time.perf_counter()
    with torch.no_grad():
        frames = read_frames(pipe(**arguments))
    return frames, time.perf_counter() - begun


def run_published(name: str) -> dict[str, Any]:
    """Predictions at the size that the figures were published for, without weights."""
    rows, begun = [], time.perf_counter()
    fits: dict[str, Fit] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = resolve_source(write_configs(name, Path(folder) / "model"))
        for precision, sizes, strategy, published, what in PUBLISHED[name]:
            key = f"{precision} {sizes}"
            if key not in fits:
                dtype = FORMATS[precision].torch_dtype
                pipe = build_skeleton(source, dict.fromkeys(source.components, dtype))
                request = Request(prompt=PROMPT, steps=50, **sizes)
                fits[key] = predict_all(
                    pipe, build_arguments(pipe, request), steps=50, on_cpu=False
                )
            taken = next(x for x in fits[key].predictions if x.strategy.name == strategy)
            rows.append(
                {
                    "precision": precision,
                    "size": sizes,
                    "strategy": strategy,
                    "published_for": what,
                    "published": published,
                    "predicted_gib": round(taken.peak_bytes / 2**30, 2),
                    "in": taken.component,
                }
            )
            print(name, rows[-1], flush=True)
    return {"prediction_s": round(time.perf_counter() - begun, 1), "rows": rows}


def run_predicted(name: str) -> dict[str, Any]:
    """Bytes of all weights, and peaks at the pipeline's own size, without weights."""
    precision = PREDICTED[name]
    with tempfile.TemporaryDirectory() as folder:
        source = resolve_source(write_configs(name, Path(folder) / "model"))
        dtype = FORMATS[precision].torch_dtype
        pipe = build_skeleton(source, dict.fromkeys(source.components, dtype))
        parts = {
            part: sum(x.numel() for x in module.parameters())
            for part, module in find_components(pipe).items()
        }
        request = Request(prompt=PROMPT, steps=50)
        if name.startswith("SVD"):
            request = Request(image=np.zeros((576, 1024, 3), np.uint8), steps=50)
        arguments = build_arguments(pipe, request)
        fit = predict_all(
            pipe, arguments, steps=50, on_cpu=False, room=Room(workspace_bytes=WORKSPACE_BYTES)
        )
    found = {x.strategy.name: x for x in fit.predictions}
    print(name, parts, {key: x.reserved_bytes for key, x in found.items()}, flush=True)
    return {
        "precision": precision,
        "parameters": parts,
        "flops": fit.predictions[0].flops,
        "peak_bytes": {key: x.peak_bytes for key, x in found.items()},
        "reserved_bytes": {key: x.reserved_bytes for key, x in found.items()},
        "moved_bytes": {key: x.moved_bytes for key, x in found.items()},
        "stored_bytes": {key: x.stored_bytes for key, x in found.items()},
    }


def widen_streams(pipe: Any) -> Plan:
    """A plan for a large CogVideoX as that of the tiny one: the same modules widen its streams.

    Its autoencoder stays in fp16: the tiny one has fewer kinds of modules.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_pipeline("cogvideox", folder)
        small = make_plan(folder)
        tiny = build_skeleton(resolve_source(folder), {})
    entries = []
    for entry in small.components:
        if entry.component == "vae" or entry.scaling is None or entry.scaling.stream is None:
            entries.append(ComponentPlan(entry.component, precision="fp16"))
            continue
        few, many = (find_components(x)[entry.component] for x in (tiny, pipe))
        lists = {
            part.name: widen_names(few, many, getattr(entry.scaling.stream, part.name))
            for part in dataclasses.fields(entry.scaling.stream)
            if part.name != "returns"
        }
        stream = dataclasses.replace(entry.scaling.stream, **lists)
        entries.append(
            ComponentPlan(entry.component, precision="fp16", scaling=Scaling(stream=stream))
        )
    return Plan("", precision="fp16", chosen="rescaled fp16", components=tuple(entries))


def widen_names(few: Any, many: Any, names: Collection[str]) -> tuple[str, ...]:
    """Modules and parameters of a large model that have the name of one of a small one but for numbers."""

    def list_kinds(module: Any) -> dict[str, tuple[str, str]]:
        parts = [*module.named_modules(), *module.named_parameters(), *module.named_buffers()]
        return {name: (re.sub(r"\d+", "#", name), type(part).__name__) for name, part in parts}

    small = list_kinds(few)
    kinds = {small[name] for name in names if name in small}
    return tuple(name for name, kind in list_kinds(many).items() if kind in kinds)


def run_reserved(name: str) -> dict[str, Any]:
    """Forecasts of the run that `on_card_first.json` holds: tensors, and what the allocator reserves."""
    stored = json.loads((RESULTS / "on_card_first.json").read_text())
    asked = stored["rows"]["one command"]["memory"]
    with tempfile.TemporaryDirectory() as folder:
        source = resolve_source(write_configs(name, Path(folder) / "model"))
        pipe = build_skeleton(source, {}, keep_fp32=False)
        apply_without_weights(pipe, widen_streams(pipe))
        pipe.set_progress_bar_config(disable=True)
        arguments = build_arguments(pipe, Request(prompt=PROMPT, steps=2, **stored["request"]))
        begun = time.perf_counter()
        fit = predict_all(
            pipe,
            arguments,
            steps=2,
            on_cpu=False,
            room=Room(workspace_bytes=HOPPER_WORKSPACE_BYTES),
        )
    elapsed_s = time.perf_counter() - begun
    speed = Speed(5e14, 2e10, "in the order of an H200")
    limit = asked["limit_bytes"]
    by_tensors = dataclasses.replace(
        fit, predictions=tuple(dataclasses.replace(x, reserved_bytes=0) for x in fit.predictions)
    )
    chosen = [choose_prediction(sort_by_time(one, speed), limit) for one in (by_tensors, fit)]
    print(name, [x and x.strategy.name for x in chosen], round(elapsed_s), flush=True)
    return {
        "limit_bytes": limit,
        "usable_share": USABLE_SHARE,
        "forecast_then": {key: asked[key] for key in ("strategy", "peak_bytes")},
        "ended_with": stored["rows"]["one command"]["strategy"],
        "chosen_by_tensors": chosen[0].strategy.name if chosen[0] else "",
        "chosen_by_reserved": chosen[1].strategy.name if chosen[1] else "",
        "strategies": [
            {
                "name": x.strategy.name,
                "peak_bytes": x.peak_bytes,
                "component": x.component,
                "reserved_bytes": x.reserved_bytes,
            }
            for x in fit.predictions
        ],
    }


def read_results(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    return results


PARTS: dict[str, tuple[Collection[str], Callable[[str], dict[str, Any]]]] = {
    "measured": (MEASURED, run_measured),
    "published": (PUBLISHED, run_published),
    "predicted": (PREDICTED, run_predicted),
    "reserved": (("CogVideoX-5B",), run_reserved),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--only", nargs="*", help="names of checkpoints")
    chosen = parser.parse_args()
    cases, run = PARTS[chosen.part]
    path = RESULTS / f"memory_{chosen.part}.json"
    for name in chosen.only or cases:
        made = run(name)
        found = {**read_results(path), name: made}
        record = {
            "machine": describe_machine(),
            "command": f"python benchmarks/memory.py {chosen.part}",
            "results": found,
        }
        if chosen.part == "published":
            record["published_by"] = SOURCE_OF_PUBLISHED
        path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
