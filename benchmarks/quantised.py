"""Quantised files with and without exponents: what each format's scales hold, and what comes out in fp16.

    python benchmarks/quantised.py

A transformer of Diffusers' Flux class with values of attention beyond fp16 is written in each format,
planned from the file, and written again with its exponents. Both files are run in fp16 and bf16 from their
dequantised weights; the reference is the quantised file itself in fp32. `holds_down_to` is how far a fold
of an ordinary matrix (64 by 512, deviation 1/16) goes.

With STOPDOWN_COMFYUI, a tiny T5 whose gated products overflow is run by ComfyUI's code besides, where int8
quantises activations, too. Those errors are against Transformers in fp32 with the values that the codes
stand for; `adds` is what fp16 or bf16 adds to the error of the same file in fp32, in squares.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from single_files import read_version

from stopdown.checkpoints.convert import convert
from stopdown.devices.environment import describe_machine
from stopdown.errors import OptionError
from stopdown.plans.calibrated import measure_plan
from stopdown.quantised_files.scale_exponents import bound_weights
from stopdown.sources.sources import resolve_source
from stopdown.sources.weight_files import load_weights, open_weight_file

OUTPUT = Path(__file__).parent / "results" / "quantised.json"

CONFIG = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "in_channels": 32,
    "guidance_embeds": False,
    "axes_dims_rope": [8, 12, 12],
}
INSIDE = 18
"""Values of attention are times two to this."""

GGUF = ("BF16", "F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
SAFETENSORS = ("scaled fp8", "int8 by rows")


def make_model() -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(**CONFIG).eval()
    attention = model.transformer_blocks[0].attn
    pairs = (attention.to_v, attention.to_out[0]), (attention.add_v_proj, attention.to_add_out)
    for inner, outer in pairs:
        inner.weight.data.mul_(2.0**INSIDE)
        inner.bias.data.mul_(2.0**INSIDE)
        outer.weight.data.mul_(2.0**-INSIDE)
    return model


def make_call(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    sizes = {"hidden_states": (1, 16, 32), "encoder_hidden_states": (1, 8, 32)}
    sizes["pooled_projections"] = (1, 32)
    call = {name: torch.randn(size, generator=draw).to(dtype) for name, size in sizes.items()}
    call["timestep"] = torch.tensor([0.5], dtype=dtype)
    return {**call, "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}


def write(path: Path, kind: str, tensors: dict[str, torch.Tensor]) -> Path:
    if kind in GGUF:
        writer = gguf.GGUFWriter(path, "flux")
        type_ = gguf.GGMLQuantizationType[kind]
        for name, value in tensors.items():
            is_matrix = value.dim() > 1
            data = gguf.quants.quantize(value.numpy(), type_) if is_matrix else value.numpy()
            writer.add_tensor(name, data, raw_dtype=type_ if is_matrix else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
    made = {}
    for name, value in tensors.items():
        layer = name.removesuffix(".weight")
        if value.dim() < 2:
            made[name] = value.bfloat16()
        elif kind == "scaled fp8":
            scale = value.abs().max() / 448
            made[name], made[f"{layer}.scale_weight"] = (
                (value / scale).to(torch.float8_e4m3fn),
                scale,
            )
        else:
            scale = value.abs().amax(1, keepdim=True) / 127
            made[name], made[f"{layer}.weight_scale"] = (
                (value / scale).round().to(torch.int8),
                scale,
            )
    save_file(made, path)
    return path


def run(path: Path, dtype: torch.dtype) -> torch.Tensor:
    model = make_model()
    model.load_state_dict(load_weights(path))
    with torch.no_grad():
        return model.to(dtype)(**make_call(dtype)).sample.double()


def measure(kind: str, folder: Path) -> dict[str, Any]:
    suffix = ".gguf" if kind in GGUF else ".safetensors"
    plain = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) / 16
    held = bound_weights(open_weight_file(write(folder / f"x{suffix}", kind, {"x.weight": plain})))
    source = write(folder / f"a{suffix}", kind, dict(make_model().state_dict()))
    exact = run(source, torch.float32)
    errors = {
        name: float((run(source, dtype) - exact).norm() / exact.norm())
        for name, dtype in (("fp16 before", torch.float16), ("bf16", torch.bfloat16))
    }
    row: dict[str, Any] = {
        "format": kind,
        "holds_down_to": held["x.weight"].low,
        "bytes": source.stat().st_size,
        **{name: value if value == value else None for name, value in errors.items()},
    }
    found = resolve_source(source, config=folder / "transformer")
    try:
        plan = measure_plan(found, prompts=[make_call(torch.float32)])
        target = folder / f"b{suffix}"
        from stopdown.pipelines.requests import Request

        convert(found, target, plan, request=Request(arguments=make_call(torch.float32)))
    except OptionError as error:
        return {**row, "refused": str(error)}
    scaling = plan.components[0].scaling
    return {
        **row,
        "fp16 after": float((run(target, torch.float16) - exact).norm() / exact.norm()),
        "equal in fp32": bool(torch.equal(run(target, torch.float32), exact)),
        "folds": len(scaling.exponents),
    }


def measure_in_comfyui() -> list[dict[str, Any]]:
    """A T5 in each layout, by ComfyUI's code; nothing where no variable names a checkout."""
    checkout = os.environ.get("STOPDOWN_COMFYUI")
    if not checkout:
        return []
    tests = Path(__file__).parents[1] / "tests"
    sys.path[:0] = [str(tests), str(tests / "pipelines")]
    from test_quantised_files import measure_added, run_folded_t5

    rows = []
    for layout in ("scaled fp8", "int8"):
        with tempfile.TemporaryDirectory() as name:
            _, old, new, values = run_folded_t5(Path(name), layout)
        is_finite = bool(old["fp16"].isfinite().all())
        measured = measure_added(new, values)
        reader = read_version(Path(checkout))
        rows.append({"format": layout, "reader": reader, "finite before": is_finite, **measured})
        print(json.dumps(rows[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    rows = []
    for kind in (*SAFETENSORS, *GGUF):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_model().save_config(folder / "transformer")
            rows.append(measure(kind, folder))
        print(json.dumps(rows[-1]))
    record = {
        "command": "STOPDOWN_COMFYUI=CHECKOUT python benchmarks/quantised.py",
        "machine": describe_machine(),
        "rows": rows,
        "comfyui": measure_in_comfyui(),
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
