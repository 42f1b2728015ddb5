"""Plans through `quantization_config` of `from_pretrained`, in Diffusers and in Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stopdown
from pipeline_calls import call_pipeline
from stopdown import testing
from stopdown.environment import cache_folder
from stopdown.errors import OptionError, PlanError, SourceError, StopdownWarning
from stopdown.graph.capture import name_parameters
from stopdown.numerics import relative_l2
from stopdown.plans.applier import apply_plan
from stopdown.plans.plan_files import write_plan
from stopdown.quantizers.pipelines import join_plans
from stopdown.testing import save_pipeline
from test_public import run_fresh

FP16 = torch.float16


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Plans that are kept are those of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("STOPDOWN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def cogvideox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose transformer and text encoder overflow, as Diffusers saves it."""
    folder = tmp_path_factory.mktemp("models") / "cogvideox"
    pipe = testing.make_pipeline("cogvideox", overflow="transformer")
    testing.overflow_(pipe.text_encoder)
    for part in (pipe.transformer, pipe.text_encoder, pipe.vae):
        part.to(torch.bfloat16)
    pipe.save_pretrained(folder)
    return folder


def load_pipeline(folder: Path, dtype: torch.dtype = FP16, **options: Any) -> Any:
    """A pipeline as a script loads it, without its bars."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_transformer(folder: Path, **options: Any) -> Any:
    """The transformer of a pipeline, by a config without a plan."""
    from diffusers import CogVideoXTransformer3DModel

    options.setdefault("quantization_config", stopdown.StopdownConfig())
    return CogVideoXTransformer3DModel.from_pretrained(
        folder, subfolder="transformer", dtype=FP16, **options
    )


def load_encoder(folder: Path, **options: Any) -> Any:
    """The text encoder of a pipeline, by a config without a plan."""
    from transformers import T5EncoderModel

    options.setdefault("quantization_config", stopdown.StopdownConfig())
    return T5EncoderModel.from_pretrained(folder, dtype=FP16, **options)


def have_same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Whether two models have the same tensors in the same dtypes."""
    mine, others = name_parameters(first), name_parameters(second)
    return mine.keys() == others.keys() and all(
        x.dtype == others[name].dtype and torch.equal(x, others[name]) for name, x in mine.items()
    )


def is_near(found: Any, wanted: Any, limit: float = 0.01) -> bool:
    """Whether something is finite and within a relative error of what fp32 gives."""
    given = (torch.as_tensor(x).float() for x in (found, wanted))
    return bool(relative_l2(*given) < limit)


def test_a_pipeline_that_overflows_runs_in_fp16(cogvideox: Path) -> None:
    """Plain fp16 is NaN; with the config pixels are finite and nearer to fp32 than bf16."""
    wanted = call_pipeline(load_pipeline(cogvideox, torch.float32), "cogvideox")
    assert not np.isfinite(call_pipeline(load_pipeline(cogvideox), "cogvideox")).all()
    pipe = load_pipeline(cogvideox, quantization_config=stopdown.quantization(cogvideox))
    assert is_near(call_pipeline(pipe, "cogvideox"), wanted, 0.003)


def test_it_gives_what_apply_plan_gives(cogvideox: Path) -> None:
    """Weights and pixels are bit for bit those of the same plan on a pipeline that was loaded before."""
    config = stopdown.quantization(cogvideox)
    pipe = load_pipeline(cogvideox, quantization_config=config)
    other = load_pipeline(cogvideox, torch.float32)
    apply_plan(other, join_plans(config))
    for name in ("transformer", "text_encoder", "vae"):
        assert have_same_weights(getattr(pipe, name), getattr(other, name))
    np.testing.assert_array_equal(
        call_pipeline(pipe, "cogvideox"), call_pipeline(other, "cogvideox")
    )


def test_the_plan_is_made_once(cogvideox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second load takes the plan that the first one kept."""
    load_transformer(cogvideox)
    from stopdown.plans import plan_choice

    monkeypatch.setattr(plan_choice, "certify_plan", None)
    load_transformer(cogvideox)
    assert list((cache_folder() / "plans").glob("*.json"))


def test_a_model_of_transformers_is_near_to_fp32(cogvideox: Path) -> None:
    """A text encoder in its pipeline's folder overflows in plain fp16, and not with the config."""
    tokens = torch.tensor([[5, 6, 7, 1]])
    with torch.no_grad():
        wanted = load_encoder(cogvideox / "text_encoder", quantization_config=None).float()(tokens)
        encoder = load_encoder(cogvideox / "text_encoder")
        assert encoder.dtype == FP16
        assert is_near(encoder(tokens)[0], wanted[0])


def test_a_text_encoder_without_a_pipeline_is_certified(cogvideox: Path, tmp_path: Path) -> None:
    """Calls of a text encoder are known: tokens and a mask."""
    import shutil

    shutil.copytree(cogvideox / "text_encoder", tmp_path / "t5")
    encoder = load_encoder(tmp_path / "t5")
    assert encoder.hf_quantizer.applied_plan.components[0].scaling.certified


def test_a_denoiser_without_its_pipeline_is_refused(cogvideox: Path, tmp_path: Path) -> None:
    """Nothing tells how it is called; the error says what to load."""
    import shutil

    shutil.copytree(cogvideox / "transformer", tmp_path / "alone" / "transformer")
    with pytest.raises(SourceError, match=r"without its pipeline.*subfolder="):
        load_transformer(tmp_path / "alone")


# The method is registered


def test_importing_loads_neither_library() -> None:
    """`import stopdown` has the method registered later, and loads nothing for it."""
    loaded = run_fresh("import stopdown\nprint(json.dumps(sorted(sys.modules)))")
    assert {"torch", "diffusers", "transformers"}.isdisjoint(x.split(".")[0] for x in loaded)


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_method_is_known_in_either_order(order: str) -> None:
    """The tables of both libraries have it, whichever was imported first, and each module is itself."""
    first, second = (
        "import stopdown",
        "import diffusers.quantizers.auto, transformers.quantizers.auto",
    )
    if order == "after":
        first, second = second, first
    known = run_fresh(
        f"{first}\n{second}\nimport diffusers.quantizers.auto as d, transformers.quantizers.auto as t\n"
        "print(json.dumps(['stopdown' in x for m in (d, t) for x in "
        "(m.AUTO_QUANTIZER_MAPPING, m.AUTO_QUANTIZATION_CONFIG_MAPPING)]))"
    )
    assert known == [True] * 4


# Plans that are given or found


def test_a_plan_that_is_given_is_taken(cogvideox: Path, tmp_path: Path) -> None:
    """A path, or a `Plan` of the whole pipeline: the entry of the model is found by its class."""
    plan = stopdown.make_plan(cogvideox)
    path = write_plan(plan, tmp_path / "plan.json")
    for given in (plan, path):
        model = load_transformer(cogvideox, quantization_config=stopdown.StopdownConfig(given))
        assert model.hf_quantizer.applied_plan.components[0] in plan.components


def test_a_plan_for_other_weights_is_refused(cogvideox: Path, tmp_path: Path) -> None:
    """The weights are compared while they arrive; the model is not returned."""
    other = save_pipeline("cogvideox", tmp_path / "other", seed=1, overflow="transformer")
    plan = stopdown.make_plan(other)
    with pytest.raises(PlanError, match="transformer has other weights"):
        load_transformer(cogvideox, quantization_config=stopdown.StopdownConfig(plan))
    with pytest.raises(PlanError, match="fingerprint"):
        stopdown.quantization(cogvideox, plan=plan)


def test_a_plan_beside_the_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stopdown.json` in the folder is taken if it belongs there, and said to be ignored if not."""
    from stopdown.plans import plan_choice

    folder = save_pipeline("cogvideox", tmp_path / "a", overflow="transformer")
    plan = stopdown.make_plan(folder)
    write_plan(plan, folder / "stopdown.json")
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path / "empty"))
    with monkeypatch.context() as patch:
        patch.setattr(plan_choice, "certify_plan", None)
        found = stopdown.quantization(folder).quant_mapping["transformer"].plan
        assert found.components[0] in plan.components
    other = save_pipeline("cogvideox", tmp_path / "b", seed=1, overflow="transformer")
    write_plan(plan, other / "stopdown.json")
    with pytest.warns(StopdownWarning, match=r"stopdown\.json is not used.*fingerprint"):
        found = stopdown.quantization(other).quant_mapping["transformer"].plan
    assert found.components[0] not in plan.components


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


SaveTiny = Callable[..., Path]


@pytest.mark.parametrize("name", ["transformer", "text_encoder"])
def test_a_saved_model_loads_again_by_itself(cogvideox: Path, tmp_path: Path, name: str) -> None:
    """`config.json` carries the plan: the same weights, without an argument and without the plan's file."""
    load = load_transformer if name == "transformer" else load_encoder
    first = load(cogvideox if name == "transformer" else cogvideox / name)
    first.save_pretrained(tmp_path / name)
    again = load(tmp_path if name == "transformer" else tmp_path / name, quantization_config=None)
    assert have_same_weights(first, again)
    assert again.hf_quantizer.applied_plan.components[0].scaling.exponents
    said = json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
    assert said["quantization_config"]["quant_method"] == "stopdown"
