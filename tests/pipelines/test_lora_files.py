"""LoRA files written for converted models: read by Diffusers, exact in fp32; refused where not."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.lora_cases import (
    ALPHA,
    RANK,
    STYLES,
    Tensors,
    draw_lora,
    find_denoiser,
    load_lora,
    make_arguments,
    make_family,
    name_lora,
)

pytest.importorskip("peft", reason="peft loads LoRA; it is in the extra `adapters`")

from diffusers import DiffusionPipeline
from test_loras import call, list_steps

from models.conversions import SIZES, SMALLEST
from models.measured_plans import measure_pipeline
from models.single_file_models import MODELS, draw
from readers.single_file_readers import save_model
from stopdown.checkpoints import lora_files
from stopdown.checkpoints.convert import convert
from stopdown.checkpoints.lora_files import convert_lora
from stopdown.component_calls.components import find_components
from stopdown.errors import OptionError, OutputError
from stopdown.fold_names import split_fold_name as split_fold
from stopdown.numerics import relative_l2
from stopdown.pipelines.requests import Request
from stopdown.plans.calibrated import describe_scaling
from stopdown.plans.plan_files import read_class_versions, read_plan, seal_plan, write_plan
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.scaling.rescale import rescale_
from stopdown.sources.headers import EXPONENTS_ENTRY, read_metadata
from stopdown.sources.lora_names import is_lora_file, split_lora_name
from stopdown.sources.sources import fingerprint, resolve_source

FAMILIES = ("flux", "cogvideox", "wan", "sdxl")
CASES = [
    pytest.param(
        family,
        style,
        id=f"{family}-{style}",
        marks=() if (family, style) == ("flux", "kohya") else pytest.mark.slow,
    )
    for family in FAMILIES
    for style in STYLES[family]
]


MORE: dict[str, Any] = {"wan": {"height": 32, "width": 32, "frames": 5}}
RENAMED = {("flux", "kohya"), ("wan", "kohya"), ("wan", "comfyui")}
"""Names of the original checkpoint, which a Diffusers folder does not have."""


def build(family: str) -> Any:
    """A tiny pipeline beyond fp16, of weights that eight bits hold, so that no fold loses one in fp16."""
    pipe = make_family(family)
    for module in find_components(pipe).values():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.masked_fill_(tensor.abs() < SMALLEST, 0)
                tensor.copy_(tensor.bfloat16())
    return pipe


@dataclasses.dataclass(frozen=True)
class Made:
    """A model, its plan, what was converted, and a call of the denoiser."""

    folder: Path
    plan: Path
    converted: Path
    arguments: dict[str, Any]


def make_plan_of(pipe: Any, folder: Path, scalings: dict[str, Scaling]) -> Plan:
    """A plan for some components; the rest stays as stored."""
    entries = {
        key: ComponentPlan(key, type(x).__name__, sample_weights(x), "as loaded")
        for key, x in find_components(pipe).items()
    }
    for name, scaling in scalings.items():
        entries[name] = describe_scaling(entries[name], scaling, "fp16", 1)
    return seal_plan(
        Plan(
            source=str(folder),
            fingerprint=fingerprint(resolve_source(folder)),
            pipeline=type(pipe).__name__,
            precision="fp16",
            versions=read_class_versions(),
            components=tuple(entries.values()),
            device="cpu",
            elapsed_s=0.0,
        )
    )


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """A family's model, converted by a plan for one call of its denoiser; the rest stays as stored."""

    @functools.cache
    def convert_family(family: str) -> Made:
        root, pipe = tmp_path_factory.mktemp(family), build(family)
        pipe.save_pretrained(root / "model")
        arguments = make_arguments(pipe, family)
        name, module = find_denoiser(pipe)
        rescaling = rescale_(module, (), arguments)
        rescaling.undo()
        plan = make_plan_of(pipe, root / "model", {name: rescaling.scaling})
        write_plan(plan, root / "plan.json")
        convert(
            root / "model", root / "out", plan, request=Request(**(SIZES | MORE).get(family, {}))
        )
        return Made(root / "model", root / "plan.json", root / "out", arguments)

    return convert_family


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """As plain Diffusers does; in fp32 without eps, which not every configuration sets."""
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype)
    for module in find_denoiser(pipe)[1].modules() if dtype == torch.float32 else ():
        if isinstance(vars(module).get("eps"), float):
            module.eps = 0.0
    for tensor in find_denoiser(pipe)[1].parameters():
        tensor.data = (
            tensor.data.clone()
        )  # a file's memory is aligned otherwise, and sums differ then
    return pipe


def write(tensors: Tensors, path: Path) -> Path:
    """A LoRA file."""
    save_file(tensors, path, metadata={"ss_network_dim": "4"})
    return path


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "style"), CASES)
def test_a_converted_lora_is_exact_on_a_converted_model(
    make: Any, family: str, style: str, tmp_path: Path
) -> None:
    """After every step the bits of the original with the original LoRA; with that one, far off."""
    made = make(family)
    original, pipe = load(made.folder), load(made.converted)
    drawn = [draw_lora(original, family, seed=seed) for seed in (0, 1)]
    before = [name_lora(x, style, family) for x in drawn]
    after = []
    for number, tensors in enumerate(before):
        path = write(tensors, tmp_path / f"{number}.safetensors")
        record = convert_lora(path, tmp_path / f"{number}-out.safetensors", made.converted)
        after.append(load_file(tmp_path / f"{number}-out.safetensors"))
        assert (after[-1].keys() == tensors.keys()) == ((family, style) not in RENAMED)
        assert sum(x.folded for x in record.components) > 0
    bare = call(original, made.arguments)
    assert torch.equal(call(pipe, made.arguments), bare)
    is_peft = style == "peft"
    steps = [
        list_steps((x[0], x[1]), folder, is_peft)
        for x, folder in ((before, tmp_path / "a"), (after, tmp_path / "b"))
    ]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    for name in steps[0]:
        steps[0][name](original)
        steps[1][name](pipe)
        wanted, found = call(original, made.arguments), call(pipe, made.arguments)
        assert torch.equal(wanted, found), (name, relative_l2(found, wanted))
    wrong = load(made.converted)
    right = load(made.folder)
    for one in (wrong, right):
        load_lora(one, before[0], tmp_path, "one")
    wanted = call(right, made.arguments)
    assert relative_l2(wanted, bare) > 0.003
    assert relative_l2(call(wrong, made.arguments), wanted) > 0.003


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "style"), CASES)
def test_a_converted_lora_is_near_in_fp16(
    make: Any, family: str, style: str, tmp_path: Path
) -> None:
    """On the fp16 files: finite and nearer than bf16; the original in fp16 is not finite."""
    made = make(family)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    tensors = name_lora(draw_lora(load(made.folder), family, size=0.2), style, family)
    path = write(tensors, tmp_path / "lora.safetensors")
    convert_lora(path, tmp_path / "out.safetensors", made.converted)
    found = {}
    for name, dtype in dtypes.items():
        pipe = load(made.folder, dtype)
        load_lora(pipe, tensors, tmp_path, "one")
        found[name] = call(pipe, made.arguments, dtype)
    pipe = load(made.converted, torch.float16)
    load_lora(pipe, load_file(tmp_path / "out.safetensors"), tmp_path, "one")
    low = call(pipe, made.arguments, torch.float16)
    assert not bool(found["fp16"].isfinite().all())
    assert relative_l2(low, found["fp32"]) < relative_l2(found["bf16"], found["fp32"]) / 3


@pytest.mark.thorough
def test_a_plan_does_what_its_converted_model_does(make: Any, tmp_path: Path, run: Any) -> None:
    """`convert LORA OUT --plan` takes either, and says how many tensors were scaled."""
    made = make("flux")
    tensors = name_lora(draw_lora(load(made.folder), "flux"), "diffusers", "flux")
    path = write(tensors, tmp_path / "lora.safetensors")
    plan = read_plan(made.plan)
    weights = next((made.converted / "transformer").glob("*.safetensors"))
    exponents = json.loads(read_metadata(weights)[EXPONENTS_ENTRY])
    entries = [
        dataclasses.replace(x, scaling=dataclasses.replace(x.scaling, exponents=exponents, eps={}))
        if x.component == "transformer"
        else x
        for x in plan.components
    ]
    same = seal_plan(dataclasses.replace(plan, components=tuple(entries)))
    for number, given in enumerate((write_plan(same, tmp_path / "plan.json"), made.converted)):
        code, out, err = run(
            "convert", path, tmp_path / f"{number}.safetensors", "--plan", given, "--json"
        )
        assert code == 0, err
        (entry,) = json.loads(out)["components"]
        assert (entry["component"], entry["precision"]) == ("transformer", "LoRA")
        assert entry["folded"] > 0
    first, second = (load_file(tmp_path / f"{number}.safetensors") for number in (0, 1))
    assert all(torch.equal(first[name], x) for name, x in second.items())
    assert read_metadata(tmp_path / "0.safetensors")["ss_network_dim"] == "4"


# ---------------------------------------------------------------------------------------------
# A converted file in names of its own


WIDTH = 8


def write_converted(path: Path, **more: tuple[tuple[int, int], dict[str, int]]) -> Tensors:
    """A file as `convert` leaves one, with fused rows of several exponents; the weights of before."""
    made = torch.Generator().manual_seed(0)
    names = {
        "double_blocks.0.img_attn.qkv": ((24, WIDTH), {"[0:8]": -1, "[16:24]": -3}),
        "single_blocks.0.linear2": ((WIDTH, 16), {"": -5}),
        "plain": ((WIDTH, WIDTH), {}),
        **more,
    }
    before, exponents, stored = {}, {}, {}
    for name, (shape, folds) in names.items():
        weight = torch.randn(shape, generator=made)
        scaled = weight.clone()
        for block, exponent in folds.items():
            exponents[f"model.diffusion_model.{name}.weight{block}"] = exponent
            scaled[split_fold(f"{name}{block}")[1]] *= 2.0**exponent
        before[name], stored[f"model.diffusion_model.{name}.weight"] = weight, scaled
    stored["model.diffusion_model.single_blocks.0.linear2.bias"] = torch.ones(WIDTH) / 32
    exponents["model.diffusion_model.single_blocks.0.linear2.bias"] = -5
    save_file(
        stored, path, metadata={EXPONENTS_ENTRY: json.dumps(exponents), "stopdown": "0 plan abc"}
    )
    return before


def add(kind: str, weight: torch.Tensor, parts: Tensors) -> torch.Tensor:
    """A weight with what an adapter adds to it, as its trainers define that."""
    if kind == "diff":
        delta = parts["diff"]
    else:
        delta = parts["lora_up.weight"] @ parts["lora_down.weight"]
        delta = delta * (parts["alpha"] / RANK if "alpha" in parts else 1)
    moved = weight + delta
    if "dora_scale" in parts:
        moved = moved * (parts["dora_scale"] / moved.norm(dim=1, keepdim=True))
    return moved


def draw_parts(kind: str, out: int, width: int) -> Tensors:
    """The tensors of one layer of an adapter, by their suffix."""
    made = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made)

    if kind == "diff":
        return {"diff": draw(out, width)}
    parts = {"lora_down.weight": draw(RANK, width), "lora_up.weight": draw(out, RANK)}
    parts["alpha"] = torch.tensor(ALPHA)
    return parts | ({"dora_scale": draw(out, 1).abs()} if kind == "dora" else {})


BY_COLUMN = ((WIDTH, 16), {"": -5, "[:,4:16]": 3})
"""Shape and exponents of what reads a concatenation."""


def test_columns_of_a_dora_are_refused(tmp_path: Path) -> None:
    """Its magnitudes are norms of rows, to which every column adds."""
    write_converted(tmp_path / "model.safetensors", by_column=BY_COLUMN)
    parts = draw_parts("dora", *BY_COLUMN[0])
    lora = {f"diffusion_model.by_column.{key}": x for key, x in parts.items()}
    save_file(lora, tmp_path / "lora.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in ("lora", "out", "model")]
    with pytest.raises(
        OptionError, match="columns of its weight have several exponents, and there is"
    ):
        convert_lora(*paths)
    assert not paths[1].exists()


@pytest.mark.parametrize("replaced", ["model", "base"])
def test_a_lora_replaces_only_what_convert_wrote(tmp_path: Path, replaced: str) -> None:
    """Neither the converted model that is its plan nor other weights, even with leave to replace."""
    write_converted(tmp_path / "model.safetensors")
    lora = {f"diffusion_model.plain.{x}": y for x, y in draw_parts("lora", WIDTH, WIDTH).items()}
    for name, tensors in (("lora", lora), ("base", {"a": torch.ones(2)})):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    paths = {x: tmp_path / f"{x}.safetensors" for x in ("lora", "model", "base", "out")}
    before = paths[replaced].read_bytes()
    with pytest.raises(OutputError, match=r"file that (this run reads|convert didn't write)"):
        convert_lora(paths["lora"], paths[replaced], paths["model"], overwrite=True)
    assert paths[replaced].read_bytes() == before
    for _ in range(2):
        convert_lora(paths["lora"], paths["out"], paths["model"], overwrite=True)
    with pytest.raises(OutputError, match=r"out\.safetensors already exists"):
        convert_lora(paths["lora"], paths["out"], paths["model"])


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("LoHa", "hada_w1_a"), ("LoHa", "hada_t1"), ("LoKr", "lokr_w1"), ("LoKr", "lokr_w2_b"),
        ("GLoRA", "a1.weight"), ("OFT", "oft_blocks"), ("OFT", "oft_R.weight"),
    ],
)  # fmt: skip
def test_a_kind_that_is_no_lora_is_refused(tmp_path: Path, kind: str, tensor: str) -> None:
    """By its name and its layer, with the advice to merge it; nothing is written."""
    write_converted(tmp_path / "model.safetensors")
    lora = {f"diffusion_model.plain.{tensor}": torch.ones(WIDTH, WIDTH)}
    save_file(lora, tmp_path / "lora.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in ("lora", "out", "model")]
    assert is_lora_file(paths[0]) or tensor == "hada_t1"
    with pytest.raises(OptionError) as caught:
        convert_lora(*paths)
    assert f"plain: it is neither a LoRA nor a DoRA, and there is no rule for {kind}" in str(
        caught.value
    )
    assert "Merge it into the original model" in str(caught.value)
    assert not paths[1].exists()


@pytest.mark.parametrize("style", ["lora_unet_{}", "diffusion_model.{}"], ids=["kohya", "comfyui"])
@pytest.mark.parametrize("kind", ["lora", "dora", "diff"])
def test_a_file_in_its_own_names(tmp_path: Path, kind: str, style: str) -> None:
    """Fused rows, each with its exponent: scaled weight and adapter give the scaled sum, bit for bit."""
    columns = {} if kind == "dora" else {"by_column": BY_COLUMN}
    before = write_converted(tmp_path / "model.safetensors", **columns)
    after = load_file(tmp_path / "model.safetensors")
    tensors, names = {}, {}
    for name, weight in before.items():
        flat = name.replace(".", "_") if "unet" in style else name
        names[name] = style.format(flat)
        parts = draw_parts(kind, *weight.shape)
        tensors |= {f"{names[name]}.{key}": x for key, x in parts.items()}
    save_file(tensors, tmp_path / "lora.safetensors")
    convert_lora(
        tmp_path / "lora.safetensors", tmp_path / "out.safetensors", tmp_path / "model.safetensors"
    )
    written = load_file(tmp_path / "out.safetensors")
    for name, weight in before.items():
        old = {
            key.removeprefix(f"{names[name]}."): x
            for key, x in tensors.items()
            if names[name] in key
        }
        new = {
            key.removeprefix(f"{names[name]}."): x
            for key, x in written.items()
            if names[name] in key
        }
        stored = after[f"model.diffusion_model.{name}.weight"]
        factor = stored / weight
        wanted = add(kind, weight, old)
        assert torch.equal(add(kind, stored, new) / factor, wanted), name
        assert name == "plain" or not torch.equal(add(kind, stored, old) / factor, wanted)


ENCODER_LAYERS = {
    "self_attn.q_proj": ("attn.in_proj_", 0),
    "self_attn.k_proj": ("attn.in_proj_", 1),
    "self_attn.v_proj": ("attn.in_proj_", 2),
    "self_attn.out_proj": ("attn.out_proj.", None),
    "mlp.fc1": ("mlp.c_fc.", None),
    "mlp.fc2": ("mlp.c_proj.", None),
}
"""Layer as Transformers names it, to what open_clip has before `weight`, and which third of its rows."""
ENCODER_STYLES = pytest.mark.parametrize("style", ["kohya", "hugging-face"])


def name_encoder_layer(style: str, layer: str) -> str:
    """A layer of the second text encoder of SDXL in a LoRA."""
    path = f"text_model.encoder.layers.0.{layer}"
    return f"lora_te2_{path.replace('.', '_')}" if style == "kohya" else f"text_encoder_2.{path}"


@ENCODER_STYLES
@pytest.mark.parametrize("kind", ["lora", "dora", "diff"])
def test_an_encoder_in_the_names_of_open_clip(tmp_path: Path, kind: str, style: str) -> None:
    """Query, key and value take the exponents of their rows of one matrix; a bias those of its own."""
    made, prefix = torch.Generator().manual_seed(0), "conditioner.embedders.1.model.transformer."
    stored, exponents = {f"{prefix}resblocks.0.ln_1.weight": torch.ones(8)}, {}
    for place, (name, _) in enumerate(ENCODER_LAYERS.values()):
        rows = 24 if name.startswith("attn.in") else 8
        stored[f"{prefix}resblocks.0.{name}weight"] = torch.randn(rows, 8, generator=made)
        stored[f"{prefix}resblocks.0.{name}bias"] = torch.randn(rows, generator=made)
        for end in ("weight", "bias"):
            block = f"[{8 * place}:{8 * place + 8}]" if rows == 24 else ""
            exponents[f"{prefix}resblocks.0.{name}{end}{block}"] = place - 6
    scaled = {name: tensor.clone() for name, tensor in stored.items()}
    for name, exponent in exponents.items():
        bare, place = split_fold(name)
        scaled[bare][place] *= 2.0**exponent
    paths = [tmp_path / f"{name}.safetensors" for name in ("lora", "out", "model")]
    save_file(scaled, paths[2], {EXPONENTS_ENTRY: json.dumps(exponents), "stopdown": "0 plan abc"})
    lora = {
        f"{name_encoder_layer(style, layer)}.{key}": x
        for layer in ENCODER_LAYERS
        for key, x in {**draw_parts(kind, 8, 8), "diff_b": torch.arange(8.0)}.items()
    }
    save_file(lora, paths[0])
    convert_lora(*paths)
    written = load_file(paths[1])
    for place, (layer, (name, part)) in enumerate(ENCODER_LAYERS.items()):
        stem = f"{name_encoder_layer(style, layer)}."
        old, new = (
            {key.removeprefix(stem): x for key, x in y.items() if key.startswith(stem)}
            for y in (lora, written)
        )
        rows = slice(None) if part is None else slice(8 * part, 8 * part + 8)
        name = f"{prefix}resblocks.0.{name}weight"
        wanted, found = add(kind, stored[name][rows], old), add(kind, scaled[name][rows], new)
        assert torch.equal(found, wanted * 2.0 ** (place - 6)), layer
        assert torch.equal(new["diff_b"], old["diff_b"] * 2.0 ** (place - 6)), layer


def read_encoder(file: Path, folder: Path) -> Any:
    """The second text encoder of an SDXL file, by Diffusers' converter."""
    from diffusers.loaders.single_file_utils import create_diffusers_clip_model_from_ldm
    from transformers import CLIPTextModelWithProjection

    tensors = {
        name: x for name, x in load_file(file).items() if "embedders.0" not in name
    }  # it tells the encoders by their widths, and those of the tiny one are the same
    return create_diffusers_clip_model_from_ldm(
        CLIPTextModelWithProjection, tensors, subfolder="text_encoder_2", config=str(folder),
        torch_dtype=torch.float32,
    )  # fmt: skip


@pytest.mark.slow
@ENCODER_STYLES
def test_a_lora_of_a_second_encoder_fits_a_single_file(tmp_path: Path, style: str) -> None:
    """A whole SDXL file and the encoder's LoRA, read by Diffusers: the bits of the original with its."""
    pipe, ids = build("sdxl"), torch.arange(2, 79)[None]
    encoder = pipe.text_encoder_2
    for name, exponent in {"q": 17, "k": -17, "v": 18, "out": -9}.items():
        for layer in encoder.text_model.encoder.layers:
            layer.self_attn.get_submodule(f"{name}_proj").weight.data.mul_(2.0**exponent)
    pipe.save_pretrained(tmp_path / "model")
    rescaling = rescale_(encoder, (ids,))
    rescaling.undo()
    plan = make_plan_of(pipe, tmp_path / "model", {"text_encoder_2": rescaling.scaling})
    convert(tmp_path / "model", tmp_path / "out.safetensors", plan)
    drawn = torch.Generator().manual_seed(1)
    lora = {}
    for layer in ENCODER_LAYERS:
        own = encoder.get_submodule(f"text_model.encoder.layers.0.{layer}")
        down = torch.randn(RANK, own.in_features, generator=drawn).bfloat16().float()
        up = torch.randn(own.out_features, RANK, generator=drawn) * float(own.weight.std())
        ends = ("lora_down", "lora_up") if style == "kohya" else ("lora_A", "lora_B")
        for end, tensor in zip(ends, (down, up.bfloat16().float()), strict=True):
            lora[f"{name_encoder_layer(style, layer)}.{end}.weight"] = tensor
        if style == "kohya":
            lora[f"{name_encoder_layer(style, layer)}.alpha"] = torch.tensor(ALPHA)
    paths = [tmp_path / f"{name}.safetensors" for name in ("lora", "lora-out", "out")]
    write(lora, paths[0])
    convert_lora(*paths)

    def run(file: Path | None, path: Path | None) -> torch.Tensor:
        one = load(tmp_path / "model")
        if file is not None:
            one.text_encoder_2 = read_encoder(file, tmp_path / "model")
        for tensor in one.text_encoder_2.parameters():
            tensor.data = tensor.data.clone()  # as in `load`
        if path is not None:
            one.load_lora_weights(str(path))
        with torch.no_grad():
            return one.text_encoder_2(ids).text_embeds

    bare, wanted = run(None, None), run(None, paths[0])
    assert relative_l2(wanted, bare) > 0.003
    assert torch.equal(run(paths[2], None), bare)
    assert torch.equal(run(paths[2], paths[1]), wanted)
    assert relative_l2(run(paths[2], paths[0]), wanted) > 0.003


@pytest.mark.thorough
def test_a_plan_of_a_single_file_does_what_its_converted_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exponents are those of a model's parameters; the LoRA takes them by the tensors of the file."""
    source = save_model("wan", tmp_path)
    call = draw(MODELS["wan"].call)
    plan = measure_pipeline(source, prompts=[call])
    convert(source, tmp_path / "out.safetensors", plan, request=Request(arguments=call))
    config = source.path.parent / "transformer"
    monkeypatch.setattr(lora_files, "resolve_source", lambda x: resolve_source(x, config=config))
    layers = ("blocks.0.self_attn.v", "blocks.0.self_attn.o", "blocks.1.ffn.2")
    shapes = {name: x.shape for name, x in load_file(source.path).items()}
    lora = {
        f"diffusion_model.{layer}.{key}": x
        for layer in layers
        for key, x in draw_parts("lora", *shapes[f"{layer}.weight"]).items()
    }
    path = write(lora, tmp_path / "lora.safetensors")
    written = []
    for name, given in {"a": plan, "b": tmp_path / "out.safetensors"}.items():
        record = convert_lora(path, tmp_path / f"{name}.safetensors", given)
        assert sum(x.folded for x in record.components) > 0
        written.append(load_file(tmp_path / f"{name}.safetensors"))
    assert all(torch.equal(written[1][name], x) for name, x in written[0].items())


COMFYUI = [path for path in os.environ.get("STOPDOWN_COMFYUI", "").split(":") if path]
MERGE = """
import json, sys
from readers.comfyui_reader import prepare
request = json.loads(sys.stdin.read())
prepare(request["root"])
import comfy.lora
from safetensors.torch import load_file, save_file

merged = {}
for label, (model, lora) in request["pairs"].items():
    weights, tensors = load_file(model), load_file(lora)
    patches = comfy.lora.load_lora(tensors, request["names"], log_missing=False)
    assert patches.keys() == set(request["names"].values()), patches.keys()
    for key, patch in patches.items():
        weight = weights[key].clone()
        given = [(request["strength"], patch, 1.0, None, None)]
        merged[f"{label}/{key}"] = comfy.lora.calculate_weight(given, weight, key)
save_file({k: x.contiguous() for k, x in merged.items()}, request["out"])
"""


@pytest.mark.slow
@pytest.mark.skipif(not COMFYUI, reason="STOPDOWN_COMFYUI names no checkout of ComfyUI")
@pytest.mark.parametrize("checkout", COMFYUI, ids=[Path(path).name for path in COMFYUI])
@pytest.mark.parametrize("kind", ["lora", "dora", "diff"])
def test_comfyui_merges_the_scaled_sum(tmp_path: Path, kind: str, checkout: str) -> None:
    """Its own loader and its own arithmetic: 2^k times the merged original, but for the eps of a DoRA."""
    before = write_converted(tmp_path / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    keys = {name: f"model.diffusion_model.{name}.weight" for name in before}
    original = {keys[name]: weight for name, weight in before.items()}
    save_file(original, tmp_path / "original.safetensors")
    stems = {f"diffusion_model.{name}": key for name, key in keys.items()}
    tensors = {
        f"diffusion_model.{name}.{key}": x
        for name, weight in before.items()
        for key, x in draw_parts(kind, *weight.shape).items()
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    convert_lora(
        tmp_path / "lora.safetensors", tmp_path / "out.safetensors", tmp_path / "model.safetensors"
    )
    pairs = {
        "wanted": ("original", "lora"),
        "found": ("model", "out"),
        "unscaled": ("model", "lora"),
    }
    request = {
        "pairs": {
            k: [str(tmp_path / f"{x}.safetensors") for x in pair] for k, pair in pairs.items()
        },
        "names": stems,
        "strength": 0.8,
        "root": checkout,
        "out": str(tmp_path / "merged.safetensors"),
    }
    done = subprocess.run(
        [sys.executable, "-c", MERGE],
        input=json.dumps(request),
        env={
            **os.environ,
            "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    merged = load_file(tmp_path / "merged.safetensors")
    for name, key in keys.items():
        factor = after[key] / original[key]
        wanted, found = merged[f"wanted/{key}"], merged[f"found/{key}"] / factor
        assert relative_l2(found, wanted) <= (1e-5 if kind == "dora" else 0.0), name
        unscaled = merged[f"unscaled/{key}"] / factor
        assert name == "plain" or relative_l2(unscaled, wanted) > 0.05, name


def test_a_bias_takes_the_exponents_of_the_bias(tmp_path: Path) -> None:
    """`diff_b` of a layer with a bias; of one without it is refused by name."""
    write_converted(tmp_path / "model.safetensors")
    layer = "diffusion_model.single_blocks.0.linear2"
    save_file({f"{layer}.diff_b": torch.ones(WIDTH)}, tmp_path / "lora.safetensors")
    other = "diffusion_model.double_blocks.0.img_attn.qkv"
    save_file({f"{other}.diff_b": torch.ones(24)}, tmp_path / "other.safetensors")
    model = tmp_path / "model.safetensors"
    convert_lora(tmp_path / "lora.safetensors", tmp_path / "out.safetensors", model)
    assert load_file(tmp_path / "out.safetensors")[f"{layer}.diff_b"].tolist() == [2.0**-5] * WIDTH
    with pytest.raises(OptionError, match=r"img_attn\.qkv: it adds a bias to a layer without one"):
        convert_lora(tmp_path / "other.safetensors", tmp_path / "out2.safetensors", model)


def test_a_dtype_that_loses_a_bit_becomes_fp32(tmp_path: Path) -> None:
    """Matrices in fp16 whose smallest values would be rounded are written in fp32, the others stay."""
    write_converted(tmp_path / "model.safetensors")
    layer = "diffusion_model.single_blocks.0.linear2"
    tiny = torch.full((WIDTH, RANK), 0.9).half() * 2.0**-13
    tiny[0, 0] = 2.0**-23
    tensors = {
        f"{layer}.lora_A.weight": torch.ones(RANK, 16).half() * 2.0**-12,
        f"{layer}.lora_B.weight": tiny,
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    model = tmp_path / "model.safetensors"
    convert_lora(tmp_path / "lora.safetensors", tmp_path / "out.safetensors", model)
    found = load_file(tmp_path / "out.safetensors")
    up, down = found[f"{layer}.lora_B.weight"], found[f"{layer}.lora_A.weight"]
    wanted = (tiny.double() @ tensors[f"{layer}.lora_A.weight"].double()) * 2.0**-5
    assert torch.equal(up.double() @ down.double(), wanted)
    assert torch.float32 in {up.dtype, down.dtype}


def test_a_folder_for_comfyui_names_its_components(tmp_path: Path) -> None:
    """The folder that `convert --to comfyui` wrote does what the file of the layer in it does."""
    file = tmp_path / "models" / "diffusion_models" / "flux-transformer.safetensors"
    file.parent.mkdir(parents=True)
    exponents = {EXPONENTS_ENTRY: json.dumps({"single_blocks.0.linear2.weight": -5})}
    save_file({"single_blocks.0.linear2.weight": torch.ones(WIDTH, 16)}, file, exponents)
    layer = "lora_unet_single_blocks_0_linear2"
    tensors = {
        f"{layer}.lora_down.weight": torch.ones(RANK, 16),
        f"{layer}.lora_up.weight": torch.ones(WIDTH, RANK),
    }
    lora = write(tensors, tmp_path / "lora.safetensors")
    for number, plan in enumerate((tmp_path / "models", file)):
        convert_lora(lora, tmp_path / f"{number}.safetensors", plan)
    whole, alone = (load_file(tmp_path / f"{number}.safetensors") for number in range(2))
    assert whole.keys() == tensors.keys()
    assert all(torch.equal(whole[name], alone[name]) for name in tensors)
    assert not all(torch.equal(whole[name], tensors[name]) for name in tensors)


# ---------------------------------------------------------------------------------------------
# Refusals


def test_a_lora_in_fp8_is_refused(tmp_path: Path) -> None:
    """Powers of two would leave its range, and it says so for the layer."""
    write_converted(tmp_path / "model.safetensors")
    layer = "diffusion_model.single_blocks.0.linear2"
    tensors = {
        f"{layer}.lora_A.weight": torch.ones(RANK, 16).to(torch.float8_e4m3fn),
        f"{layer}.lora_B.weight": torch.ones(WIDTH, RANK).to(torch.float8_e4m3fn),
    }
    lora = write(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(OptionError, match=r"linear2: a tensor of it is torch\.float8_e4m3fn"):
        convert_lora(lora, tmp_path / "out.safetensors", tmp_path / "model.safetensors")


def list_mistakes(made: Made, folder: Path) -> dict[str, tuple[Path, Path, str]]:
    """LoRA, plan, and what the message says."""
    good = name_lora(draw_lora(load(made.folder), "flux"), "diffusers", "flux")
    other = {f"diffusion_model.joint_blocks.0.x.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    wide = {k: torch.cat([x, x], dim=1) if "lora_A" in k else x for k, x in good.items()}
    half = folder / "half.safetensors"
    half.write_bytes(write(good, folder / "good.safetensors").read_bytes()[:-100])
    bare = write({"transformer.x.weight": torch.ones(2, 2)}, folder / "bare.safetensors")
    convert_lora(folder / "good.safetensors", folder / "twice.safetensors", made.converted)
    written = {
        name: write(x, folder / f"{name}.safetensors")
        for name, x in {"other": other, "wide": wide}.items()
    }
    return {
        "another model": (
            written["other"],
            made.converted,
            "doesn't fit the model: it has no layer for",
        ),
        "other sizes": (
            written["wide"],
            made.converted,
            "it is for a weight of 32x64, and that of",
        ),
        "half a file": (half, made.converted, "half.safetensors"),
        "converted already": (
            folder / "twice.safetensors",
            made.converted,
            "is already converted",
        ),
        "a model without exponents": (
            folder / "good.safetensors",
            bare,
            "says nothing of exponents",
        ),
        "the model itself": (folder / "good.safetensors", made.folder, "says nothing of exponents"),
    }


def test_mistakes_are_one_message(make: Any, tmp_path: Path, run: Any) -> None:
    """Exit code 2, nothing written, and the LoRA as it was."""
    for name, (lora, plan, text) in list_mistakes(make("flux"), tmp_path).items():
        before = lora.read_bytes()
        code, out, err = run("convert", lora, tmp_path / "new.safetensors", "--plan", plan)
        assert (code, out) == (2, ""), name
        assert text in " ".join(err.split()), (name, err)
        assert not (tmp_path / "new.safetensors").exists()
        assert lora.read_bytes() == before


def test_a_run_wants_the_lora_of_its_weights(make: Any, tmp_path: Path, run: Any) -> None:
    """`generate` refuses the original's on converted weights, and a converted one on the original."""
    made = make("flux")
    tensors = name_lora(draw_lora(load(made.folder), "flux"), "diffusers", "flux")
    path, converted = write(tensors, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors"
    convert_lora(path, converted, made.converted)
    sizes = ("--height", 32, "--width", 32, "--steps", 1, "--precision", "fp32")
    for model, lora, text in (
        (made.converted, path, "is for the original, and"),
        (made.folder, converted, "was converted for rescaled weights"),
    ):
        given = ("generate", model, "a", "--lora", lora, *sizes, "-o", tmp_path / "a.png")
        code, out, err = run(*given)
        assert (code, out) == (2, "")
        assert text in " ".join(err.split())
        assert not (tmp_path / "a.png").exists()
    given = ("generate", made.converted, "a", "--lora", converted, *sizes, "-o", tmp_path / "a.png")
    code, _, err = run(*given)
    assert code == 0, err


def test_a_lora_is_not_written_over_itself(make: Any, tmp_path: Path) -> None:
    """Neither over another file, unless that is asked for."""
    made = make("flux")
    tensors = name_lora(draw_lora(load(made.folder), "flux"), "diffusers", "flux")
    path = write(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(Exception, match=r"lora\.safetensors"):
        convert_lora(path, path, made.converted, overwrite=True)
    convert_lora(path, tmp_path / "out.safetensors", made.converted)
    with pytest.raises(Exception, match=r"out\.safetensors"):
        convert_lora(path, tmp_path / "out.safetensors", made.converted)
    convert_lora(path, tmp_path / "out.safetensors", made.converted, overwrite=True)


@pytest.mark.parametrize(
    ("entry_of_plan", "named"),
    [
        ({"fp32_modules": ["proj_out"]}, "the fp32 module proj_out"),
        (
            {"operands": {"cast_inputs": ["proj_out"], "fp32_parameters": []}},
            "casts of operands that its code mixes",
        ),
    ],
)
def test_a_plan_beyond_files_is_refused(
    entry_of_plan: dict[str, Any], named: str, make: Any, tmp_path: Path
) -> None:
    """Its model was written with other exponents, so the plan is none for a LoRA of it."""
    made = make("flux")
    content = json.loads(made.plan.read_text())
    entry = next(x for x in content["components"] if x["component"] == "transformer")
    entry["scaling"] |= entry_of_plan
    from stopdown.records import from_json

    plan = seal_plan(from_json(json.dumps(content), Plan))
    path = write(
        name_lora(draw_lora(load(made.folder), "flux"), "diffusers", "flux"),
        tmp_path / "a.safetensors",
    )
    with pytest.raises(OptionError, match=f"has {named}, so convert writes it with"):
        convert_lora(path, tmp_path / "out.safetensors", plan)


@pytest.mark.parametrize(
    ("name", "wanted"),
    {
        "lora_unet_a_b.lora_down.weight": ("lora_unet_a_b", "lora_A"),
        "lora_unet_a_b.lora_mid.weight": ("lora_unet_a_b", "lora_mid"),
        "transformer.a.0.lora_B.weight": ("transformer.a.0", "lora_B"),
        "transformer.a.0.lora_B.style.weight": ("transformer.a.0", "lora_B"),
        "transformer.a.0.lora_B.bias": ("transformer.a.0", "lora_B.bias"),
        "unet.a.processor.to_q_lora.up.weight": ("unet.a.processor.to_q", "lora_B"),
        "unet.a.to_q.lora.down.weight": ("unet.a.to_q", "lora_A"),
        "diffusion_model.a.dora_scale": ("diffusion_model.a", "magnitude"),
        "base_model.model.a.lora_magnitude_vector.weight": ("base_model.model.a", "magnitude"),
        "lora_unet_a.lokr_w2_b": ("lora_unet_a", "LoKr"),
        "lora_unet_a.hada_t1": ("lora_unet_a", "LoHa"),
        "diffusion_model.a.diff_b": ("diffusion_model.a", "diff_b"),
        "lora_unet_a.alpha": ("lora_unet_a", "alpha"),
        "model.a.weight": None,
    }.items(),
)
def test_names_are_read_from_their_ends(name: str, wanted: tuple[str, str] | None) -> None:
    """Layer and role, in every style."""
    assert split_lora_name(name) == wanted


def test_a_model_is_no_lora(make: Any, tmp_path: Path) -> None:
    """What `convert` takes for a LoRA is told by names alone."""
    made = make("flux")
    weights = next((made.folder / "transformer").glob("*.safetensors"))
    assert not is_lora_file(weights)
    assert not is_lora_file(made.plan)
    tensors = name_lora(draw_lora(load(made.folder), "flux"), "kohya", "flux")
    assert is_lora_file(write(tensors, tmp_path / "a.safetensors"))
