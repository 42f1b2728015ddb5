"""Pipelines beyond fp16 that are converted, and what plain Diffusers makes of them, without Stopdown."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stopdown.checkpoints.convert import convert
from stopdown.component_calls.components import find_components
from stopdown.pipelines.requests import Request
from stopdown.pipelines.tiny_pipelines import overflow_
from stopdown.plans.plan_files import read_class_versions, seal_plan
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, Conversion, Plan
from stopdown.sources.source import Source
from stopdown.sources.sources import fingerprint, resolve_source
from stopdown.testing import make_pipeline

SMALLEST = 2.0**-9
"""Weights below are 0 here, so that eight bits of the others outlive a fold by 2^-8 in fp16."""

OVERFLOWING = {
    "sd": ("unet",),
    "sdxl": ("unet", "vae"),
    "cogvideox": ("text_encoder", "transformer", "vae"),
    "svd": ("unet", "vae"),
    "cogview3plus": ("transformer",),
}
SIZES: dict[str, dict[str, Any]] = {
    "cogvideox": {"frames": 9},
    "svd": {"height": 32, "width": 32, "frames": 3},
}

WITHOUT_STOPDOWN = """
import json, sys, warnings
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "stopdown":
            raise ImportError("absent")
sys.meta_path.insert(0, Absent())
warnings.simplefilter("ignore")
"""
"""How a program begins that cannot import Stopdown."""

PLAIN = """
import functools
import diffusers, numpy as np, PIL.Image, torch

@functools.cache
def run(path, dtype, config, words):
    if path.endswith(".safetensors"):
        pipe = diffusers.StableDiffusionPipeline.from_single_file(
            path, config=config, torch_dtype=dtype)
    else:
        pipe = diffusers.DiffusionPipeline.from_pretrained(path, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    arguments = json.loads(words)
    if "image" in arguments:
        picture = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        arguments["image"] = PIL.Image.fromarray(picture)
    noise = torch.Generator().manual_seed(0)
    output = pipe(**arguments, num_inference_steps=2, generator=noise, output_type="np")
    return np.asarray(output[0], dtype=np.float64)

def measure(before, path, dtype, words):
    low, reference = run(path, dtype, before, words), run(before, torch.float32, before, words)
    if not np.isfinite(low).all():
        return None
    return float(np.linalg.norm(low - reference) / np.linalg.norm(reference))

try:
    import stopdown
except ImportError:
    for line in sys.stdin:
        before, after, words = json.loads(line)
        print(json.dumps({
            "plain fp16": measure(before, before, torch.float16, words),
            "bf16": measure(before, before, torch.bfloat16, words),
            "converted fp16": measure(before, after, torch.float16, words),
            "converted fp32": measure(before, after, torch.float32, words),
        }), flush=True)
"""


def build(name: str) -> Any:
    """A tiny pipeline beyond fp16, its weights in bf16 without the smallest."""
    pipe = make_pipeline(name)
    for component in OVERFLOWING[name]:
        overflow_(getattr(pipe, component))
    for module in find_components(pipe).values():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.masked_fill_(tensor.abs() < SMALLEST, 0)
        module.to(torch.bfloat16)
    return pipe


def plan_plainly(name: str, folder: Path) -> Plan:
    """A plan that scales nothing: fp16 for every component of a tiny pipeline that was saved in bf16."""
    pipe = make_pipeline(name, dtype=torch.bfloat16)
    components = tuple(
        ComponentPlan(part, type(module).__name__, sample_weights(module), "fp16")
        for part, module in find_components(pipe).items()
    )
    versions, mark = read_class_versions(), fingerprint(resolve_source(folder))
    kind = type(pipe).__name__
    plan = Plan(str(folder), mark, kind, "fp16", versions, components, "cpu", 0.0)
    return seal_plan(plan)


def measured(name: str) -> dict[str, Any]:
    """What its plan is measured with."""
    return {"prompts": ["a red train"], "request": Request(**SIZES.get(name, {}), steps=2)}


def convert_made(
    name: str, source: Path | Source, output: Any, plan: Plan, **options: Any
) -> Conversion:
    """It converted, at its size."""
    return convert(source, output, plan, request=Request(**SIZES.get(name, {})), **options)


def run_plain(name: str, before: Path, after: Path) -> dict[str, float | None]:
    """Errors of plain Diffusers against its own fp32; None where NaN or Inf came out."""
    sizes = SIZES.get(name, {})
    arguments = {key.replace("frames", "num_frames"): value for key, value in sizes.items()}
    arguments |= {"image": ""} if name == "svd" else {"prompt": "a ball"}
    process = _start_plain()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([str(before), str(after), json.dumps(arguments)]) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "plain Diffusers failed, and said why on stderr"
    found: dict[str, float | None] = json.loads(answer)
    return found


@functools.cache
def _start_plain() -> subprocess.Popen[str]:
    """The process without Stopdown, one in each process that runs tests."""
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_STOPDOWN + PLAIN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def assert_right(errors: Mapping[str, float | None]) -> None:
    """Plain fp16 is broken; converted it is finite, and nearer to fp32 than bf16 by a factor."""
    print(errors)  # noqa: T201 - the figures, with -s
    converted, other = errors["converted fp16"], errors["bf16"]
    assert errors["plain fp16"] is None
    assert converted is not None
    assert other is not None
    assert converted <= other / 4
    assert errors["converted fp32"] == 0.0
