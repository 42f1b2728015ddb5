"""Plans written down: plain Diffusers, in a process without Stopdown, renders right in fp16."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import stopdown
from models.conversions import assert_right, convert_made, plan_plainly, run_plain
from models.pipeline_calls import call_pipeline, load_plain
from models.single_file_layout import name_pipeline
from models.snapshots import assert_untouched
from stopdown import __version__
from stopdown.checkpoints import component_folders, file_exponents
from stopdown.checkpoints import convert as convert_module
from stopdown.checkpoints.convert import convert
from stopdown.checkpoints.file_exponents import (
    FileExponents,
    express_component,
    find_eps_fields,
    list_eps,
)
from stopdown.checkpoints.output_places import Target
from stopdown.dtype_rules import check
from stopdown.errors import OptionError, OutputError, ScalingError
from stopdown.interception.patches import Patches
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.call_interception import Rank, put_layer
from stopdown.module_calls.callee import Callee
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
from stopdown.plans.exponents import scale_component
from stopdown.plans.plan_files import seal_plan
from stopdown.records import ComponentPlan, Conversion, Plan, Scaling, from_json
from stopdown.scaling.folding.folds import fold_scaling, load_scaled
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.trials import folds_alone
from stopdown.sources.single_file_names import Layout
from stopdown.sources.sources import resolve_source
from stopdown.testing import make_pipeline


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


def test_folds_go_from_the_stored_format_to_fp16(
    save_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a plan has folds alone nothing is in fp32 on the way: each weight is rounded once from bf16."""
    source, name = resolve_source(save_tiny("sd", "bf16")), "conv_in.weight"
    plan = plan_plainly("sd", save_tiny("sd", "bf16"))
    scaling = {"unet": Scaling(exponents={name: -20})}
    entries = [
        dataclasses.replace(x, scaling=scaling.get(x.component, Scaling())) for x in plan.components
    ]
    seen: dict[str, set[torch.dtype]] = {}

    def watch(module: torch.nn.Module, *given: Any) -> Any:
        seen[type(module).__name__] = {x.dtype for x in module.parameters()}
        return load_scaled(module, *given)

    monkeypatch.setattr(component_folders, "load_scaled", watch)
    convert(
        source, tmp_path / "out", seal_plan(dataclasses.replace(plan, components=tuple(entries)))
    )
    assert len(seen) == len(entries)
    assert set.union(*seen.values()) == {torch.bfloat16}
    file = "unet/diffusion_pytorch_model.safetensors"
    before, after = load_file(source.path / file), load_file(tmp_path / "out" / file)
    for key, value in before.items():
        wanted = torch.ldexp(value.double(), torch.tensor(-20 if key == name else 0)).half()
        assert torch.equal(after[key], wanted)


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
            assert said.startswith(f"{entry.component}: weights are times powers of two")
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


def test_what_is_left_is_copied(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """`--leave` copies a component's files to the byte; loading it is told."""
    folder, plan = save_planned("sd")
    others = [e.component for e in plan.components if e.component != "text_encoder"]
    record = convert_made("sd", folder, tmp_path / "out", plan, leave=others)
    for name in others:
        file = f"{name}/diffusion_pytorch_model.safetensors"
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()
    assert [e.precision for e in record.components if e.component in others] == ["as stored"] * 2
    assert '"unet": torch.bfloat16' in record.load
    assert '"default": torch.float16' in record.load


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
        assert rescaled.startswith("unet: weights are times powers of two")
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
        (foreign, True, "would replace a file that convert did not write."),
        (damaged, True, "would replace a file that convert did not write."),
        (marked, False, 'holds a model that convert wrote before. .* Add allow="overwrite" to'),
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
    with pytest.raises(Exception, match=r"^unet:q is not in the file as it is in the model"):
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


# ---------------------------------------------------------------------------------------------
# Eps


@pytest.fixture(scope="module")
def encoder() -> tuple[Any, ComponentPlan, ComponentCall]:
    """A T5 beyond fp16, its exponents, and a call of it."""
    module = make_pipeline("cogvideox", overflow="text_encoder").text_encoder
    tokens = torch.arange(8)[None]
    rescaling = rescale_(module, (tokens,))
    rescaling.undo()
    entry = ComponentPlan("text_encoder", "T5EncoderModel", "", "fp16", rescaling.scaling)
    call = ComponentCall(Callee("text_encoder", module, "forward", "encode"), (tokens,), {})
    return module, entry, call


def test_fields_are_found_by_doubling_them() -> None:
    """A field sets the norms that double with it; eps in a class's code belong to none."""
    pipe = make_pipeline("cogvideox")
    fields = find_eps_fields(pipe.text_encoder)
    assert fields == {"layer_norm_epsilon": frozenset(list_eps(pipe.text_encoder))}
    fields = find_eps_fields(pipe.transformer)
    assert list(fields) == ["norm_eps"]
    left = list_eps(pipe.transformer).keys() - fields["norm_eps"]
    assert left == {f"transformer_blocks.{i}.attn1.norm_{x}.eps" for i in (0, 1) for x in "qk"}
    assert find_eps_fields(torch.nn.LayerNorm(4)) == {}


def test_a_field_makes_a_component_exact(
    encoder: tuple[Any, ComponentPlan, ComponentCall],
) -> None:
    """Built from the changed configuration, with the folded weights, a T5 is bit for bit the same."""
    module, entry, call = encoder
    with assert_untouched(module):
        found = express_component(module, entry, lambda: [])
    assert (found.left, found.effect, found.anew) == ({}, 0.0, False)
    config = type(module.config)(**{**module.config.to_dict(), **found.fields})
    built = type(module)(config).eval()
    rescaling = fold_scaling(module, entry.scaling)
    built.load_state_dict(module.state_dict())
    rescaling.undo()
    assert list_eps(built) != list_eps(module)
    with torch.no_grad():
        assert torch.equal(built(*call.args)[0], module(*call.args)[0])


def test_what_a_file_cannot_hold_is_found_anew(
    encoder: tuple[Any, ComponentPlan, ComponentCall],
) -> None:
    """A plan with a multiply is solved again by folds alone; without a configuration eps stay."""
    module, entry, call = encoder
    multiplied = dataclasses.replace(entry.scaling, multiplies={"encoder.block.0": -2})
    with_multiply = dataclasses.replace(entry, scaling=multiplied)
    partly = dataclasses.replace(entry.scaling, outputs={0: 3}, fp32_modules=("encoder",))
    wide = dataclasses.replace(entry, scaling=partly)
    assert file_exponents.describe_rest(with_multiply) == "1 multiply"
    assert file_exponents.describe_rest(wide) == "the fp32 module encoder and an output in fp32"
    assert not file_exponents._is_folds_alone(module, wide)
    with pytest.raises(ScalingError, match=r"^Its plan has 1 multiply, and no run of the pipeline"):
        express_component(module, with_multiply, lambda: [])
    with assert_untouched(module):
        found = express_component(module, with_multiply, lambda: [call])
        bare = express_component(module, entry, lambda: [call], has_config=False)
    assert (found.anew, found.left, found.scaling.multiplies) == (True, {}, {})
    assert list(found.fields) == ["layer_norm_epsilon"]
    assert bare.left
    assert (bare.fields, bare.calls) == ({}, 1)


def test_squares_fit_where_readers_keep_them_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm of Diffusers squares in fp32; one that squares in its input's format needs smaller inputs.

    Exponents are looked for beneath the layers that a run has put on the module.
    """
    torch.manual_seed(0)
    norm = RMSNorm(8, eps=1e-8, elementwise_affine=False)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 8)).eval()
    module[0].weight.data *= 2.0**16
    tokens = torch.randn(4, 8)
    rescaling = rescale_(module, (tokens,))
    rescaling.undo()
    entry = ComponentPlan("vae", "Sequential", "", "fp16", rescaling.scaling)
    call = ComponentCall(Callee("vae", module, "forward", "decode"), (tokens,), {})
    express = functools.partial(express_component, module, entry, lambda: [call])
    assert _find_largest_output(module, express(has_config=False).scaling, tokens) > 256
    layout = Layout("Sequential", "", (), narrow=("RMSNorm",))
    monkeypatch.setattr(file_exponents, "read_layouts", lambda: {"Sequential": layout})
    with Patches() as patches:
        put_layer(module, "forward", _refuse, patches, Rank.RECORD)
        narrow = express(has_config=False)
    assert narrow.anew
    assert 1 < _find_largest_output(module, narrow.scaling, tokens) < 256
    assert express(has_config=True).scaling.exponents == entry.in_force.exponents


def _find_largest_output(
    module: torch.nn.Sequential, scaling: Scaling, tokens: torch.Tensor
) -> float:
    """Of the first layer, with these exponents."""
    rescaling = fold_scaling(module, scaling)
    with torch.no_grad():
        largest = float(module[0](tokens).abs().max())
    rescaling.undo()
    return largest


@pytest.mark.thorough
def test_exponents_found_anew_rest_on_bounds(
    encoder: tuple[torch.nn.Module, ComponentPlan, ComponentCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where those of the plan do: a certificate is made again for folds alone, or it is gone."""
    module, entry, call = encoder
    certified, _ = scale_component(module, [call], ranges="bound")
    assert certified.certified
    multiplied = dataclasses.replace(certified, multiplies={"encoder.block.0": -2})
    planned = dataclasses.replace(entry, scaling=multiplied)
    found = express_component(module, planned, lambda: [call])
    assert found.anew
    assert found.scaling.certified
    assert found.scaling.range_note.startswith(f"100 % of {found.scaling.values} fp16 values")
    measured = dataclasses.replace(entry.scaling, multiplies={"encoder.block.0": -2})
    plain = express_component(module, dataclasses.replace(entry, scaling=measured), lambda: [call])
    assert (plain.anew, plain.scaling.certified) == (True, False)
    monkeypatch.setattr(folds_alone, "scale_by_bounds", _refuse)
    assert not express_component(module, planned, lambda: [call]).scaling.certified


def _refuse(*_: Any, **__: Any) -> Any:
    raise ScalingError("no bounds")


def test_the_effect_of_an_eps_is_measured() -> None:
    """A LayerNorm whose input is scaled and whose eps is not changes the output by what is said."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    callee = Callee("m", module, "forward", "denoise")
    calls = [ComponentCall(callee, (torch.randn(4, 8),), {})]
    folds = {"0.weight": -8, "0.bias": -8}
    with assert_untouched(module), torch.no_grad():
        whole = Scaling(exponents=folds, eps={"1.eps": -16})
        before = module(*calls[0].args)
        exact = file_exponents._measure_effect(module, FileExponents(whole), calls, [before])
        folded = FileExponents(Scaling(exponents=folds))
        left = file_exponents._measure_effect(module, folded, calls, [before])
    assert exact == {"effect": 0.0, "calls": 1}
    rescaling = fold_scaling(module, Scaling(exponents=folds))
    after = module(*calls[0].args).detach()
    rescaling.undo()
    error = float((after - before).double().norm() / before.double().norm())
    assert left["effect"] == pytest.approx(error)
    assert error > 0.1


@pytest.mark.thorough
def test_an_effect_beyond_the_limit_is_refused(
    save_planned: Callable[..., tuple[Path, Plan]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All components in one message, with the norms, the change and both ways on; nothing is left."""
    folder, plan = save_planned("sd", "native")
    monkeypatch.setattr(file_exponents, "_measure_effect", lambda *_: {"effect": 0.25, "calls": 9})
    monkeypatch.setattr(
        folds_alone,
        "measure_kinds",
        lambda *_: [SimpleNamespace(measured=None, capture=SimpleNamespace(signature="forward()"))],
    )
    monkeypatch.setattr(folds_alone.FoldsAlone, "find", lambda *_, **__: None)
    with pytest.raises(OptionError) as caught:
        convert_made("sd", folder, tmp_path / "out", plan, leave=["vae"])
    assert str(caught.value) == (
        f"{folder} cannot be written in fp16 for programs without Stopdown. unet: no configuration "
        "field sets conv_norm_out.eps, down_blocks.0.attentions.0.norm.eps, "
        "down_blocks.0.attentions.0.transformer_blocks.0.norm1.eps and "
        f"{count_left(plan) - 3} more, and without it the "
        "output is 2.5e-01 off in 9 calls; up to 4.9e-04 is accepted. Files can only contain weights and "
        "configs, but no multiplications, fp32 modules or "
        "casts. Write unchanged what cannot be converted: "
        'leave="unet". Or accept the difference: allow="eps". Or run the plan itself: stopdown '
        f"generate {folder} --precision PLAN."
    )
    assert list(tmp_path.iterdir()) == []
    record = convert_made("sd", folder, tmp_path / "out", plan, leave=["vae"], allow=["eps"])
    assert next(e.effect for e in record.components if e.component == "unet") == 0.25


def count_left(plan: Plan) -> int:
    return len(next(entry.in_force.eps for entry in plan.components if entry.component == "unet"))


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
    (carried,) = (x for x in record.components if x.precision == "as stored, with its plan")
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
    assert "transformer: Powers of two in its weights alone do not keep it in fp16's range" in str(
        caught.value
    )
    assert list(tmp_path.iterdir()) == []


def test_a_component_that_its_plan_leaves_out_is_refused(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A plan that runs a component in bf16 says why, and that sentence is passed on."""
    folder, plan = save_planned("sd")
    wide = [
        dataclasses.replace(e, precision="bf16", reasons=("Its code cannot be traced.",))
        if e.component == "unet"
        else dataclasses.replace(e, precision="as loaded")
        for e in plan.components
    ]
    edited = seal_plan(dataclasses.replace(plan, components=tuple(wide)))
    with pytest.raises(OptionError) as caught:
        convert(folder, tmp_path / "out", edited)
    assert "unet: its plan runs it in bf16. Its code cannot be traced." in str(caught.value)
    with pytest.raises(OptionError) as caught:
        convert(folder, tmp_path / "out", edited, leave=["you-net"])
    assert str(caught.value) == (
        f'leave="you-net" names no component of {folder}. Its components are vae, text_encoder, unet. '
        'Use leave="vae".'
    )


def test_what_convert_did_not_write_is_never_replaced(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A folder of anything, an original model, the source itself: refused, also with `force`."""
    folder, plan = save_planned("sd")
    taken, model, inside = tmp_path / "taken", tmp_path / "model", folder / "unet"
    for place, name in ((taken, "letter.txt"), (model, "model_index.json")):
        place.mkdir()
        (place / name).write_text("{}")
    only = "Only what Stopdown wrote there for the same purpose is replaced. Choose another name as OUT."
    foreign = "would replace a folder that convert did not write."
    for place, message in (
        (taken, f"The output {taken} {foreign} {only}"),
        (model, f"The output {model} {foreign} {only}"),
        (folder, f"OUT {folder} is the model itself. Give another place; it is not overwritten."),
        (inside, f"OUT {inside} lies in the folder of the model, {folder}. "
         "The output must not contain what is read. Give another place."),
    ):  # fmt: skip
        with pytest.raises(OutputError) as caught:
            convert(folder, place, plan, allow=["overwrite"])
        assert str(caught.value) == message
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        *("letter.txt", "model", "model_index.json", "taken")
    ]


def test_force_replaces_what_convert_wrote(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A converted folder is replaced with `force` alone, also through a link, which stays a link."""
    folder, plan = save_planned("sd")
    out, link = tmp_path / "out", tmp_path / "link"
    leave = ["unet", "vae", "text_encoder"]
    first = convert_made("sd", folder, out, plan, leave=leave)
    assert first.files["unet/config.json"] == (out / "unet" / "config.json").stat().st_size
    with pytest.raises(
        OutputError,
        match=r"out holds a model that convert wrote before\..* another place: .*out-2\.",
    ):
        convert_made("sd", folder, out, plan, leave=leave)
    link.symlink_to(out)
    before = (out / "model_index.json").stat().st_ino
    convert_made("sd", folder, link, plan, leave=leave, allow=["overwrite"])
    assert (out / "model_index.json").stat().st_ino != before
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.parametrize("name", [".git/HEAD", "lora.safetensors", "unet/config.json", "adapter"])
def test_force_spares_what_was_put_there(
    name: str, save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A file, a changed file, a link or an empty folder of somebody else's is named, and stays."""
    folder, plan = save_planned("sd")
    leave = ["unet", "vae", "text_encoder"]
    out = tmp_path / "out"
    convert_made("sd", folder, out, plan, leave=leave)
    (out / name).parent.mkdir(exist_ok=True)
    if name == "adapter":
        (out / name).symlink_to(tmp_path)
    else:
        (out / name).write_text("mine")
    with pytest.raises(OutputError) as caught:
        convert_made("sd", folder, out, plan, leave=leave, allow=["overwrite"])
    assert f"a folder with files that convert did not write so: {name}." in str(caught.value)
    assert (out / name).is_dir() or (out / name).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_spares_sources_and_plans_inside(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A model that lies in OUT, reaches into it by a link, or whose plan lies there, is not deleted."""
    from stopdown.plans.plan_files import write_plan

    folder, plan = save_planned("sd")
    leave = ["unet", "vae", "text_encoder"]
    out = tmp_path / "out"
    convert_made("sd", folder, out, plan, leave=leave)
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(out / "unet" if path.name == "unet" else path)
    write_plan(plan, out / "plan.json")
    for source, given, named in (
        (linked, plan, linked / "unet" / "config.json"),
        (folder, out / "plan.json", out / "plan.json"),
    ):
        with pytest.raises(OutputError, match=r"OUT .* holds .*, which is read") as caught:
            convert(source, out, given, leave=leave, allow=["overwrite"])
        assert str(named) in str(caught.value) or "diffusion_pytorch_model" in str(caught.value)
    assert (out / "unet" / "config.json").is_file()


def test_what_comes_into_out_meanwhile_stays(
    save_planned: Callable[[str], tuple[Path, Plan]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that somebody puts into OUT while it is converted again: the new folder is kept beside."""
    folder, plan = save_planned("sd")
    leave = ["unet", "vae", "text_encoder"]
    out = tmp_path / "out"
    convert_made("sd", folder, out, plan, leave=leave)
    copy = convert_module.copy_descriptions

    def come(*arguments: Any, **options: Any) -> None:
        copy(*arguments, **options)
        (out / "mine").write_text("")

    monkeypatch.setattr(convert_module, "copy_descriptions", come)
    with pytest.raises(OutputError) as caught:
        convert_made("sd", folder, out, plan, leave=leave, allow=["overwrite"])
    assert str(caught.value) == (
        f"The output {out} could not be put into its place: The output {out} would replace a folder "
        f"with files that convert did not write so: mine. It is whole, and was kept as {out}-2. "
        f"Move it: mv {out}-2 PLACE"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-2"]
    assert (out / "mine").is_file()
    assert (tmp_path / "out-2" / "stopdown.json").is_file()
