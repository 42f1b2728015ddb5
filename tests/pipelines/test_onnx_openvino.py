"""Components with their exponents inside as ONNX and OpenVINO IR, run by onnxruntime and OpenVINO."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_quantised_files import make_t5

from stopdown.component_calls.call import ComponentCall
from stopdown.component_calls.components import Callee
from stopdown.errors import OptionError
from stopdown.export.onnx_openvino import ENDINGS, Form, export_component, list_inputs
from stopdown.plans.exponents import scale_component
from stopdown.records import ComponentPlan, Scaling
from stopdown.testing import make_pipeline

Run = Callable[..., tuple[int, str, str]]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "openvino_f16.py"

PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino",)}


def need(form: str) -> None:
    for name in PACKAGES[form]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def make_encoder() -> tuple[torch.nn.Module, ComponentCall]:
    """A T5 whose gated products overflow, without the fp32 module that its authors keep."""
    call = {"input_ids": torch.arange(12)[None]}
    return make_t5(), ComponentCall(Callee("encoder", make_t5(), "forward", "encode"), (), call)


def make_clip() -> tuple[torch.nn.Module, ComponentCall]:
    """A CLIP whose second products overflow: what is between is large, and what comes out is not."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = CLIPTextConfig(vocab_size=100, num_attention_heads=4, **sizes)
    model = CLIPTextModel(config).eval()
    layers = [x for name, x in model.named_modules() if name.endswith("self_attn")]
    for layer in layers:
        for tensor in layer.v_proj.parameters():
            tensor.data.mul_(2.0**22)
        layer.out_proj.weight.data.mul_(2.0**-22)
    call = {"input_ids": torch.arange(12)[None]}
    return model, ComponentCall(Callee("encoder", model, "forward", "encode"), (), call)


def make_blocks() -> tuple[torch.nn.Module, ComponentCall]:
    """A CogVideoX whose residual stream overflows."""
    model = make_pipeline("cogvideox", overflow="transformer").transformer
    draw = torch.Generator().manual_seed(0)
    call = {
        "hidden_states": torch.randn(1, 2, 4, 4, 4, generator=draw),
        "encoder_hidden_states": torch.randn(1, 8, model.config.text_embed_dim, generator=draw),
        "timestep": torch.tensor([500]),
        "return_dict": False,
    }
    return model, ComponentCall(Callee("transformer", model, "forward", "denoise"), (), call)


def make_vae() -> tuple[torch.nn.Module, ComponentCall]:
    """An autoencoder whose decoder overflows."""
    model = make_pipeline("sd", overflow="vae").vae
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    callee = Callee("vae.decode", model, "decode", "decode")
    return model, ComponentCall(callee, (latents,), {"return_dict": False})


MODELS = {"t5": make_encoder, "clip": make_clip, "cogvideox": make_blocks, "vae": make_vae}
"""`cogvideox` and the rest are slow: a graph takes seconds to export."""


def take_arrays(given: dict[str, torch.Tensor], *, half: bool) -> dict[str, Any]:
    return {
        name: (x.half() if half and x.dtype == torch.float32 else x).numpy()
        for name, x in given.items()
    }


def run_graph(path: Path, given: dict[str, torch.Tensor], *, half: bool = False) -> Any:
    """What onnxruntime or OpenVINO makes of a graph, on the processor in the graph's own precision."""
    arrays = take_arrays(given, half=half)
    if path.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return session.run(None, arrays)[0]
    import openvino

    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled(arrays)[0]


def run_reference(path: Path, given: dict[str, torch.Tensor], *, half: bool) -> Any:
    """What ONNX's own evaluator makes of a graph: numpy's operations, in the dtype of each value."""
    from onnx.reference import ReferenceEvaluator

    arrays = take_arrays(given, half=half)
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(str(path)).run(None, arrays)[0]


def plan_model(module: torch.nn.Module, call: ComponentCall) -> ComponentPlan:
    scaling, _ = scale_component(module, [call])
    return ComponentPlan("part", type(module).__name__, "0" * 64, "fp16", scaling)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x == "clip" else pytest.mark.slow) for x in MODELS]
)
@pytest.mark.parametrize("form", ["onnx", "openvino"])
def test_a_graph_in_fp32_is_the_same_bit_for_bit(tmp_path: Path, form: Form, name: str) -> None:
    """The runtime's own kernels give the same numbers with the exponents inside and without."""
    need(form)
    module, call = MODELS[name]()
    before = {key: x.clone() for key, x in module.state_dict().items()}
    entry = plan_model(module, call)
    assert entry.in_force.exponents
    made = []
    for number, plan in enumerate((None, entry)):
        path = tmp_path / f"{number}{ENDINGS[form]}"
        export_component(module, plan, call, path, form=form, precision="fp32")
        made.append(run_graph(path, list_inputs(module, call)))
    assert np.array_equal(made[0], made[1])
    assert np.isfinite(made[0]).all()
    assert all(torch.equal(before[key], x) for key, x in module.state_dict().items())


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x == "clip" else pytest.mark.slow) for x in MODELS]
)
def test_onnxruntime_in_fp16_is_right_with_the_exponents_alone(tmp_path: Path, name: str) -> None:
    """fp16 graphs. NaN before, then near to torch's own fp16.

    Where no node between two products has fp16 on this processor, onnxruntime hands fp32 from one to the
    other. A T5's gated products are such values, so ONNX's own reference runs it without exponents.
    """
    need("onnx")
    module, call = MODELS[name]()
    entry = plan_model(module, call)
    bare = ComponentPlan("part", entry.class_name, entry.weights, "fp16", Scaling())
    given = list_inputs(module, call)
    exact = None
    found = {}
    for label, plan, precision in (
        ("exact", None, "fp32"),
        ("bare", bare, "fp16"),
        ("scaled", entry, "fp16"),
    ):
        path = tmp_path / f"{label}.onnx"
        export_component(module, plan, call, path, form="onnx", precision=precision)
        run = run_reference if (label, name) == ("bare", "t5") else run_graph
        found[label] = run(path, given, half=precision == "fp16")
    exact = found["exact"].astype(np.float64)
    assert not np.isfinite(found["bare"]).all()
    error = np.linalg.norm(found["scaled"] - exact) / np.linalg.norm(exact)
    assert entry.in_force.trial is not None
    assert error <= 2 * (entry.in_force.trial.rel_err or 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_openvino_executes_f16_as_well_as_torch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On a processor that has fp16: NaN before, then at most twice torch's error with the same sums.

    Sums are rounded to fp16 after each term, or they are in fp32 and rounded once.
    """
    need("openvino")
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    from openvino_f16 import MISSING, find_reader

    if find_reader() is None:
        pytest.skip(MISSING)
    command = [sys.executable, str(BENCHMARK), "--row", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    probe, row = result["reader"]["probe"], result["rows"][name]
    assert probe["overflow"] == {"f32": False, "f16": True}
    assert probe["same_as_numpy"] == {"add": True, "multiply": True}
    assert row["executed"]["compiled_for"] == "f16"
    assert row["executed"]["nodes"]["f16"] > sum(row["executed"]["nodes"].values()) / 2
    products = probe["products"].values()
    after_each = all(x["as_rounded_after_each"] == 1 for x in products)
    assert after_each or all(x["rel_err"] <= 1.001 * x["rounded_once"] for x in products)
    assert row["without f16"] is None
    assert row["with f16"] <= 2 * row["torch_same_sums" if after_each else "torch"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_timesteps_keep_their_phase_in_openvino(tmp_path: Path, dtype: torch.dtype) -> None:
    """A graph whose weights are stored in fp16 has frequencies that are not: 999 times each of them."""
    need("openvino")
    from diffusers.models.embeddings import Timesteps

    phases = Timesteps(32, flip_sin_to_cos=True, downscale_freq_shift=0)
    module = torch.nn.Sequential(phases, torch.nn.Linear(32, 8))
    given = {"input": torch.tensor([999], dtype=dtype)}
    call = ComponentCall(Callee("embedding", module, "forward", "denoise"), (), given)
    export_component(module, None, call, tmp_path / "graph.xml", form="openvino")
    made = run_graph(tmp_path / "graph.xml", given)
    assert np.abs(made - module(**given).detach().numpy()).max() < 1e-3


def list_refusals() -> Iterator[tuple[ComponentPlan, Form, str]]:
    kept = Scaling(fp32_modules=("final_layer_norm",))
    bf16 = ComponentPlan("part", "T", "0", "bf16", reasons=("No exponents.",))
    yield bf16, "onnx", "The plan runs part in bf16. No exponents."
    yield ComponentPlan("part", "T", "0", "fp16", kept), "openvino", "keeps parts of part in fp32"


@pytest.mark.parametrize(("entry", "form", "message"), [*list_refusals()])
def test_what_a_graph_cannot_hold_is_refused(
    tmp_path: Path, entry: ComponentPlan, form: Form, message: str
) -> None:
    """Before anything is traced."""
    module, call = make_clip()
    with pytest.raises(OptionError, match=message):
        export_component(module, entry, call, tmp_path / "x", form=form)


def test_without_the_exporter_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is named."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    module, call = make_clip()
    entry = ComponentPlan("part", "T", "0", "fp16")
    with pytest.raises(OptionError, match=r"pip install 'stopdown\[openvino\]'"):
        export_component(module, entry, call, tmp_path / "x.xml", form="openvino")


@pytest.mark.slow
def test_the_command_writes_a_graph_for_each_call(
    tmp_path: Path, run: Run, save_tiny: Callable[..., Path]
) -> None:
    """A certified plan of a pipeline, all of its components, by the names of their calls."""
    need("onnx")
    folder = save_tiny("sd", "fp32", "vae")
    assert run("plan", folder, "--residual", "native", "-o", tmp_path / "plan.json")[0] == 0
    code, out, err = run("export", tmp_path / "plan.json", tmp_path / "out", "--to", "onnx")
    assert code == 0, err
    assert out.split() == [
        f"{tmp_path}/out/{name}.onnx" for name in ("text_encoder", "unet", "vae.decode")
    ]
    code, _, err = run("export", tmp_path / "plan.json", tmp_path / "out", "--to", "onnx")
    assert code == 2
