"""Plans written down: plain Diffusers, in a process without Stopdown, renders right in fp16."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import stopdown
from models.conversions import assert_right, convert_made, run_plain
from models.pipeline_calls import call_pipeline, load_plain
from models.single_file_layout import name_pipeline
from stopdown import __version__
from stopdown.checkpoints import component_folders, file_exponents
from stopdown.checkpoints import convert as convert_module
from stopdown.checkpoints.convert import convert
from stopdown.checkpoints.output_places import Target
from stopdown.dtype_rules import check
from stopdown.errors import OptionError, OutputError
from stopdown.numerics import relative_l2
from stopdown.pipelines import single_files
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.single_files import (
    Rows,
    fold_rows,
    spread_exponents,
    trace_rows,
    write_single_file,
)
from stopdown.plans.plan_files import seal_plan
from stopdown.records import Conversion, Plan, from_json
from stopdown.sources.sources import resolve_source


@pytest.fixture(scope="module")
def converted(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Conversion]:
    """The tiny Stable Diffusion, its converted folder, and what was said of it."""
    folder, plan = save_planned("sd")
    output = tmp_path_factory.mktemp("converted") / "out"
    return folder, output, convert_made("sd", folder, output, plan)


# ---------------------------------------------------------------------------------------------
# Folders


@pytest.mark.thorough
def test_plain_diffusers_renders_right(
    converted: tuple[Path, Path, Conversion], single: tuple[Path, Path, Conversion]
) -> None:
    """Without Stopdown: NaN before, near to fp32 afterwards; and in fp32 bit for bit the same."""
    for output in (converted[1], single[1]):
        assert_right(run_plain("sd", converted[0], output))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cogvideox", "sdxl", "svd"])
def test_other_pipelines_render_right(
    name: str, save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """The same for a T5, a video transformer, a causal autoencoder, and models with force_upcast."""
    folder, plan = save_planned(name)
    record = convert_made(name, folder, tmp_path / "out", plan)
    assert {entry.precision for entry in record.components} == {"fp16"}
    assert_right(run_plain(name, folder, tmp_path / "out"))


def test_a_folder_has_what_the_original_had(converted: tuple[Path, Path, Conversion]) -> None:
    """The same files and a record; only fields that the record names differ in configurations."""
    folder, output, record = converted
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    found = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert found == names | {"stopdown.json", "README.md"}
    assert from_json((output / "stopdown.json").read_bytes(), Conversion) == record
    for entry in record.components:
        old = json.loads((folder / entry.component / "config.json").read_text())
        new = json.loads((output / entry.component / "config.json").read_text())
        changed = {key: new[key] for key in new if old.get(key) != new[key]}
        changed.pop("dtype", None)
        assert changed == entry.fields
        for path in (output / entry.component).glob("*.safetensors"):
            assert {x.dtype for x in load_file(path).values() if x.is_floating_point()} == {
                torch.float16
            }


def test_a_folder_says_that_it_is_rescaled(converted: tuple[Path, Path, Conversion]) -> None:
    """In the metadata of each file and first in its card: an adapter for the original does not fit."""
    _, output, record = converted
    for entry in record.components:
        (path,) = (output / entry.component).glob("*.safetensors")
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            said = file.metadata().get("stopdown.rescaled", "")
        assert bool(said) == bool(entry.folded)
        if said:
            assert said.startswith(f"{entry.component}: weights are multiplied by powers of two")
    assert any(entry.folded for entry in record.components)
    card = (output / "README.md").read_text()
    assert "converted to fp16 by Stopdown" in card.splitlines()[0]
    assert "**Adapters (LoRA, DoRA, IP-Adapter) and ControlNets that were trained for the" in card


def test_a_card_says_which_calls_the_files_are_for(
    converted: tuple[Path, Path, Conversion],
) -> None:
    """Nothing watches their calls: the card lists the kinds that were measured, and other arguments."""
    _, output, record = converted
    unet = next(x for x in record.components if x.component == "unet")
    card = (output / "README.md").read_text()
    assert unet.signatures == ("forward(encoder_hidden_states[3d], sample[4d], timestep[1d])",)
    assert {"down_block_additional_residuals", "added_cond_kwargs"} < set(unet.not_for)
    assert not {"sample", "return_dict", "timestep"} & set(unet.not_for)
    assert "Converted weights run without Stopdown, so nothing watches their calls." in card
    (row,) = (x for x in card.splitlines() if x.startswith("| unet | `forward("))
    assert "`down_block_additional_residuals`" in row.split("|")[3]
    assert all((x.component in card) for x in record.components if x.folded)


@pytest.mark.parametrize("front", ["", "---\nlicense: mit\n---\n"])
def test_a_card_keeps_what_was_there(tmp_path: Path, front: str) -> None:
    """Ours comes first, but behind the front matter that the Hub reads."""
    (tmp_path / "README.md").write_text(f"{front}# Model\n\nIts words.\n")
    component_folders.write_card(tmp_path, "# Ours\n")
    assert (tmp_path / "README.md").read_text() == (
        f"{front}{chr(10) if front else ''}# Ours\n\n# Model\n\nIts words.\n"
    )


@pytest.mark.thorough
def test_check_warns_of_rescaled_weights(
    converted: tuple[Path, Path, Conversion], single: tuple[Path, Path, Conversion]
) -> None:
    """A converted folder, file and pipeline are named as such; components without exponents are not."""
    folder, output, record = converted
    rescaled = {entry.component for entry in record.components if entry.folded}

    def find(source: Any) -> set[str]:
        found = check.inspect_pipeline(source, precision="fp32").findings
        return {x.module_path for x in found if x.kind == "rescaled-weights"}

    assert find(str(output)) == rescaled
    assert find(load_pipeline(resolve_source(str(output)), torch_dtypes=torch.float32)) == rescaled
    file = resolve_source(single[1], config=folder, with_weights=False)
    assert find(check.find_weightless_source(file)) == {"checkpoint"}


def test_the_record_says_what_was_left(converted: tuple[Path, Path, Conversion]) -> None:
    """Eps without a field are listed with the change that they make, and how to load stands there."""
    _, output, record = converted
    unet = next(entry for entry in record.components if entry.component == "unet")
    assert unet.eps_left
    assert unet.calls >= 1
    assert unet.effect <= file_exponents.EFFECT_LIMIT
    assert any(
        x.startswith(
            f"{len(unet.eps_left)} norms keep their original eps, because no configuration"
        )
        for x in unet.reasons
    )
    assert record.load == (
        f'StableDiffusionPipeline.from_pretrained("{output}", dtype=torch.float16)'
    )


# ---------------------------------------------------------------------------------------------
# Single files


def save_single(folder: Path, path: Path) -> None:
    """The tiny Stable Diffusion as one file, with what Diffusers does not read besides."""
    weights = "diffusion_pytorch_model.safetensors"
    tensors = name_pipeline(
        *(load_file(folder / name / weights) for name in ("unet", "vae")),
        load_file(folder / "text_encoder" / "model.safetensors"),
    )
    tensors["model_ema.decay"] = torch.tensor([0.5, 0.25])
    tensors["model_ema.num_updates"] = torch.tensor(7)
    save_file(tensors, path, metadata={"modelspec.title": "tiny"})


@pytest.fixture(scope="module")
def single(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Conversion]:
    """A single file, what it became, and what was said of it."""
    folder, plan = save_planned("sd")
    place = tmp_path_factory.mktemp("single")
    source, output = place / "tiny.safetensors", place / "out.safetensors"
    save_single(folder, source)
    anywhere = seal_plan(dataclasses.replace(plan, fingerprint=""))
    return (
        source,
        output,
        convert_made("sd", resolve_source(source, config=folder), output, anywhere),
    )


@pytest.mark.thorough
def test_a_single_file_keeps_names_shapes_order_and_metadata(
    single: tuple[Path, Path, Conversion],
) -> None:
    """The written file differs in values and dtype alone; what Diffusers does not read is copied."""
    source, output, record = single
    assert record.unread == ("model_ema.decay",)
    with safe_open(source, "pt") as before, safe_open(output, "pt") as after:
        assert before.metadata() == {"modelspec.title": "tiny"}
        mark = f"{__version__} plan {record.plan}"
        rescaled = after.metadata().pop("stopdown.rescaled")
        assert rescaled.startswith("unet: weights are multiplied by powers of two")
        exponents = json.loads(after.metadata()["stopdown.exponents"])
        assert {name.partition("[")[0] for name in exponents} <= set(after.keys())
        entries = {k: x for k, x in after.metadata().items() if not k.startswith("stopdown.")}
        assert entries == {"modelspec.title": "tiny", "stopdown": mark}
        assert {k for k in after.metadata() if k.startswith("stopdown.")} == {
            "stopdown.rescaled",
            "stopdown.exponents",
            *(f"stopdown.{entry.component}" for entry in record.components),
        }
        names, found = list(before.keys()), list(after.keys())
        read = [name for name in names if not name.startswith("model_ema")]
        assert [name for name in found if not name.startswith("model_ema")] == read
        assert set(found) == set(names)
        for name in names:
            old, new = before.get_tensor(name), after.get_tensor(name)
            assert new.shape == old.shape
            if name in read:
                assert new.dtype == torch.float16
            else:
                assert torch.equal(new, old)


def test_force_replaces_a_file_with_its_mark_alone(
    single: tuple[Path, Path, Conversion],
    save_planned: Callable[[str], tuple[Path, Plan]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody else's `.safetensors` file stays, also with `force`; one that convert wrote needs it."""
    plan = seal_plan(dataclasses.replace(save_planned("sd")[1], fingerprint=""))
    foreign = Path(shutil.copy(single[0], tmp_path / "foreign.safetensors"))
    marked = Path(shutil.copy(single[1], tmp_path / "marked.safetensors"))
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_text("mine")
    for place, force, message in (
        (foreign, True, "would replace a file that convert didn't write."),
        (damaged, True, "would replace a file that convert didn't write."),
        (marked, False, 'already holds a model that convert wrote. .* Add allow="overwrite" to'),
    ):
        with pytest.raises(OutputError, match=message):
            convert(single[0], place, plan, allow=["overwrite"] if force else [])

    def open_none(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(convert_module, "_open", open_none)
    with pytest.raises(InterruptedError):  # the place was accepted
        convert(single[0], marked, plan, allow=["overwrite"])


def test_a_single_file_becomes_a_folder_too(
    single: tuple[Path, Path, Conversion],
    save_planned: Callable[[str], tuple[Path, Plan]],
    tmp_path: Path,
) -> None:
    """With the configuration's descriptions beside; what is left keeps the file's dtype."""
    folder, plan = save_planned("sd")
    anywhere = seal_plan(dataclasses.replace(plan, fingerprint=""))
    leave = ["unet", "vae"]
    source = resolve_source(single[0], config=folder)
    convert_made("sd", source, tmp_path / "out", anywhere, leave=leave)
    wide = load_file(tmp_path / "out" / "unet" / "diffusion_pytorch_model.safetensors")
    half = load_file(tmp_path / "out" / "text_encoder" / "model.safetensors")
    assert {x.dtype for x in wide.values()} == {torch.bfloat16}
    assert {x.dtype for x in half.values() if x.is_floating_point()} == {torch.float16}
    assert (tmp_path / "out" / "tokenizer" / "tokenizer_config.json").is_file()


def make_rows(q: torch.Tensor, strange: tuple[str, ...] = ()) -> Rows:
    from stopdown.sources.headers import StoredTensor

    tensors = {"qk": StoredTensor("bf16", (4, 3), 24), "ema": StoredTensor("fp32", (2,), 8)}
    numbers = {"unet": {"q": q, "k": torch.tensor([[3.0] * 3, [4.0] * 3])}}
    return Rows(tensors, {"qk": 1, "ema": 5}, numbers, {"unet": strange})


def test_rows_of_a_fused_projection_have_their_own_exponents() -> None:
    """Half of a tensor belongs to one parameter and half to another; what nobody reads is left out."""
    rows = make_rows(torch.tensor([[1.0] * 3, [2.0] * 3]))
    spread = spread_exponents(rows, {"unet": {"q": -3, "k[1:2]": 2}}, ())
    assert {name: x.tolist() for name, x in spread.items()} == {"qk": [-3, -3, 0, 2]}
    folded = fold_rows(torch.ones(4, 3), spread["qk"])
    assert folded[:, 0].tolist() == [0.125, 0.125, 1.0, 4.0]
    assert rows.find_unread() == ("ema",)
    assert spread_exponents(rows, {}, ("unet",)) == {}


def test_rows_that_are_wanted_differently_are_refused() -> None:
    """A transposed parameter with blocks of rows, or one that is computed, cannot be written back."""
    transposed = make_rows(torch.tensor([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]))
    with pytest.raises(Exception, match=r"^unet:q needs 2\*\*0 in rows of the file that other"):
        spread_exponents(transposed, {"unet": {"q[0:1]": -3}}, ())
    computed = make_rows(torch.tensor([[2.0] * 3, [3.0] * 3]), strange=("q",))
    with pytest.raises(Exception, match=r"^unet:q isn't in the file as it is in the model"):
        spread_exponents(computed, {"unet": {"q": -3}}, ())


def test_what_a_converter_computes_is_told_from_what_it_moves(
    save_planned: Callable[[str], tuple[Path, Plan]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A converter that adds 1 to a tensor is found by counting up and down."""
    from diffusers.loaders import single_file_model

    folder, _ = save_planned("sd")
    save_single(folder, tmp_path / "tiny.safetensors")
    mapping = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["UNet2DConditionModel"]
    convert_names = mapping["checkpoint_mapping_fn"]

    def compute(checkpoint: Any, config: Any, **options: Any) -> Any:
        converted = convert_names(checkpoint, config=config, **options)
        return {**converted, "conv_in.bias": converted["conv_in.bias"] + 1}

    monkeypatch.setitem(mapping, "checkpoint_mapping_fn", compute)
    rows = trace_rows(resolve_source(tmp_path / "tiny.safetensors", config=folder))
    assert rows.strange == {"vae": (), "text_encoder": (), "unet": ("conv_in.bias",)}


SD3_NAMES = {
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "proj_out": "final_layer.linear",
    "transformer_blocks.0.attn.to_out.0": "joint_blocks.0.x_block.attn.proj",
    "transformer_blocks.0.norm1.linear": "joint_blocks.0.x_block.adaLN_modulation.1",
    "transformer_blocks.0.ff.net.0.proj": "joint_blocks.0.x_block.mlp.fc1",
    "transformer_blocks.0.ff.net.2": "joint_blocks.0.x_block.mlp.fc2",
}
SD3_SWAPPED = {
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "transformer_blocks.0.norm1_context.linear": "joint_blocks.0.context_block.adaLN_modulation.1",
}
SD3_FUSED = {
    "joint_blocks.0.x_block.attn.qkv": "to_{}",
    "joint_blocks.0.context_block.attn.qkv": "add_{}_proj",
}


def lay_out_sd3(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tiny SD3 transformer as its authors write it: q, k, v in one tensor, shift before scale."""
    tensors = {"pos_embed": weights["pos_embed.pos_embed"]}
    for kind in ("weight", "bias"):
        tensors |= {f"{old}.{kind}": weights[f"{new}.{kind}"] for new, old in SD3_NAMES.items()}
        for new, old in SD3_SWAPPED.items():
            tensors[f"{old}.{kind}"] = weights[f"{new}.{kind}"].roll(32, 0)  # halves of 32 rows
        for old, form in SD3_FUSED.items():
            names = [f"transformer_blocks.0.attn.{form.format(x)}.{kind}" for x in "qkv"]
            tensors[f"{old}.{kind}"] = torch.cat([weights[name] for name in names])
    return {f"model.diffusion_model.{name}": x.contiguous() for name, x in tensors.items()}


def test_a_fused_layout_is_written_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SD3 keeps q, k, v in one tensor and swaps halves: each part gets its own exponent."""
    from diffusers import SD3Transformer2DModel
    from diffusers.loaders import single_file

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
        caption_projection_dim=32, pooled_projection_dim=16, pos_embed_max_size=8,
    )  # fmt: skip
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    folder, source = tmp_path / "sd3", tmp_path / "sd3.safetensors"
    model.save_config(folder / "transformer")
    save_file(lay_out_sd3(weights), source)

    def read(checkpoint: Any, dtype: torch.dtype) -> Any:
        return SD3Transformer2DModel.from_single_file(
            checkpoint, config=str(folder), subfolder="transformer", torch_dtype=dtype
        )

    def load(source: Any, *, torch_dtypes: torch.dtype) -> Any:
        checkpoint = single_file.load_single_file_checkpoint(str(source.path))
        return SimpleNamespace(components={"transformer": read(checkpoint, torch_dtypes)})

    monkeypatch.setattr(single_files, "load_pipeline", load)  # the file has a transformer alone
    rows = trace_rows(resolve_source(source, config=folder))
    assert (rows.strange, rows.find_unread()) == ({"transformer": ()}, ())
    folds = {
        "transformer_blocks.0.attn.to_k.weight": -3,
        "transformer_blocks.0.attn.add_v_proj.bias": 2,
        "norm_out.linear.weight[0:32]": -1,
    }
    spread = spread_exponents(rows, {"transformer": folds}, ())
    write_single_file(source, tmp_path / "out.safetensors", spread, {})
    loaded = read(load_file(tmp_path / "out.safetensors"), torch.float16).state_dict()
    expected = {name: tensor.float() for name, tensor in weights.items()}
    expected["transformer_blocks.0.attn.to_k.weight"] *= 2.0**-3
    expected["transformer_blocks.0.attn.add_v_proj.bias"] *= 2.0**2
    expected["norm_out.linear.weight"][:32] *= 0.5
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name].half()), name


def test_plain_fp8_of_a_file_is_written_in_fp16(tmp_path: Path) -> None:
    """Files of ComfyUI in fp8 without scales ended in PyTorch's NotImplementedError, after the plan."""
    stored = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    stored = stored.to(torch.float8_e4m3fn)
    save_file({"weight": stored}, tmp_path / "in.safetensors")
    exponents = torch.tensor([-2, 0, 1, 3], dtype=torch.int32)
    out = tmp_path / "out.safetensors"
    write_single_file(tmp_path / "in.safetensors", out, {"weight": exponents}, {})
    expected = (stored.float() * 2.0 ** exponents[:, None]).half()
    assert torch.equal(load_file(out)["weight"], expected)


# ---------------------------------------------------------------------------------------------
# Eps


# ---------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.thorough
def test_what_folds_cannot_do_is_carried(
    save_planned: Callable[..., tuple[Path, Plan]], tmp_path: Path
) -> None:
    """CogView3-Plus adds a table that is in no file to its stream: its config carries its plan.

    Plain `from_pretrained` gives the pixels of the plan itself, and so does our own loader.
    """
    folder, plan = save_planned("cogview3plus", "native")
    assert next(e for e in plan.components if e.component == "transformer").in_force.multiplies
    record = convert_made("cogview3plus", folder, tmp_path / "out", plan)
    (carried,) = (x for x in record.components if x.precision == "as stored, plan in config.json")
    assert carried.component == "transformer"
    assert "its plan has 3 multiplies and fp32 sums inside patch_embed." in carried.reasons[0]
    assert record.load.startswith("import stopdown; ")
    with stopdown.apply_plan(load_plain(folder, torch.float32), plan) as applied:
        wanted = call_pipeline(applied.pipe, "cogview3plus")
    found = load_plain(tmp_path / "out", torch.float16)
    assert found.transformer.quantization_method == "stopdown"
    assert (
        relative_l2(*map(torch.from_numpy, (call_pipeline(found, "cogview3plus"), wanted))) < 5e-3
    )
    wide = stopdown.load(tmp_path / "out", precision="transformer=fp32", device="cpu", guard=False)
    original = load_plain(folder, torch.float32)
    for name, tensor in original.transformer.state_dict().items():
        assert torch.equal(wide.transformer.state_dict()[name], tensor)


@pytest.mark.slow
def test_what_folds_cannot_do_is_refused_as_one_file(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A single file has no configuration that could carry a plan."""
    folder, plan = save_planned("cogview3plus")
    with pytest.raises(OptionError) as caught:
        convert_made("cogview3plus", folder, Target(tmp_path / "out", "comfyui"), plan)
    assert (
        "transformer: Powers of two in its weights alone don't keep its activations within fp16's range"
        in str(caught.value)
    )
    assert list(tmp_path.iterdir()) == []


def test_a_component_that_its_plan_leaves_out_is_refused(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A plan that runs a component in bf16 says why, and that sentence is passed on."""
    folder, plan = save_planned("sd")
    wide = [
        dataclasses.replace(e, precision="bf16", reasons=("Its code can't be traced.",))
        if e.component == "unet"
        else dataclasses.replace(e, precision="as loaded")
        for e in plan.components
    ]
    edited = seal_plan(dataclasses.replace(plan, components=tuple(wide)))
    with pytest.raises(OptionError) as caught:
        convert(folder, tmp_path / "out", edited)
    assert "unet: its plan runs it in bf16. Its code can't be traced." in str(caught.value)
    with pytest.raises(OptionError) as caught:
        convert(folder, tmp_path / "out", edited, leave=["you-net"])
    assert str(caught.value) == (
        f'leave="you-net" names no component of {folder}. Its components are vae, text_encoder, unet. '
        'Use leave="vae".'
    )
