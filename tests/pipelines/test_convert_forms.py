"""`convert --to`: one file, or a file each for ComfyUI, from a Diffusers folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.conversions import assert_right, build, convert_made, measured, plan_plainly, run_plain
from models.measured_plans import measure_pipeline
from models.single_file_models import build_flux, build_t5
from stopdown.checkpoints.convert import _place_exponents, convert
from stopdown.checkpoints.output_places import Target
from stopdown.errors import OptionError
from stopdown.fold_names import list_folds, spread_rows
from stopdown.pipelines.loader import complete_source, load_pipeline
from stopdown.pipelines.requests import Request
from stopdown.pipelines.tiny_pipelines import overflow_
from stopdown.plans.certified import certify_plan
from stopdown.records import Conversion, Plan, Scaling, read_record
from stopdown.scaling.folding.folds import fold_scaling
from stopdown.sources.headers import read_rescaled
from stopdown.sources.single_file_names import arrange, find_whole
from stopdown.sources.source import Source
from stopdown.sources.sources import resolve_source


@pytest.fixture(scope="module")
def planned(save_planned: Callable[[str], tuple[Path, Plan]]) -> tuple[Path, Plan]:
    """A tiny Stable Diffusion beyond fp16, in bf16, and its plan."""
    return save_planned("sd")


@pytest.fixture(scope="module")
def single(planned: tuple[Path, Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it in one file."""
    output = tmp_path_factory.mktemp("single") / "out.safetensors"
    convert_made("sd", planned[0], output, planned[1])
    return output


@pytest.mark.thorough
def test_one_file_is_right_in_plain_diffusers(planned: tuple[Path, Plan], single: Path) -> None:
    """A folder becomes a checkpoint: NaN before, right after, and no `--allow-eps` is needed."""
    assert_right(run_plain("sd", planned[0], single))
    found = {name.partition(".")[0] for name in load_file(single)}
    assert found == {"model", "first_stage_model", "cond_stage_model"}
    assert complete_source(resolve_source(single, config=planned[0])).parts == ()


@pytest.mark.thorough
def test_one_file_has_a_card_and_says_what_was_done(
    planned: tuple[Path, Plan], single: Path
) -> None:
    """In its metadata and beside it: the plan, what was rescaled, what that rests on, and the limits."""
    with safe_open(single, "pt") as file:
        said = file.metadata()
    assert said["stopdown"].endswith(f"plan {planned[1].seal}")
    assert read_rescaled(single).startswith("unet: weights are multiplied by powers of two")
    assert re.search(r"has \d\.\d bits of headroom", said["stopdown.unet"])
    card = single.with_suffix(".md").read_text()
    assert card.startswith(f"# {planned[0]}, converted to fp16 by Stopdown\n")
    assert f"Plan: `{planned[1].seal}`." in card
    assert "| unet | fp16 |" in card
    assert "**Adapters (LoRA, DoRA, IP-Adapter) and ControlNets" in card


def test_a_card_of_somebody_else_stays(planned: tuple[Path, Plan], tmp_path: Path) -> None:
    """A text of that name that convert did not write is not replaced."""
    (tmp_path / "out.md").write_text("mine")
    leave = [entry.component for entry in planned[1].components]
    convert_made("sd", planned[0], tmp_path / "out.safetensors", planned[1], leave=leave)
    assert (tmp_path / "out.md").read_text() == "mine"


@pytest.mark.thorough
def test_comfyui_gets_a_file_each(planned: tuple[Path, Plan], tmp_path: Path) -> None:
    """In the folders of ComfyUI, with a record and a card; each is found to be the component that it is."""
    folder, plan = planned
    record = convert_made("sd", folder, Target(tmp_path / "out", "comfyui"), plan)
    files = {
        "diffusion_models/model-unet.safetensors": "unet",
        "vae/model-vae.safetensors": "vae",
        "text_encoders/model-text_encoder.safetensors": "text_encoder",
    }
    assert set(record.files) == {*files, "README.md"}
    assert read_record(tmp_path / "out" / "stopdown.json", Conversion).files == record.files
    for name, component in files.items():
        source = complete_source(resolve_source(tmp_path / "out" / name, config=folder))
        assert [part.name for part in source.parts] == [component]
        assert {x.dtype for x in load_file(source.path).values()} == {torch.float16}
    path = tmp_path / "out" / "diffusion_models" / "model-unet.safetensors"
    assert_exponents(load_pipeline(resolve_source(folder), torch_dtypes=torch.float32).unet, path)
    assert record.load.startswith("copy its folders into those of ComfyUI/models")


def assert_exponents(module: torch.nn.Module, path: Path) -> None:
    """Each tensor of a file is the original's times the powers of two that its metadata names."""
    with safe_open(path, "pt") as file:
        exponents = list_folds(json.loads(file.metadata()["stopdown.exponents"]))
    tensors = load_file(path)
    assert exponents
    assert exponents.keys() <= tensors.keys()
    for name, original in arrange(module).items():
        rows = spread_rows(exponents.get(name, ()), len(original))
        shape = (-1, *(1 for _ in original.shape[1:]))
        assert torch.equal(tensors[name], torch.ldexp(original, rows.view(shape)).half()), name


def test_names_of_folds_follow_the_tensors_of_a_file() -> None:
    """Rows of fused tensors and columns: a folded Flux in the names of its file is what they say."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: Any = build_flux().eval().requires_grad_(False)
    block, before = "single_transformer_blocks.0", arrange(module)
    before = {name: tensor.clone() for name, tensor in before.items()}
    exponents = {
        f"{block}.proj_out.weight[:,0:128]": 3,
        f"{block}.proj_out.weight[:,128:640]": -4,
        f"{block}.attn.to_k.weight": -2,
        f"{block}.attn.to_v.weight[64:128]": 1,
    }
    fold_scaling(module, Scaling(exponents=exponents))
    named = _place_exponents(module, exponents, "")
    assert named == {
        "single_blocks.0.linear2.weight": 3,
        "single_blocks.0.linear2.weight[:,128:640]": -7,
        "single_blocks.0.linear1.weight[128:256]": -2,
        "single_blocks.0.linear1.weight[320:384]": 1,
    }
    for name, folds in list_folds(named).items():
        for place, exponent in folds:
            before[name][place] *= 2.0**exponent
    assert all(torch.equal(x, before[name]) for name, x in arrange(module).items())


def test_what_is_left_keeps_its_format(planned: tuple[Path, Plan], tmp_path: Path) -> None:
    """`--leave` writes a component in the names of single files and in its own dtype."""
    folder, plan = planned
    target = Target(tmp_path / "out", "comfyui")
    convert_made("sd", folder, target, plan, leave=["unet", "vae"])
    tensors = load_file(tmp_path / "out" / "vae" / "model-vae.safetensors")
    assert {x.dtype for x in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("out.safetensors", "diffusers", 'is a single file, and to="diffusers" writes a folder.'),
        ("out", "single", 'is no .safetensors file, and to="single" writes one.'),
        ("out.safetensors", "comfyui", 'is a single file, and to="comfyui" writes one for each'),
    ],
)
def test_a_form_that_does_not_fit_its_place_is_refused(
    name: str, form: Any, message: str, planned: tuple[Path, Plan], tmp_path: Path
) -> None:
    """Before anything is loaded, with what to give instead."""
    with pytest.raises(OptionError, match=re.escape(message)):
        convert_made("sd", planned[0], Target(tmp_path / name, form), planned[1])
    assert list(tmp_path.iterdir()) == []


def test_models_without_names_are_refused(
    save_tiny: Callable[..., Path], tmp_path: Path, planned: tuple[Path, Plan]
) -> None:
    """No program reads a CogVideoX from one file; of an autoencoder the names are not known."""
    folder = save_tiny("cogvideox")
    with pytest.raises(OptionError) as caught:
        convert_made("cogvideox", folder, tmp_path / "out.safetensors", planned[1])
    assert str(caught.value) == (
        "No known program reads a CogVideoXPipeline from one file: it would hold the "
        "text_encoder and transformer and vae beside the rest. Files for ComfyUI hold one component "
        'each. Give a folder as OUT, and use to="comfyui".'
    )
    folder = save_tiny("cogview3plus")
    plan = plan_plainly("cogview3plus", folder)
    with pytest.raises(OptionError) as caught:
        convert_made("cogview3plus", folder, Target(tmp_path / "out", "comfyui"), plan)
    assert str(caught.value).startswith(
        "The model can't be written as single files. transformer: The names of a "
        "CogView3PlusTransformer2DModel in single files aren't known."
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_certificate_goes_into_the_file(
    single: Path, planned: tuple[Path, Plan], tmp_path: Path
) -> None:
    """A file with bounds says so, and for which inputs."""
    source: Source = resolve_source(write_encoder(planned[0], tmp_path), config=planned[0])
    convert_made("sd", source, tmp_path / "out.safetensors", certify_plan(source))
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        said = file.metadata()["stopdown.text_encoder"]
    assert "Proven from its weights: every fp16 activation stays in range. All " in said


def write_encoder(folder: Path, place: Path) -> Path:
    """The text encoder of a folder as a file."""
    path = place / "clip.safetensors"
    path.write_bytes((folder / "text_encoder" / "model.safetensors").read_bytes())
    return path


@pytest.mark.thorough
def test_what_a_file_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    """A T5 whose first norms see small values: its eps belong into a config; a folder holds it, no file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: Any = build_t5().eval().requires_grad_(False)
    overflow_(module)
    module.config.architectures = ["T5EncoderModel"]
    module.config.save_pretrained(tmp_path / "text_encoder")
    path = tmp_path / "t5.safetensors"
    save_file(arrange(module), path)
    source = resolve_source(path, config=tmp_path / "text_encoder")
    call = {"input_ids": torch.arange(1, 17)[None]}
    plan, request = measure_pipeline(source, prompts=[call]), Request(arguments=call)
    with pytest.raises(OptionError) as caught:
        convert(source, tmp_path / "out.safetensors", plan, request=request)
    message = str(caught.value)
    assert "text_encoder: no configuration field sets encoder.block.0.layer.0.layer_norm" in message
    assert 'Or write a folder, whose config sets eps: to="diffusers".' in message
    assert not (tmp_path / "out.safetensors").exists()
    (entry,) = convert(source, tmp_path / "out", plan, request=request).components
    assert (entry.eps_left, list(entry.fields)) == ({}, ["layer_norm_epsilon"])


@pytest.mark.slow
def test_an_sdxl_becomes_one_file(tmp_path: Path) -> None:
    """Both encoders have their own layout; each component is what its folder would hold, row by row."""
    folder, output = tmp_path / "model", tmp_path / "out.safetensors"
    build("sdxl").save_pretrained(folder)
    plan = measure_pipeline(str(folder), **measured("sdxl"))
    convert_made("sdxl", folder, output, plan)
    with safe_open(output, "pt") as file:
        exponents = list_folds(json.loads(file.metadata()["stopdown.exponents"]))
    before = load_pipeline(resolve_source(folder), torch_dtypes=torch.float32)
    table, tensors = find_whole("StableDiffusionXLPipeline"), load_file(output)
    for name, prefix in table.prefixes.items():
        for key, original in arrange(getattr(before, name), table.layouts.get(name, "")).items():
            rows = spread_rows(exponents.get(prefix + key, ()), len(original))
            shape = (-1, *(1 for _ in original.shape[1:]))
            expected = torch.ldexp(original, rows.view(shape)).half()
            assert torch.equal(tensors[prefix + key], expected), prefix + key
