"""Exponents in quantised files: exact in the scales, read by programs that are not ours.

STOPDOWN_COMFYUI names a checkout of ComfyUI; its packages come from PYTHONPATH.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.rescaling_models import measure_call
from models.weight_file_samples import (
    Tensors,
    draw,
    quantise_fp8,
    quantise_int8,
    write_gguf,
    write_sample,
)
from stopdown.errors import OptionError, ScalingError
from stopdown.interception.patches import Patches
from stopdown.numerics import relative_l2
from stopdown.plans.plan_files import seal_plan
from stopdown.quantised_files.gguf_files import SCALES
from stopdown.quantised_files.scale_exponents import bound_weights, fold_file, is_power
from stopdown.records import Plan, to_json
from stopdown.scaling.fold_bounds import MOST_LOSS, FoldBound, put_bounds
from stopdown.scaling.search import find_folds
from stopdown.sources.headers import RESCALED_ENTRY
from stopdown.sources.weight_files import open_weight_file

Run = Callable[..., tuple[int, str, str]]

CHECKOUT = os.environ.get("STOPDOWN_COMFYUI", "")
ENTRY = {RESCALED_ENTRY: "all: weights are times powers of two"}
needs_comfyui = pytest.mark.skipif(
    not CHECKOUT, reason="STOPDOWN_COMFYUI names no checkout of ComfyUI"
)


def load_values(path: Path) -> Tensors:
    return {weight.name: weight.load() for weight in open_weight_file(path).weights}


def count_rows(path: Path) -> dict[str, int]:
    return {x.name: x.shape[0] if x.shape else 1 for x in open_weight_file(path).weights}


def spread(path: Path, exponents: Mapping[str, int]) -> Tensors:
    """Exponent of each row of each weight; `name[0:64]` is a block of rows."""
    rows = count_rows(path)
    folds = {name: torch.zeros(size, dtype=torch.int32) for name, size in rows.items()}
    for name, exponent in exponents.items():
        bare, _, block = name.partition("[")
        start, _, stop = block.rstrip("]").partition(":")
        folds[bare][int(start or 0) : int(stop or rows[bare])] = exponent
    return folds


# ---------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize(
    "sample", ["plain", "scaled fp8", "comfy int8", "comfy metadata", "bitsandbytes int8"]
)
def test_each_layout_is_folded_bit_for_bit(tmp_path: Path, sample: str) -> None:
    """Values are 2**k times the original's; codes, names, dtypes and order are those of the source."""
    source, target = write_sample(sample, tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    exponents = dict.fromkeys(count_rows(source), -3)
    before = source.read_bytes()
    fold_file(source, target, spread(source, exponents), {}, ENTRY)
    assert source.read_bytes() == before
    for name, value in load_values(source).items():
        assert torch.equal(value * 2.0**-3, load_values(target)[name]), name
    old, new = load_file(source), load_file(target)
    assert {k: (v.dtype, v.shape) for k, v in old.items()} == {
        k: (v.dtype, v.shape) for k, v in new.items()
    }
    codes = [name for name, value in old.items() if value.element_size() == 1]
    assert all(torch.equal(old[x].view(torch.uint8), new[x].view(torch.uint8)) for x in codes)
    assert open_weight_file(target).metadata[RESCALED_ENTRY] == ENTRY[RESCALED_ENTRY]


def test_rows_have_exponents_of_their_own(tmp_path: Path) -> None:
    """Where each row has a scale; a weight with one scale is refused."""
    rows = torch.arange(64).int() % 7 - 3
    source = write_sample("comfy int8", tmp_path / "a.safetensors")
    fold_file(source, tmp_path / "b.safetensors", {"ff.weight": rows}, {}, {})
    wanted = torch.ldexp(load_values(source)["ff.weight"], rows[:, None])
    assert torch.equal(load_values(tmp_path / "b.safetensors")["ff.weight"], wanted)
    source = write_sample("comfy metadata", tmp_path / "a.safetensors")
    with pytest.raises(ScalingError, match=r"ff.weight has one scale .* needs one for each row"):
        fold_file(source, tmp_path / "c.safetensors", {"ff.weight": rows}, {}, {})


def test_the_scale_of_an_input_follows_it(tmp_path: Path) -> None:
    """What divides a layer's input before it is quantised is times the input's power of two."""
    source = write_sample(
        "scaled fp8", tmp_path / "a.safetensors", ff_scale_input=torch.tensor(0.75)
    )
    name = "model.diffusion_model.ff.weight"
    fold_file(source, tmp_path / "b.safetensors", spread(source, {name: -2}), {name: -5}, {})
    found = load_file(tmp_path / "b.safetensors")
    assert float(found["model.diffusion_model.ff.scale_input"]) == 0.75 * 2.0**-5


@pytest.mark.parametrize("kind", sorted(SCALES))
def test_gguf_scales_are_where_the_table_says(tmp_path: Path, kind: str) -> None:
    """Blocks of random codes, unpacked by the gguf package: exactly 2**k times what they were."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    type_ = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[type_]
    blocks = np.random.default_rng(0).integers(0, 256, (4, 3 * size), dtype=np.uint8)
    for at in SCALES[kind]:
        for start in range(0, 3 * size, size):
            scale = np.array([0.01, 0.5, 1.0, 3.0], np.float16).view(np.uint8).reshape(4, 2)
            blocks[:, start + at : start + at + 2] = scale
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "flux")
    writer.add_tensor("x", blocks, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rows = torch.tensor([-2, 0, 3, 1]).int()
    fold_file(tmp_path / "a.gguf", tmp_path / "b.gguf", {"x": rows}, {}, ENTRY)
    old, new = (
        gguf.quants.dequantize(gguf.GGUFReader(tmp_path / name).tensors[0].data, type_)
        for name in ("a.gguf", "b.gguf")
    )
    assert old.shape == (4, 3 * values)
    assert np.array_equal(np.ldexp(old, rows.numpy()[:, None]), new, equal_nan=True)
    assert np.isfinite(new).all()


def measure_loss(scales: torch.Tensor, exponent: int) -> float:
    """Relative L2 error of scales that were multiplied and rounded."""
    exact = scales.double() * 2.0**exponent
    return float((exact.to(scales.dtype).double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("kind", "low"),
    [("Q8_0", -4), ("Q5_0", -7), ("Q4_0", -8), ("Q4_1", -11), ("BF16", -100), ("F32", -100)],
)
def test_formats_hold_what_was_measured(tmp_path: Path, kind: str, low: int) -> None:
    """Down to the bound a weight keeps its bits, below it loses more than half a place of fp16."""
    path = write_gguf(tmp_path / "a.gguf", kind, {"x": draw(64, 512).numpy()})
    (weight,) = open_weight_file(path).weights
    bound = bound_weights(open_weight_file(path))["x"]
    assert bound.low == low
    if weight.read_scales is not None:
        scales = weight.read_scales()
        assert measure_loss(scales, low) <= MOST_LOSS < measure_loss(scales, low - 1)


def test_what_is_rescaled_already_is_refused(tmp_path: Path) -> None:
    """A file that was folded once is not folded again."""
    source = write_sample("comfy int8", tmp_path / "a.safetensors")
    fold_file(source, tmp_path / "b.safetensors", spread(source, {"ff.weight": -1}), {}, ENTRY)
    with pytest.raises(OptionError, match="is already rescaled"):
        fold_file(tmp_path / "b.safetensors", tmp_path / "c.safetensors", {}, {}, ENTRY)
    assert not (tmp_path / "c.safetensors").exists()


def test_torchao_reads_what_was_folded(tmp_path: Path) -> None:
    """Its own reader gives weights that are 2**k times what they were, bit for bit."""
    quantization = pytest.importorskip("torchao.quantization")
    from safetensors import safe_open
    from torchao.prototype.safetensors import safetensors_support as support

    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(version=2))
    state = {name: x.data for name, x in layer.state_dict().items()}
    tensors, metadata = support.flatten_tensor_state_dict(state)
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    rows = torch.arange(64).int() % 5 - 4
    fold_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", {"0.weight": rows}, {}, ENTRY)
    with safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        said = {key: value for key, value in file.metadata().items() if key != RESCALED_ENTRY}
    found, _ = support.unflatten_tensor_state_dict(load_file(tmp_path / "b.safetensors"), said)
    before, after = state["0.weight"].dequantize(), found["0.weight"].dequantize()
    assert torch.equal(torch.ldexp(before, rows[:, None]), after)


def test_bitsandbytes_reads_what_was_folded(tmp_path: Path) -> None:
    """Its own reader of nf4 gives weights that are 2**k times what they were, bit for bit."""
    bnb = pytest.importorskip("bitsandbytes")

    def write(name: str, **options: Any) -> Path:
        layer = bnb.nn.Linear4bit(64, 64, quant_type="nf4")
        layer.weight = bnb.nn.Params4bit(
            draw(64, 64), requires_grad=False, quant_type="nf4", **options
        ).to("cpu")
        save_file({f"ff.{k}": v for k, v in layer.state_dict().items()}, tmp_path / name)
        return tmp_path / name

    def read(path: Path) -> torch.Tensor:
        state = {name.removeprefix("ff."): x for name, x in load_file(path).items()}
        parts = {name: x for name, x in state.items() if name.startswith("weight.")}
        weight = bnb.nn.Params4bit.from_prequantized(state["weight"], parts, device="cpu")
        return bnb.functional.dequantize_4bit(weight.data, weight.quant_state)

    source = write("a.safetensors", compress_statistics=False)
    (weight,) = [x for x in open_weight_file(source).weights if x.name == "ff.weight"]
    folds = {"ff.weight": torch.full((weight.shape[0],), -6).int()}
    fold_file(source, tmp_path / "b.safetensors", folds, {}, ENTRY)
    assert torch.equal(read(source) * 2.0**-6, read(tmp_path / "b.safetensors"))
    twice = write("c.safetensors", compress_statistics=True)
    with pytest.raises(ScalingError, match="are codes themselves"):
        fold_file(twice, tmp_path / "d.safetensors", folds, {}, ENTRY)


# ---------------------------------------------------------------------------------------------
# Whole models, by readers that are not ours

INSIDE = 14
"""Between two products values are times two to this, and behind them as they were."""

T5_CONFIG = {
    "num_layers": 2, "d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 128, "vocab_size": 100,
    "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True, "model_type": "t5",
}  # fmt: skip


@functools.cache
def make_t5() -> torch.nn.Module:
    """An encoder of Transformers whose gated products overflow in fp16."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    names = ("num_layers", "d_model", "num_heads", "d_kv", "d_ff", "vocab_size")
    sizes = {name: T5_CONFIG[name] for name in names}
    model = T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu")).eval()
    for block in model.encoder.block:
        dense = block.layer[1].DenseReluDense
        dense.wi_1.weight.data.mul_(2.0**INSIDE)
        dense.wo.weight.data.mul_(2.0**-INSIDE)
    return model


def write_t5(path: Path, layout: str) -> Path:
    tensors: Tensors = {}
    said = {"scaled fp8": "float8_e4m3fn", "fp8": "float8_e4m3fn", "int8": "int8_tensorwise"}
    for name, value in make_t5().state_dict().items():
        layer = name.removesuffix(".weight")
        if name == "encoder.embed_tokens.weight":
            continue
        if value.dim() < 2 or "relative" in name or "shared" in name:
            tensors[name] = value.bfloat16()
            continue
        codes, scale = quantise_int8(value) if layout == "int8" else quantise_fp8(value)
        tensors[name] = codes
        tensors[f"{layer}.{'scale_weight' if layout == 'scaled fp8' else 'weight_scale'}"] = scale
        if layout != "scaled fp8":
            text = json.dumps({"format": said[layout]}).encode()
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    if layout == "scaled fp8":
        tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(tensors, path)
    return path


def fold_model(
    module: torch.nn.Module, source: Path, target: Path, kwargs: Mapping[str, Any]
) -> dict[str, int]:
    """Write a file again with the exponents that its module needs; its names are the module's."""
    missing = module.load_state_dict(load_values(source), strict=False)
    assert not missing.unexpected_keys
    with Patches() as patches:
        put_bounds(module, bound_weights(open_weight_file(source)), patches)
        found = find_folds(module, [measure_call(module, (), kwargs)])
    assert found is not None
    folds = spread(source, found.exponents)
    fold_file(source, target, folds, {}, ENTRY)
    before, after = load_values(source), load_values(target)
    for name, rows in folds.items():
        wanted = torch.ldexp(before[name], rows.reshape(-1, *(1 for _ in before[name].shape[1:])))
        assert torch.equal(after[name], wanted), f"{name} lost bits of its scales"
    return dict(found.exponents)


def run_comfyui(path: Path, output: Path) -> Tensors:
    """What ComfyUI's loader and model make of a file, in its own process."""
    paths = os.pathsep.join([CHECKOUT, os.environ.get("PYTHONPATH", "")])
    script = Path(__file__).parents[1] / "readers" / "comfyui_t5.py"
    words = [sys.executable, script, json.dumps(T5_CONFIG), path, "", output]
    subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, check=True, capture_output=True)
    return torch.load(output)


def run_folded_t5(
    folder: Path, layout: str
) -> tuple[dict[str, int], Tensors, Tensors, torch.Tensor]:
    """The exponents of a T5's file, what ComfyUI makes of it before and after, and what its values give.

    The last is of Transformers, in fp32, with the values that the file's codes stand for.
    """
    source, call = write_t5(folder / "a.safetensors", layout), {"input_ids": torch.arange(12)[None]}
    exponents = fold_model(make_t5(), source, folder / "b.safetensors", call)
    old = run_comfyui(source, folder / "a.pt")
    new = run_comfyui(folder / "b.safetensors", folder / "b.pt")
    model = copy.deepcopy(make_t5())
    model.load_state_dict(load_values(source), strict=False)
    with torch.no_grad():
        return exponents, old, new, model(**call).last_hidden_state


def measure_added(new: Tensors, values: torch.Tensor) -> dict[str, float]:
    """What each format is off the values that the codes stand for, and what fp16 and bf16 add to that.

    int8 quantises the activations, too: each row of them, anew after every rounding. So an error against
    int8 in fp32 counts its own noise twice; what a format adds is found in squares.
    """
    found = {x: float(relative_l2(new[x].float(), values)) for x in ("fp32", "fp16", "bf16")}
    for name in ("fp16", "bf16"):
        found[f"{name} adds"] = max(found[name] ** 2 - found["fp32"] ** 2, 0.0) ** 0.5
        found[f"{name} against fp32"] = float(relative_l2(new[name].float(), new["fp32"]))
    return found


@needs_comfyui
@pytest.mark.parametrize("layout", ["scaled fp8", "fp8", "int8"])
def test_comfyui_reads_what_was_folded(tmp_path: Path, layout: str) -> None:
    """fp32 equal bit for bit; in fp16 NaN before, and after it adds a sixth of what bf16 adds, or less.

    Added to the error that the quantised file has itself in fp32, which is that of its activations in int8.
    """
    exponents, old, new, values = run_folded_t5(tmp_path, layout)
    assert torch.equal(old["fp32"], new["fp32"])
    name = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    scaled = torch.ldexp(old["fp32-weight"], torch.tensor(exponents[name]))
    assert exponents[name]
    assert torch.equal(scaled, new["fp32-weight"])
    assert not bool(old["fp16"].isfinite().all())
    errors = measure_added(new, values)
    if layout == "int8":
        assert errors["fp32"] > 0.01
        assert 6 * errors["fp16 adds"] < errors["bf16 adds"]
    else:
        assert errors["fp32"] < 1e-5
        assert 6 * errors["fp16 against fp32"] < errors["bf16 against fp32"]


FLUX_CONFIG = {
    "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2,
    "joint_attention_dim": 32, "pooled_projection_dim": 32, "in_channels": 32, "guidance_embeds": False,
    "axes_dims_rope": [8, 12, 12],
}  # fmt: skip


def make_flux() -> torch.nn.Module:
    """A transformer of Diffusers whose values of attention overflow in fp16."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(**FLUX_CONFIG).eval()
    attention = model.transformer_blocks[0].attn
    for inner, outer in (
        (attention.to_v, attention.to_out[0]),
        (attention.add_v_proj, attention.to_add_out),
    ):
        inner.weight.data.mul_(2.0**18)
        inner.bias.data.mul_(2.0**18)
        outer.weight.data.mul_(2.0**-18)
    return model


def make_flux_call(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": draw(1, 16, 32).to(dtype) * 16,
        "encoder_hidden_states": draw(1, 8, 32, seed=1).to(dtype) * 16,
        "pooled_projections": draw(1, 32, seed=2).to(dtype) * 16,
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def write_flux(path: Path, kind: str) -> Path:
    tensors = {name: value.numpy() for name, value in make_flux().state_dict().items()}
    return write_gguf(path, kind, tensors)


def run_diffusers(path: Path, folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """What Diffusers' own loader of GGUF makes of a file."""
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    make_flux().save_config(folder)
    model = FluxTransformer2DModel.from_single_file(
        str(path), config=str(folder), dtype=dtype,
        quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
    )  # fmt: skip
    with torch.no_grad():
        return model(**make_flux_call(dtype)).sample.float()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Q5_1", "Q4_1", "BF16"])
def test_diffusers_reads_gguf_that_was_folded(tmp_path: Path, kind: str) -> None:
    """fp32 equal bit for bit; in fp16 NaN before, and after nearer to fp32 than bf16 is."""
    pytest.importorskip("gguf")
    source = write_flux(tmp_path / "a.gguf", kind)
    fold_model(make_flux(), source, tmp_path / "b.gguf", make_flux_call())
    run = functools.partial(run_diffusers, folder=tmp_path / "config")
    exact = run(source, dtype=torch.float32)
    assert torch.equal(exact, run(tmp_path / "b.gguf", dtype=torch.float32))
    assert not bool(run(source, dtype=torch.float16).isfinite().all())
    errors = [
        float((run(tmp_path / "b.gguf", dtype=dtype) - exact).norm() / exact.norm())
        for dtype in (torch.float16, torch.bfloat16)
    ]
    assert 6 * errors[0] < errors[1]


class Gate(torch.nn.Module):
    """A product of two products of its input, in front of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))
        self.c.weight.data.mul_(2.0**-14)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x) * self.b(x))


def write_gate(path: Path, kind: str) -> Path:
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    return write_gguf(path, kind, {x: y.numpy() for x, y in Gate().state_dict().items()})


LARGE = {"x": draw(4, 64) * 2.0**17}


def test_a_format_that_does_not_hold_the_fold_is_refused_with_the_number(tmp_path: Path) -> None:
    """The solver has the bound of Q8_0 and says how far it goes, and how far it would have to."""
    source = write_gate(tmp_path / "a.gguf", "Q8_0")
    with pytest.raises(ScalingError) as caught:
        fold_model(Gate(), source, tmp_path / "b.gguf", LARGE)
    message = str(caught.value)
    assert "The formats of its weights do not hold the exponents that it needs: " in message
    assert re.search(
        r"[ab]\.weight needs 2\*\*-\d+, and the Q8_0 scales hold it to 2\*\*-4", message
    )
    assert not (tmp_path / "b.gguf").exists()


def test_a_format_that_holds_it_is_folded(tmp_path: Path) -> None:
    """The same module in Q4_1, whose scales have fewer bits, and not where its bounds are left away."""
    assert fold_model(Gate(), write_gate(tmp_path / "a.gguf", "Q4_1"), tmp_path / "b.gguf", LARGE)


def test_without_bounds_scales_are_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal comes from the bounds: without them the fold is made, and bits are lost."""
    source = write_gate(tmp_path / "a.gguf", "Q8_0")
    free = dict.fromkeys(Gate().state_dict(), FoldBound())
    monkeypatch.setattr(sys.modules[__name__], "bound_weights", lambda file: free)
    with pytest.raises(AssertionError, match="lost bits"):
        fold_model(Gate(), source, tmp_path / "b.gguf", LARGE)


# ---------------------------------------------------------------------------------------------
# The command line


def write_flux_fp8(path: Path) -> Path:
    """With one scale for each matrix, as scaled fp8 files have them."""
    tensors: Tensors = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, value in make_flux().state_dict().items():
        if value.dim() < 2:
            tensors[name] = value.bfloat16()
            continue
        tensors[name], scale = quantise_fp8(value)
        tensors[f"{name.removesuffix('.weight')}.scale_weight"] = scale
    save_file(tensors, path)
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", [".gguf", ".safetensors"])
def test_a_quantised_file_is_planned_and_converted(tmp_path: Path, run: Run, suffix: str) -> None:
    """From the file alone: check, plan by a recorded call, convert; values are 2**k times the old."""
    pytest.importorskip("gguf")
    source, target = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    write_flux(source, "Q5_1") if suffix == ".gguf" else write_flux_fp8(source)
    make_flux().save_config(tmp_path / "transformer")
    save_file(make_flux_call(), tmp_path / "call.safetensors")
    given = "--config", tmp_path / "transformer", "--call", tmp_path / "call.safetensors"
    plan = tmp_path / "plan.json"
    content = source.read_bytes()
    code, _, err = run("plan", source, *given, "-o", plan)
    assert code == 0, err
    code, out, err = run("convert", source, target, *given, "--plan", plan, "--json")
    assert code == 0, err
    assert json.loads(out)["components"][0]["precision"] == "as quantised"
    assert source.read_bytes() == content
    before, after = load_values(source), load_values(target)
    found = {name: find_exponents(value, after[name]) for name, value in before.items()}
    assert any(bool(found[name].any()) for name in found if "to_v.weight" in name)
    model = make_flux()
    for values, is_finite in ((before, False), (after, True)):
        model.load_state_dict(values)
        with torch.no_grad():
            made = model.half()(**make_flux_call(torch.float16)).sample
        assert bool(made.isfinite().all()) == is_finite
        model.float()
    code, out, _ = run("check", target, "--device", "v100")
    assert "Rescaled already: transformer: weights are times powers of two" in out
    code, _, err = run("convert", target, tmp_path / f"c{suffix}", *given, "--plan", plan)
    assert code == 2
    assert not (tmp_path / f"c{suffix}").exists()


def test_a_file_is_not_written_as_another_kind(tmp_path: Path, run: Run) -> None:
    """A GGUF file stays one."""
    pytest.importorskip("gguf")
    write_flux(tmp_path / "a.gguf", "Q5_1")
    (tmp_path / "plan.json").write_text(to_json(make_plan_of_nothing()))
    code, _, err = run(
        "convert", tmp_path / "a.gguf", tmp_path / "b.safetensors", "--plan", tmp_path / "plan.json"
    )
    assert code == 2
    assert "is another kind of file than" in err


def find_exponents(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Exponent of each row by which one is the other, bit for bit."""
    rows, others = (x.reshape(len(x), -1) for x in (before, after))
    ratios = others.abs().amax(1) / rows.abs().amax(1)
    exponents = torch.where(ratios.isfinite(), ratios, 1.0).log2().round().int()
    assert torch.equal(torch.ldexp(rows, exponents[:, None]), others)
    return exponents


def make_plan_of_nothing() -> Plan:
    return seal_plan(
        Plan("a.gguf", "0", "", "fp16", {}, (), prompts=(), steps=0, device="cpu", elapsed_s=1.0)
    )


def test_a_pytorch_without_mxfp8_reads_other_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.6.0 has no `float8_e8m0fnu`; scales in other formats are no exponents."""
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    assert not is_power(torch.ones(2))
