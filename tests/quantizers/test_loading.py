"""Plans through `quantization_config` of `from_pretrained`, in Diffusers and in Transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import stopdown
from models.lora_cases import make_arguments, make_family
from models.pipeline_calls import call_pipeline, load_plain
from models.planned_models import FP16, have_same_weights, is_near, load_encoder, load_transformer
from stopdown import testing
from stopdown.devices.environment import cache_folder
from stopdown.errors import OptionError, PlanError, SourceError, StopdownWarning
from stopdown.fold_names import name_parameters
from stopdown.plans.applier import apply_plan
from stopdown.plans.plan_files import seal_plan, write_plan
from stopdown.quantizers.script_loading import join_config_plans
from stopdown.records import ComponentPlan, Plan
from stopdown.scaling.watch.call_watch import CallWatch
from stopdown.scaling.watch.known_calls import KnownCalls
from stopdown.sources import hub
from stopdown.testing import save_pipeline
from test_public import run_fresh

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("module_cache")]


def test_a_pipeline_that_overflows_runs_in_fp16(cogvideox: Path) -> None:
    """Plain fp16 is NaN; with the config pixels are finite and nearer to fp32 than bf16."""
    wanted = call_pipeline(load_plain(cogvideox, torch.float32), "cogvideox")
    assert not np.isfinite(call_pipeline(load_plain(cogvideox, FP16), "cogvideox")).all()
    pipe = load_plain(cogvideox, FP16, quantization_config=stopdown.quantization(cogvideox))
    assert is_near(call_pipeline(pipe, "cogvideox"), wanted, 0.003)


SLOW = ("sd", "sdxl", "flux", "wan")


@pytest.mark.parametrize(
    "name", ["cogvideox", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)]
)
def test_it_gives_what_apply_plan_gives(cogvideox: Path, tmp_path: Path, name: str) -> None:
    """Weights and pixels are bit for bit those of the same plan on a pipeline that was loaded before."""
    folder = cogvideox
    if name != "cogvideox":
        denoiser = "unet" if name.startswith("sd") else "transformer"
        folder = save_pipeline(name, tmp_path / name, overflow=denoiser)
    config = stopdown.quantization(folder)
    pipe, other = (
        load_plain(folder, FP16, quantization_config=config),
        load_plain(folder, torch.float32),
    )
    apply_plan(other, join_config_plans(config))
    for part in config.quant_mapping:
        assert have_same_weights(getattr(pipe, part), getattr(other, part))
    np.testing.assert_array_equal(call_pipeline(pipe, name), call_pipeline(other, name))


def test_the_plan_is_made_once(cogvideox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second load takes the plan that the first one kept."""
    load_transformer(cogvideox)
    from stopdown.plans import plan_choice

    monkeypatch.setattr(plan_choice, "certify_plan", None)
    load_transformer(cogvideox)
    assert list((cache_folder() / "plans").glob("*.json"))


def test_a_model_is_loaded_from_its_own_folder(
    cogvideox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline above is found from inside, too, where the folder is `.`."""
    monkeypatch.chdir(cogvideox / "transformer")
    kind = type(testing.make_pipeline("cogvideox").transformer)
    config = stopdown.StopdownConfig()
    assert kind.from_pretrained(".", torch_dtype=FP16, quantization_config=config).dtype == FP16


def test_a_denoiser_without_its_pipeline_is_refused(cogvideox: Path, tmp_path: Path) -> None:
    """Nothing tells how it is called; the error says what to load."""
    shutil.copytree(cogvideox / "transformer", tmp_path / "alone" / "transformer")
    with pytest.raises(SourceError, match=r"without its pipeline.*subfolder="):
        load_transformer(tmp_path / "alone")


def test_a_denoiser_beside_parts_of_its_pipeline_is_refused_without_a_plan(
    cogvideox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls are unknown: it was loaded in bf16 or fp32 in silence, then and ever after."""
    folder = Path(shutil.copytree(cogvideox, tmp_path / "parts"))
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path / "cache"))
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(SourceError, match=r"without its whole pipeline.*subfolder="):
        load_transformer(folder)
    made = [load_encoder(folder / "text_encoder")]  # its calls are known without a pipeline
    shutil.copytree(cogvideox / "tokenizer", folder / "tokenizer")
    made.append(load_transformer(folder))
    shutil.rmtree(folder / "tokenizer")
    made.append(load_transformer(folder))  # by the plan that is kept
    entries = [x.hf_quantizer.applied_plan.components[0] for x in made]
    assert [x.precision for x in entries] == ["fp16"] * 3


@pytest.mark.parametrize("has_index", [True, False])
def test_a_denoiser_in_a_cache_of_the_hub_gets_the_configs_beside_it(
    cogvideox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_index: bool
) -> None:
    """They come into the cache that has its weights, also where it's that of a program's `cache_dir`."""
    folder = tmp_path / "models--maker--tiny" / "snapshots" / "0123abc"
    shutil.copytree(cogvideox / "transformer", folder / "transformer")
    if has_index:
        shutil.copy(cogvideox / "model_index.json", folder)
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path / "cache"))

    def download_index(repo: str, *, revision: str, cache: Path) -> Path:
        assert (repo, revision, cache) == ("maker/tiny", "0123abc", tmp_path)
        return Path(shutil.copy(cogvideox / "model_index.json", folder))

    def download_snapshot(index: Path, repo: str, folders: Any, *, with_weights: bool) -> None:
        assert (index.parent, repo, with_weights) == (folder, "maker/tiny", False)
        shutil.copytree(cogvideox, folder, dirs_exist_ok=True)

    monkeypatch.setattr(hub, "download_index", download_index)
    monkeypatch.setattr(hub, "download_snapshot", download_snapshot)
    (entry,) = load_transformer(folder).hf_quantizer.applied_plan.components
    assert entry.precision == "fp16"


def test_pickles_without_a_plan_are_refused_as_such(cogvideox: Path, tmp_path: Path) -> None:
    """They were refused as weights that don't match the model."""
    folder = Path(shutil.copytree(cogvideox, tmp_path / "model")) / "text_encoder"
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        SourceError, match=r"^pytorch_model\.bin in .* are stored as pickles, and no"
    ):
        load_encoder(folder)


TABLES = ("shared.weight", "encoder.embed_tokens.weight")


@pytest.mark.parametrize("name", TABLES)
def test_a_tied_weight_is_scaled_once_whatever_its_name_in_the_file(
    cogvideox: Path, tmp_path: Path, name: str
) -> None:
    """T5's table under its second name was scaled twice; saved, a table beyond fp16 was Inf."""
    shutil.copytree(cogvideox, tmp_path / "model")
    path = tmp_path / "model" / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = table = tensors.pop(TABLES[0]) * 2.0**20
    save_file(tensors, path, metadata={"format": "pt"})
    model = load_encoder(path.parent)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for found in saved.keys() & {*TABLES}:
        torch.testing.assert_close(saved[found], table.float(), rtol=2**-10, atol=0)


# The method is registered


KNOWN = (
    "import diffusers.quantizers.auto as d, transformers.quantizers.auto as t\n"
    "known = ['stopdown' in x for m in (d, t) for x in "
    "(m.AUTO_QUANTIZER_MAPPING, m.AUTO_QUANTIZATION_CONFIG_MAPPING)]\n"
)
"""A program's lines that ask whether both tables of each library have the method."""


# Plans that are given or found


@pytest.fixture(scope="module")
def plan(cogvideox: Path) -> Plan:
    """The plan of the pipeline that is kept here."""
    return join_config_plans(stopdown.quantization(cogvideox))


@pytest.fixture(scope="module")
def other(plan: Plan) -> Plan:
    """The plan of a pipeline of the same classes with other weights."""
    entries = tuple(dataclasses.replace(x, weights="0" * 64) for x in plan.components)
    return seal_plan(dataclasses.replace(plan, fingerprint="0" * 64, components=entries))


def test_a_plan_that_is_given_is_taken(cogvideox: Path, plan: Plan, tmp_path: Path) -> None:
    """A path, or a `Plan` of the whole pipeline: the entry of the model is found by its class."""
    path = write_plan(plan, tmp_path / "plan.json")
    for given in (plan, path):
        model = load_transformer(cogvideox, quantization_config=stopdown.StopdownConfig(given))
        assert model.hf_quantizer.applied_plan.components[0] in plan.components


def test_a_table_that_is_stored_is_cast_as_planned(tmp_path: Path) -> None:
    """SD3's table of positions is a buffer in the file: a model has it in fp32 until it is loaded."""
    from diffusers import SD3Transformer2DModel

    module = make_family("sd3").transformer.requires_grad_(False)
    module.to(torch.bfloat16).save_pretrained(tmp_path)
    module = SD3Transformer2DModel.from_pretrained(tmp_path, dtype=torch.float32)
    given = make_arguments(SimpleNamespace(transformer=module), "sd3")
    plan = stopdown.make_plan({"transformer": module}, run=lambda: module(**given))
    config = stopdown.StopdownConfig(plan)
    loaded = SD3Transformer2DModel.from_pretrained(tmp_path, dtype=FP16, quantization_config=config)
    assert loaded.pos_embed.pos_embed.dtype == FP16
    assert is_near(loaded(**given)[0], module(**given)[0])


def test_a_plan_for_other_weights_is_refused(cogvideox: Path, other: Plan) -> None:
    """The weights are compared while they arrive; the model is not returned."""
    with pytest.raises(PlanError, match="transformer has other weights"):
        load_transformer(cogvideox, quantization_config=stopdown.StopdownConfig(other))
    with pytest.raises(PlanError, match="fingerprint"):
        stopdown.quantization(cogvideox, plan=other)


def test_a_plan_beside_the_model_is_found(
    cogvideox: Path, plan: Plan, other: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stopdown.json` in the folder is taken if it belongs there, and said to be ignored if not."""
    from stopdown.plans import plan_choice

    folder = Path(shutil.copytree(cogvideox, tmp_path / "model"))
    write_plan(plan, folder / "stopdown.json")
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path / "empty"))
    with monkeypatch.context() as patch:
        patch.setattr(plan_choice, "certify_plan", None)
        found = stopdown.quantization(folder).quant_mapping["transformer"].plan
        assert found.components[0] in plan.components
    write_plan(other, folder / "stopdown.json")
    monkeypatch.setattr(plan_choice, "certify_plan", lambda *_, **__: plan)
    with pytest.warns(StopdownWarning, match=r"stopdown\.json isn't used.*fingerprint"):
        found = stopdown.quantization(folder).quant_mapping["transformer"].plan
    assert found.components[0] in plan.components


# What a program meets


def test_other_formats_are_refused(cogvideox: Path) -> None:
    """A plan is one for fp16: `dtype=torch.bfloat16` beside it is a mistake, in both libraries."""
    from diffusers import CogVideoXTransformer3DModel
    from transformers import T5EncoderModel

    for kind, name in (
        (CogVideoXTransformer3DModel, "transformer"),
        (T5EncoderModel, "text_encoder"),
    ):
        with pytest.raises(OptionError, match=r"bfloat16.*dtype=torch\.float16"):
            kind.from_pretrained(
                cogvideox / name,
                dtype=torch.bfloat16,
                quantization_config=stopdown.StopdownConfig(),
            )


def test_a_dtype_that_nobody_gave_is_not_blamed_on_who_gave_none(cogvideox: Path) -> None:
    """Transformers takes the stored dtype then, and doesn't tell it from one that was given."""
    with pytest.raises(OptionError) as caught:
        load_encoder(cogvideox / "text_encoder", dtype=None)
    assert caught.value.what == "A model with a StopdownConfig would be loaded in torch.bfloat16."
    assert "Without a dtype, Transformers takes the one in which" in caught.value.expected


@pytest.mark.parametrize("name", ["transformer", "text_encoder"])
def test_a_folder_with_a_plan_is_loaded_in_bf16_without_it(
    cogvideox: Path, tmp_path: Path, name: str
) -> None:
    """bf16 needs no exponents: weights are those of fp16 without theirs, rounded once, saved as that."""
    load = load_transformer if name == "transformer" else load_encoder
    folder = cogvideox if name == "transformer" else cogvideox / name
    planned = load(folder)
    saved = tmp_path if name == "transformer" else tmp_path / name
    planned.save_pretrained(tmp_path / name)
    bare = load(saved, quantization_config=None, dtype=torch.bfloat16)
    wanted = {x: y.bfloat16() for x, y in name_parameters(planned.dequantize()).items()}
    assert bare.dtype == torch.bfloat16
    for key, parameter in bare.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, wanted[key])
    assert not getattr(bare, "is_quantized", False)
    assert bare.half() is bare
    bare.to(torch.bfloat16).save_pretrained(tmp_path / "bare" / name)
    said = json.loads((tmp_path / "bare" / name / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in said


def test_formats_of_a_pipeline_are_named_by_component(cogvideox: Path, saved: Path) -> None:
    """A saved pipeline with one component in bf16: that one without its plan, the others with theirs."""
    config = stopdown.quantization(cogvideox)
    pipe = load_plain(saved, {"text_encoder": torch.bfloat16, "default": torch.float16})
    assert pipe.text_encoder.dtype == torch.bfloat16
    assert not getattr(pipe.text_encoder, "is_quantized", False)
    assert pipe.transformer.quantization_method == "stopdown"
    with pytest.raises(OptionError, match=r"delete its entry of quant_mapping"):
        load_plain(cogvideox, {"vae": torch.bfloat16}, quantization_config=config)


SaveTiny = Callable[..., Path]


@pytest.mark.parametrize("name", ["transformer", "text_encoder"])
def test_a_saved_model_loads_again_by_itself(cogvideox: Path, tmp_path: Path, name: str) -> None:
    """`config.json` carries the plan: the same weights, without an argument and without the plan's file."""
    load = load_transformer if name == "transformer" else load_encoder
    first = load(cogvideox if name == "transformer" else cogvideox / name)
    first.save_pretrained(tmp_path / name)
    again = load(tmp_path if name == "transformer" else tmp_path / name, quantization_config=None)
    assert have_same_weights(first, again)
    assert again.hf_quantizer.applied_plan.components[0].in_force.exponents
    said = json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
    assert said["quantization_config"]["quant_method"] == "stopdown"


# Traps of the two libraries


@pytest.fixture
def planned(cogvideox: Path) -> Any:
    """A pipeline that was loaded by a config, for a test that changes it."""
    return load_plain(cogvideox, FP16, quantization_config=stopdown.quantization(cogvideox))


@pytest.fixture(scope="module")
def loaded(cogvideox: Path) -> Any:
    """A pipeline that was loaded by a config, for tests that leave it as it is."""
    return load_plain(cogvideox, FP16, quantization_config=stopdown.quantization(cogvideox))


@pytest.fixture(scope="module")
def pixels(loaded: Any) -> Any:
    """What such a pipeline makes."""
    return call_pipeline(loaded, "cogvideox")


@pytest.fixture(scope="module")
def saved(loaded: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that such a pipeline was saved to."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    loaded.save_pretrained(folder)
    return folder


def makes(pipe: Any, pixels: Any) -> bool:
    """Whether a pipeline makes these pixels, bit for bit."""
    return np.array_equal(call_pipeline(pipe, "cogvideox"), pixels)


def test_the_config_says_its_method_as_an_enum_and_prints() -> None:
    """Diffusers asks for `quant_method.value`, and `repr` for `to_diff_dict`."""
    config = stopdown.StopdownConfig()
    assert config.quant_method.value == config.quant_method == "stopdown"
    assert '"quant_method": "stopdown"' in repr(config)


def test_a_pipeline_takes_configs_by_component(cogvideox: Path) -> None:
    """`quantization` gives Diffusers' own mapping; a single config is refused by Diffusers itself."""
    from diffusers import PipelineQuantizationConfig

    config = stopdown.quantization(cogvideox)
    assert isinstance(config, PipelineQuantizationConfig)
    assert {*config.quant_mapping} == {"transformer", "text_encoder", "vae"}
    with pytest.raises(ValueError, match="PipelineQuantizationConfig"):
        load_plain(cogvideox, FP16, quantization_config=stopdown.StopdownConfig())


def test_a_component_may_be_left_to_another_method(cogvideox: Path) -> None:
    """An entry of the mapping may be taken out: that component is loaded as ever, in any format."""
    config = stopdown.quantization(cogvideox)
    del config.quant_mapping["text_encoder"]
    formats = {"text_encoder": torch.bfloat16, "default": FP16}
    pipe = load_plain(cogvideox, formats, quantization_config=config)
    assert pipe.text_encoder.dtype == torch.bfloat16
    assert not getattr(pipe.text_encoder, "is_quantized", False)
    assert pipe.transformer.is_quantized


@pytest.mark.parametrize("device_map", ["balanced", "auto"])
def test_a_device_map_places_folded_weights(cogvideox: Path, pixels: Any, device_map: str) -> None:
    """Weights are folded when they arrive, so it does not matter who moves them afterwards."""
    if device_map == "auto":
        wanted = load_transformer(cogvideox)
        assert have_same_weights(load_transformer(cogvideox, device_map="auto"), wanted)
    else:
        config = stopdown.quantization(cogvideox)
        pipe = load_plain(cogvideox, FP16, quantization_config=config, device_map=device_map)
        assert makes(pipe, pixels)


@pytest.mark.parametrize("options", [{}, {"device_map": "balanced"}])
def test_what_libraries_set_afterwards_leads_nowhere(
    cogvideox: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call has the plan's signature: it is not traced as another one."""
    trace = KnownCalls.trace

    def check(*args: Any, is_short: bool = True, **options: Any) -> Any:
        assert not is_short  # of other sizes it may be
        return trace(*args, is_short=is_short, **options)

    monkeypatch.setattr(KnownCalls, "trace", check)
    config = stopdown.quantization(cogvideox)
    pipe = load_plain(cogvideox, FP16, quantization_config=config, **options)
    call_pipeline(pipe, "cogvideox")
    watches = [CallWatch.find(getattr(pipe, x)) for x in ("transformer", "text_encoder")]
    for watch in watches:
        assert watch is not None
        assert {name for name, _ in watch.known.verdicts} == set(watch.scaling.signatures)


@pytest.mark.parametrize(
    "load", [load_transformer, lambda x, **y: load_encoder(x / "text_encoder", **y)]
)
def test_weights_on_the_disk_are_refused(
    cogvideox: Path, tmp_path: Path, load: Callable[..., Any]
) -> None:
    """They would be written there without their exponents."""
    with pytest.raises(OptionError, match="weights on the disk"):
        load(cogvideox, device_map={"": "disk"}, offload_folder=str(tmp_path))


def test_casting_a_loaded_model_is_refused(loaded: Any, pixels: Any) -> None:
    """Each cast raises before it changes anything, in both libraries; moving is no cast."""
    for cast in (
        loaded.transformer.half,
        lambda: loaded.transformer.to(torch.float32),
        loaded.text_encoder.half,
    ):
        with pytest.raises(ValueError, match="quantized model"):
            cast()
    for cast in (
        lambda: loaded.text_encoder.to(torch.float32),
        lambda: loaded.text_encoder.to("cpu", dtype=torch.float32),
        lambda: loaded.to(torch.float32),
    ):
        with pytest.raises((OptionError, ValueError), match=r"can't be cast|quantized model"):
            cast()
    loaded.to("cpu")
    assert makes(loaded, pixels)


def test_a_cast_by_parameters_is_found(planned: Any) -> None:
    """What no library looks at: the next call stops with the reason."""
    for parameter in planned.text_encoder.parameters():
        parameter.data = parameter.data.float()
    with pytest.raises(PlanError, match="text_encoder was cast after its plan was put on"):
        call_pipeline(planned, "cogvideox")


def test_an_unknown_method_is_named_by_both_libraries(cogvideox: Path, tmp_path: Path) -> None:
    """Without Stopdown Diffusers stops; Transformers says so, and its weights are right without it.

    Once Stopdown is imported, the tables of both have the method.
    """
    transformer, encoder = load_transformer(cogvideox), load_encoder(cogvideox / "text_encoder")
    transformer.save_pretrained(tmp_path / "transformer")
    encoder.save_pretrained(tmp_path / "text_encoder")
    said = run_fresh(
        "import io, logging, torch, transformers, diffusers\n"
        "heard = io.StringIO()\n"
        "logging.getLogger('transformers').addHandler(logging.StreamHandler(heard))\n"
        f"folder = {str(tmp_path)!r}\n"
        "model = transformers.T5EncoderModel.from_pretrained(folder + '/text_encoder')\n"
        "output = model.float()(torch.tensor([[5, 6, 7, 1]]))[0]\n"
        "try:\n    diffusers.CogVideoXTransformer3DModel.from_pretrained(folder + '/transformer')\n"
        "    text = ''\nexcept ValueError as error:\n    text = str(error)\n"
        "was_loaded = 'stopdown' in sys.modules\nimport stopdown\n"
        f"{KNOWN}print(json.dumps([was_loaded, known, heard.getvalue(), text, output.tolist()]))"
    )
    was_loaded, known, heard, text, output = said
    assert not was_loaded
    assert known == [True] * 4
    assert "Unknown quantization type, got stopdown" in heard
    assert "Unknown quantization type, got stopdown" in text
    with torch.no_grad():
        wanted = load_encoder(cogvideox / "text_encoder", quantization_config=None).float()
        assert is_near(output, wanted(torch.tensor([[5, 6, 7, 1]]))[0])


def test_a_saved_model_loads_after_importing_stopdown_alone(
    cogvideox: Path, tmp_path: Path
) -> None:
    """`import stopdown` and the library's own class: nothing else has to be named."""
    load_transformer(cogvideox).save_pretrained(tmp_path / "transformer")
    method, known = run_fresh(
        "import stopdown\nfrom diffusers import CogVideoXTransformer3DModel\n"
        f"model = CogVideoXTransformer3DModel.from_pretrained({str(tmp_path / 'transformer')!r})\n"
        f"{KNOWN}print(json.dumps([model.quantization_method, known]))"
    )
    assert method == "stopdown"
    assert known == [True] * 4


def test_other_weights_in_a_saved_folder_are_found(cogvideox: Path, tmp_path: Path) -> None:
    """The plan that a `config.json` carries belongs to the weights beside it."""
    import safetensors.torch

    load_transformer(cogvideox).save_pretrained(tmp_path / "transformer")
    (path,) = (tmp_path / "transformer").glob("*.safetensors")
    weights = safetensors.torch.load_file(path)
    weights["proj_out.weight"] += 1
    safetensors.torch.save_file(weights, path)
    with pytest.raises(PlanError, match="other weights"):
        load_transformer(tmp_path, quantization_config=None)


def test_an_edited_plan_in_a_saved_folder_is_refused(cogvideox: Path, tmp_path: Path) -> None:
    """Its seal does not depend on the order of keys, and no number in it can be changed."""
    load_transformer(cogvideox).save_pretrained(tmp_path / "transformer")
    path = tmp_path / "transformer" / "config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    exponents = said["quantization_config"]["plan"]["components"][0]["scaling"]["exponents"]
    exponents[next(iter(exponents))] += 1
    path.write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(PlanError, match="was edited"):
        load_transformer(tmp_path, quantization_config=None)


def test_a_carried_plan_of_other_versions_is_taken_and_said(
    cogvideox: Path, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A published folder outlives a version of the libraries; a plan that is given does not."""
    from stopdown.plans import applier

    first = load_transformer(cogvideox)
    first.save_pretrained(tmp_path / "transformer")
    monkeypatch.setattr(applier, "read_class_versions", lambda: {"diffusers": "9"})
    with pytest.warns(StopdownWarning, match="made with other versions.*diffusers"):
        again = load_transformer(tmp_path, quantization_config=None)
    assert have_same_weights(first, again)
    with pytest.raises(PlanError, match="made with diffusers"):
        load_transformer(cogvideox, quantization_config=stopdown.StopdownConfig(plan))


# Beside other things
def test_a_saved_pipeline_makes_the_same_pixels(saved: Path, pixels: Any) -> None:
    """Saved and loaded without an argument."""
    assert makes(load_plain(saved, FP16), pixels)


def test_a_pipeline_under_apply_plan_is_not_saved(
    cogvideox: Path, plan: Plan, tmp_path: Path
) -> None:
    """Its files would have exponents and not say so: refused until the plan is off, then exact."""
    pipe = load_plain(cogvideox, torch.float32)
    wanted = call_pipeline(pipe, "cogvideox")
    handle = apply_plan(pipe, plan)
    for name in ("transformer", "text_encoder", "vae"):
        with pytest.raises(PlanError, match=r"can't be saved by save_pretrained.*\.undo\(\)"):
            getattr(pipe, name).save_pretrained(tmp_path / "one")
    with pytest.raises(PlanError, match=r"can't be saved by save_pretrained"):
        pipe.save_pretrained(tmp_path / "whole")
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not (tmp_path / "whole" / "model_index.json").exists()
    handle.undo()
    pipe.save_pretrained(tmp_path / "off")
    again = load_plain(tmp_path / "off", torch.float32)
    np.testing.assert_array_equal(call_pipeline(again, "cogvideox"), wanted)


def test_the_plan_comes_off(cogvideox: Path, planned: Any) -> None:
    """`dequantize`, of both libraries, gives the model in fp32, as near as fp16 weights hold it."""
    for name in ("transformer", "text_encoder", "vae"):
        getattr(planned, name).dequantize()
        assert getattr(planned, name).dtype == torch.float32
    wanted = call_pipeline(load_plain(cogvideox, torch.float32), "cogvideox")
    assert is_near(call_pipeline(planned, "cogvideox"), wanted, 1e-3)


def test_a_guard_can_come_with_it(cogvideox: Path, pixels: Any) -> None:
    """`guard=True` watches each component; a guard may lie around the pipeline as well."""
    config = stopdown.quantization(cogvideox, guard=True)
    pipe = load_plain(cogvideox, FP16, quantization_config=config)
    assert makes(pipe, pixels)
    (call,) = pipe.transformer.stopdown_guard.record.calls
    assert call.calls == 2
    with stopdown.guard(pipe) as handle:
        assert makes(pipe, pixels)
    assert len(handle.record.calls) == 3
    for name in ("transformer", "text_encoder", "vae"):
        getattr(pipe, name).stopdown_guard.remove()


def test_layerwise_casting_is_refused(loaded: Any) -> None:
    """fp8 holds too few sizes for weights with exponents."""
    with pytest.raises(OptionError, match=r"Layerwise casting.*many of them would vanish"):
        loaded.transformer.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=FP16
        )


def test_groups_are_offloaded(planned: Any, pixels: Any) -> None:
    """Weights come and go by leaves."""
    host = torch.device("cpu")
    planned.transformer.enable_group_offload(
        onload_device=host, offload_device=host, offload_type="leaf_level"
    )
    assert makes(planned, pixels)


def test_two_pipelines_share_components(loaded: Any, pixels: Any) -> None:
    """Another class around the same components; each makes what it makes alone."""
    from diffusers import CogVideoXVideoToVideoPipeline

    other = CogVideoXVideoToVideoPipeline(**loaded.components)
    other.set_progress_bar_config(disable=True)
    assert np.isfinite(call_pipeline(other, "cogvideox-video")).all()
    assert makes(loaded, pixels)


def test_a_copy_is_a_model_of_its_own(planned: Any, pixels: Any) -> None:
    """`copy.deepcopy` keeps exponents and hooks."""
    import copy

    planned.transformer = copy.deepcopy(planned.transformer)
    assert makes(planned, pixels)


@pytest.mark.filterwarnings("ignore:transformer has changed since")
def test_loras_come_and_go(cogvideox: Path, planned: Any, pixels: Any, tmp_path: Path) -> None:
    """They take the exponents of the weights that they add to, loaded and fused, and leave nothing."""
    from models.lora_cases import draw_lora, load_lora, name_lora

    wide = load_plain(cogvideox, torch.float32)
    tensors = name_lora(draw_lora(wide, "cogvideox"), "peft", "cogvideox")
    for pipe in (wide, planned):
        load_lora(pipe, tensors, tmp_path, "style")
    wanted = call_pipeline(wide, "cogvideox")
    assert not is_near(pixels, wanted)
    assert is_near(call_pipeline(planned, "cogvideox"), wanted, 0.005)
    planned.fuse_lora()
    assert is_near(call_pipeline(planned, "cogvideox"), wanted, 0.005)
    planned.unfuse_lora()
    planned.unload_lora_weights()
    assert is_near(call_pipeline(planned, "cogvideox"), pixels, 0.005)


def test_fused_projections_are_refused(loaded: Any, pixels: Any) -> None:
    """The fused layers would lack the casts of the plan; the pipeline is as before."""
    with pytest.raises(OptionError, match=r"Leave fuse_qkv_projections\(\) out"):
        loaded.fuse_qkv_projections()
    assert makes(loaded, pixels)


# Beside other methods, LoRAs that were there first, and `force_upcast`


@pytest.fixture(scope="module")
def fluxes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a Flux whose transformer, or whose T5, overflows."""
    folders = {}
    for name in ("transformer", "text_encoder_2"):
        folders[name] = tmp_path_factory.mktemp("models") / name
        pipe = testing.make_pipeline("flux")
        testing.overflow_(getattr(pipe, name))
        pipe.save_pretrained(folders[name])
    return folders


def load_gguf(folder: Path, path: Path) -> Any:
    """The transformer of a Flux, written as a GGUF file of 8 bits and read from there."""
    pytest.importorskip("gguf")
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    from models.weight_file_samples import write_gguf

    module = FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    write_gguf(path, "Q8_0", {name: x.float().numpy() for name, x in module.state_dict().items()})
    return FluxTransformer2DModel.from_single_file(
        str(path),
        config=str(folder),
        subfolder="transformer",
        quantization_config=GGUFQuantizationConfig(compute_dtype=FP16),
        dtype=FP16,
    )


def test_a_gguf_transformer_lies_beside_it(fluxes: dict[str, Path], tmp_path: Path) -> None:
    """The transformer comes from a GGUF file, and T5 by a certificate."""
    from diffusers import PipelineQuantizationConfig

    flux = fluxes["text_encoder_2"]
    wanted = call_pipeline(load_plain(flux, torch.float32), "flux")
    given = {"transformer": load_gguf(flux, tmp_path / "flux.gguf")}
    assert not np.isfinite(call_pipeline(load_plain(flux, FP16, **given), "flux")).all()
    mapping = {name: stopdown.StopdownConfig() for name in ("transformer", "text_encoder_2")}
    config = PipelineQuantizationConfig(quant_mapping=mapping)
    pipe = load_plain(flux, FP16, quantization_config=config, **given)
    assert pipe.transformer.quantization_method.value == "gguf"
    assert pipe.text_encoder_2.quantization_method == "stopdown"
    assert is_near(call_pipeline(pipe, "flux"), wanted)


def run_beside(fluxes: dict[str, Path], other: str, config: Any, method: str) -> None:
    """Load Flux with one component by another method: the one that overflows is certified, and right."""
    (mine,) = {"transformer", "text_encoder_2"} - {other}
    folder = fluxes[mine]
    wanted = call_pipeline(load_plain(folder, torch.float32), "flux")
    mapping = stopdown.quantization(folder)
    mapping.quant_mapping[other] = config
    found = load_plain(folder, FP16, quantization_config=mapping)
    methods = {name: getattr(found, name).quantization_method for name in (mine, other)}
    assert methods[mine] == "stopdown"
    assert methods[other].value == method
    assert is_near(call_pipeline(found, "flux"), wanted, 0.03)


@pytest.mark.parametrize("other", ["transformer", "text_encoder_2"])
@pytest.mark.filterwarnings("ignore")  # what torchao says of itself
def test_a_component_of_torchao_lies_beside_it(fluxes: dict[str, Path], other: str) -> None:
    """One of them in int8 by the mapping, the other one overflows in fp16 and is certified."""
    pytest.importorskip("torchao", reason="torchao is not among the tested packages")
    import diffusers
    import transformers
    from torchao.quantization import Int8WeightOnlyConfig

    kinds = {"transformer": diffusers.TorchAoConfig, "text_encoder_2": transformers.TorchAoConfig}
    own = kinds[other](Int8WeightOnlyConfig())
    run_beside(fluxes, other, own, "torchao")


@pytest.mark.parametrize("other", ["transformer", "text_encoder_2"])
@pytest.mark.filterwarnings("ignore")  # what bitsandbytes says of itself
def test_a_component_of_bitsandbytes_lies_beside_it(
    fluxes: dict[str, Path], other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them in int8 by the mapping, the other one overflows in fp16 and is certified.

    Transformers runs it on CPUs. Diffusers asks for a GPU before it looks further: that question is left
    out here, and bitsandbytes computes on the CPU.
    """
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not among the tested packages")
    import diffusers
    import transformers
    from diffusers.quantizers.bitsandbytes import BnB8BitDiffusersQuantizer

    quantizer = BnB8BitDiffusersQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr(quantizer, "update_device_map", lambda *_: {"": "cpu"})
    kinds = {
        "transformer": diffusers.BitsAndBytesConfig,
        "text_encoder_2": transformers.BitsAndBytesConfig,
    }
    own = kinds[other](load_in_8bit=True)
    run_beside(fluxes, other, own, "bitsandbytes")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:1 call of `vae.decode` not certified")  # random weights
def test_force_upcast_is_answered(tmp_path: Path) -> None:
    """SDXL's autoencoder overflows and asks for fp32: by its plan it stays in fp16, and is right."""
    folder = save_pipeline("sdxl", tmp_path / "sdxl", overflow="vae")
    path = folder / "vae" / "config.json"
    assert json.loads(path.read_text(encoding="utf-8"))["force_upcast"]
    wanted = call_pipeline(load_plain(folder, torch.float32), "sdxl")
    plain = load_plain(folder, FP16)
    plain.vae.register_to_config(force_upcast=False)
    assert not np.isfinite(call_pipeline(plain, "sdxl")).all()
    pipe = load_plain(folder, FP16, quantization_config=stopdown.quantization(folder))
    for run in (pipe, stopdown.load(folder, precision="fp16", device="cpu")):
        assert is_near(call_pipeline(run, "sdxl"), wanted, 0.005)
        assert run.vae.dtype == FP16


def test_an_autoencoder_in_bf16_is_not_cast_by_its_pipeline(plan: Plan, tmp_path: Path) -> None:
    """Pipelines cast one with `force_upcast` to fp32 to encode, which Diffusers refuses under a config."""
    from diffusers import AutoencoderKL

    folder = save_pipeline("sd", tmp_path / "sd")
    plain = AutoencoderKL.from_pretrained(folder, subfolder="vae", dtype=torch.float32)
    assert plain.config.force_upcast
    entry = ComponentPlan("vae", "AutoencoderKL", precision="bf16")
    made = seal_plan(dataclasses.replace(plan, components=(entry,)))
    config = stopdown.StopdownConfig(made, component="vae")
    loaded = AutoencoderKL.from_pretrained(
        folder, subfolder="vae", dtype=FP16, quantization_config=config
    )
    assert (loaded.dtype, loaded.config.force_upcast) == (torch.bfloat16, False)
