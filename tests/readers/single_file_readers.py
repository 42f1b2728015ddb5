"""Converted files read by others: Diffusers' `from_single_file` and ComfyUI's own loader and model code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.measured_plans import measure_pipeline
from models.single_file_models import (
    MODELS,
    STEP,
    SVD_INPUTS,
    SVD_PARTS,
    build,
    build_pipeline,
    build_svd,
    draw,
    find_model,
)
from stopdown.checkpoints.convert import convert
from stopdown.component_calls.components import find_components
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.requests import Request
from stopdown.sources.single_file_names import arrange, find_whole
from stopdown.sources.source import Source
from stopdown.sources.sources import resolve_source

RUNS = {
    "exact": ("before", "float32"),
    "fp16": ("before", "float16"),
    "bf16": ("before", "bfloat16"),
    "converted fp16": ("after", "float16"),
    "converted fp32": ("after", "float32"),
}
"""Which file is read in which dtype."""

PUBLISHED_ONLY = ("flux", "chroma", "hunyuan-video", "lumina2")
"""Models of which Diffusers' converter has the published width in its code."""

OWN_NAMES = ("cogview4", "cogvideox-vae")
"""Diffusers reads these under the name of its own weight files."""

UNREAD_BY_DIFFUSERS = (
    *PUBLISHED_ONLY,
    "flux-attention",
    "cogvideox",
    "hunyuan-video-vae",
    "svd-unet",
)
"""No tiny file of these is read by Diffusers."""

SGM = tuple(name for name, model in MODELS.items() if model.sgm)
"""Models that Stability-AI's sgm has."""

Files = Mapping[str, tuple[Path, str]]
"""Name of a run to the file and the dtype."""

Run = Callable[[str, Files, Path], dict[str, torch.Tensor]]
"""Name of a model, its files, and a folder to work in, to what each run gave."""


def save_model(name: str, folder: Path) -> Source:
    """A model's file in the names of its authors, with the config of its class beside."""
    module: Any = build(name)
    part = find_part(name)
    folder.mkdir(exist_ok=True)
    module.save_config(folder / part)
    path = folder / f"{name}.safetensors"
    model = find_model(name)
    tensors = {model.prefix + key: x.bfloat16() for key, x in arrange(module).items()}
    save_file(tensors, path, dict(model.metadata) or None)
    return resolve_source(path, config=folder / part)


def convert_model(name: str, folder: Path) -> tuple[Path, Path]:
    """The file of a model, and what it became by a plan from one call."""
    source, call = save_model(name, folder), draw(find_model(name).call)
    arguments: Mapping[str, Any] = {"vae.decode": call} if "vae" in name else call
    plan = measure_pipeline(source, prompts=[arguments])
    output = folder / f"{name}-fp16.safetensors"
    convert(source, output, plan, request=Request(arguments=arguments))
    return source.path, output


def run_in_comfyui(root: str, name: str, files: Files, folder: Path) -> dict[str, torch.Tensor]:
    """What ComfyUI makes of each file in a dtype; skips a version that does not read the original."""
    found = run_many_in_comfyui(root, {name: files}, folder, may_fail=True)
    return found.get(name) or pytest.skip(f"{root} does not read this model")


def run_many_in_comfyui(
    root: str,
    files: Mapping[str, Files],
    folder: Path,
    *,
    may_fail: bool = False,
    program: str = "comfyui",
) -> dict[str, dict[str, torch.Tensor]]:
    """The same for several models in one process, whose start takes longer than its runs.

    Args:
        may_fail: leave out models of which this version does not read the original.
        program: `comfyui` or `sgm`.
    """
    runs = [run for name in files for run in _list_runs(name, files[name], folder, program)]
    unread = read_in_comfyui(root, runs, may_fail=may_fail, program=program)
    lost = {name for name in files if str(files[name]["exact"][0]) in unread}
    assert unread.keys() <= {str(path) for name in lost for path, _ in files[name].values()}, unread
    return {
        name: {key: load_file(folder / f"{name}-{key}.out")["y"].double() for key in files[name]}
        for name in files
        if name not in lost
    }


def read_in_comfyui(
    root: str,
    runs: Sequence[Mapping[str, Any]],
    *,
    may_fail: bool = False,
    program: str = "comfyui",
) -> dict[str, str]:
    """Start the process that reads and runs files; file to why it could not be read."""
    reader = Path(__file__).parent / "comfyui_reader.py"
    done = subprocess.run(
        [
            sys.executable,
            str(reader),
            json.dumps({"root": root, "runs": runs, "may_fail": may_fail, "program": program}),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    unread: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return unread


def measure_checkpoint(root: str, folder: Path) -> dict[str, float]:
    """Errors of a whole Stable Diffusion, from a Diffusers folder to one file, read by ComfyUI."""
    build_pipeline().save_pretrained(folder / "model")
    request = Request(height=32, width=32, steps=2)
    plan = measure_pipeline(str(folder / "model"), prompts=["a ball"], request=request)
    before, after = folder / "before.safetensors", folder / "after.safetensors"
    convert(folder / "model", after, plan, request=request)
    pipe = load_pipeline(resolve_source(folder / "model"), torch_dtypes=torch.bfloat16)
    prefixes = find_whole("StableDiffusionPipeline").prefixes
    whole = {
        prefixes[name] + key: x
        for name, module in find_components(pipe).items()
        for key, x in arrange(module).items()
    }
    save_file(whole, before)
    noise = draw({"x": (1, 4, 8, 8), "timesteps": STEP})
    save_file(noise, folder / "inputs.safetensors")
    shared = {
        "inputs": str(folder / "inputs.safetensors"),
        "plain": {"prompt": "a ball"},
        "target": "checkpoint",
        "options": {},
        "prefix": "",
    }
    files = place_runs((before, after))
    read_in_comfyui(
        root,
        [
            {**shared, "path": str(path), "dtype": dtype, "output": str(folder / f"{key}.out")}
            for key, (path, dtype) in files.items()
        ],
    )
    return measure_errors({key: load_file(folder / f"{key}.out")["y"].double() for key in files})


def run_in_sgm(root: str, name: str, files: Files, folder: Path) -> dict[str, torch.Tensor]:
    """What Stability-AI's sgm makes of each file in a dtype."""
    return run_many_in_comfyui(root, {name: files}, folder, program="sgm")[name]


def measure_svd(root: str, program: str, folder: Path) -> dict[str, dict[str, float]]:
    """Errors of a whole Stable Video Diffusion, from a Diffusers folder to one file, by its parts."""
    before, after = convert_svd(folder)
    parts = {part: targets for part, targets in SVD_PARTS.items() if program in targets}
    runs = []
    for part, targets in parts.items():
        target, options, method, plain = targets[program]
        inputs = draw(SVD_INPUTS[part])
        tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        save_file(tensors, folder / f"{part}.inputs")
        runs += [
            {
                "inputs": str(folder / f"{part}.inputs"),
                "plain": {
                    **{name: x for name, x in inputs.items() if name not in tensors},
                    **plain,
                },
                "target": target,
                "options": options,
                "prefix": find_whole("StableVideoDiffusionPipeline").prefixes[part.split()[0]],
                "method": method,
                "output_number": 2 if part == "image_encoder" else 0,
                "path": str(path),
                "dtype": dtype,
                "output": str(folder / f"{part}-{key}.out"),
            }
            for key, (path, dtype) in place_runs((before, after)).items()
        ]
    read_in_comfyui(root, runs, program=program)
    return {
        part: measure_errors(
            {key: load_file(folder / f"{part}-{key}.out")["y"].double() for key in RUNS}
        )
        for part in parts
    }


def convert_svd(folder: Path) -> tuple[Path, Path]:
    """One file as it is, and one that was converted, of a folder.

    What was multiplied from two tensors is rounded to 16 bits in both, as a file holds it.
    """
    build_svd().save_pretrained(folder / "model")
    request = Request(height=32, width=32, frames=3, steps=2)
    plan = measure_pipeline(str(folder / "model"), prompts=[""], request=request)
    before, after = folder / "before.safetensors", folder / "after.safetensors"
    convert(folder / "model", after, plan, request=request)
    pipe = load_pipeline(resolve_source(folder / "model"), torch_dtypes=torch.float32)
    table = find_whole("StableVideoDiffusionPipeline")
    whole = {
        prefix + key: x if torch.equal(x, x.bfloat16().float()) else x.half().float()
        for name, prefix in table.prefixes.items()
        for key, x in arrange(getattr(pipe, name), table.layouts.get(name, "")).items()
    }
    save_file(whole, before)
    return before, after


def _list_runs(name: str, files: Files, folder: Path, program: str) -> list[dict[str, Any]]:
    model, inputs = MODELS[name], draw(MODELS[name].inputs)
    tensors = {key: x for key, x in inputs.items() if isinstance(x, torch.Tensor)}
    place = folder / f"{name}-inputs.safetensors"
    save_file(tensors, place)
    shared = {
        "inputs": str(place),
        "plain": {key: x for key, x in inputs.items() if key not in tensors},
        "target": model.sgm if program == "sgm" else model.target,
        "options": dict(model.sgm_options if program == "sgm" else model.options),
        "prefix": model.prefix if model.target else "",  # ComfyUI's own loader takes it away
        "method": "decode" if find_part(name) == "vae" else "forward",
    }
    return [
        {**shared, "path": str(path), "dtype": dtype, "output": str(folder / f"{name}-{key}.out")}
        for key, (path, dtype) in files.items()
    ]


def run_in_diffusers(name: str, files: Files, folder: Path) -> dict[str, torch.Tensor]:
    """What the class in Diffusers makes of each file in a dtype."""
    made: Any = build(name)
    call, part, found = draw(MODELS[name].call), find_part(name), {}
    for key, (path, dtype_name) in files.items():
        dtype = getattr(torch, dtype_name)
        module = _load_in_diffusers(name, type(made), path, folder, dtype)
        arguments = {name: cast(value, dtype) for name, value in call.items()}
        with torch.no_grad():
            run = module.decode if part == "vae" else module
            y = run(**arguments, return_dict=False)[0]
        found[key] = (y[0] if isinstance(y, list) else y).double()
    return found


def _load_in_diffusers(name: str, kind: Any, path: Path, folder: Path, dtype: torch.dtype) -> Any:
    part = find_part(name)
    if name not in OWN_NAMES:
        return kind.from_single_file(str(path), config=str(folder), subfolder=part, dtype=dtype)
    place = folder / part / "diffusion_pytorch_model.safetensors"
    place.unlink(missing_ok=True)
    place.symlink_to(path.resolve())
    return kind.from_pretrained(folder, subfolder=part, dtype=dtype)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The tensors in a value in a dtype."""
    if isinstance(value, (list, tuple)):
        return type(value)(cast(one, dtype) for one in value)
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def measure(name: str, run: Run, folder: Path) -> dict[str, float]:
    """Errors against the original in fp32, all by one reader; NaN where they are not finite."""
    return compare(name, run, convert_model(name, folder), folder)


def compare(name: str, run: Run, files: tuple[Path, Path], folder: Path) -> dict[str, float]:
    """The same, of a file and what it became."""
    return measure_errors(run(name, place_runs(files), folder))


def place_runs(files: tuple[Path, Path]) -> Files:
    """`RUNS` of a file and what it became."""
    places = dict(zip(("before", "after"), files, strict=True))
    return {key: (places[x], dtype) for key, (x, dtype) in RUNS.items()}


def measure_errors(found: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Relative L2 difference of each run from the exact one."""
    exact = found["exact"]
    return {
        key: float((y - exact).norm() / exact.norm()) for key, y in found.items() if key != "exact"
    }


def find_part(name: str) -> str:
    """The component that a model is."""
    return "vae" if "vae" in name else "unet" if "unet" in name else "transformer"
