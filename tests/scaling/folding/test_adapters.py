"""LoRA and plans: captured when it is there, scaled when it comes after; on a tiny CogVideoX pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.modules.module import register_module_module_registration_hook

from stopdown.records import Scaling
from stopdown.scaling.folding.adapters import AdapterFolds

pytest.importorskip("peft", reason="peft loads LoRA; it is in the extra `adapters`")

from models.snapshots import assert_untouched
from stopdown.component_calls.components import find_components
from stopdown.devices.device_choice import choose_device
from stopdown.dtype_rules.check import check
from stopdown.dtype_rules.parameters import check_rescaled
from stopdown.errors import PlanError, ScalingError, StopdownWarning
from stopdown.interception.patches import Patches
from stopdown.module_calls.call import ComponentCall, cast_floats
from stopdown.module_calls.callee import Callee
from stopdown.numerics import relative_l2
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.tiny_pipelines import overflow_
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import describe_scaling
from stopdown.plans.certified import certify_plan
from stopdown.plans.exponents import scale_component
from stopdown.plans.plan_files import read_class_versions, seal_plan, write_plan
from stopdown.plans.planned_loader import load_plan
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, Plan
from stopdown.runtime.guard import guard
from stopdown.scaling.folding import folds
from stopdown.scaling.folding.folds import fold_scaling
from stopdown.sources.headers import RESCALED_ENTRY
from stopdown.sources.sources import fingerprint, resolve_source
from stopdown.testing import make_pipeline


def find_entry(plan: Plan) -> ComponentPlan:
    """Of the transformer."""
    return next(x for x in plan.components if x.component == "transformer")


LAYERS = ("attn1.to_q", "attn1.to_v", "attn1.to_out.0")


def write_lora(pipe: Any, folder: Path, size: float = 0.3) -> Path:
    """A folder with a LoRA of rank 2 for the attention of every block."""
    torch.manual_seed(5)
    weights = {}
    for i, block in enumerate(pipe.transformer.transformer_blocks):
        for name in LAYERS:
            layer, place = block.get_submodule(name), f"transformer.transformer_blocks.{i}.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(2, layer.in_features) * size
            weights[f"{place}.lora_B.weight"] = torch.randn(layer.out_features, 2) * size
    save_file(weights, folder / "pytorch_lora_weights.safetensors")
    return folder


def build() -> Any:
    """A tiny pipeline whose transformer leaves fp16."""
    pipe = make_pipeline("cogvideox")
    overflow_(pipe.transformer)
    return pipe


def make_arguments(pipe: Any) -> dict[str, Any]:
    """Of one call of the transformer."""
    config, made = pipe.transformer.config, torch.Generator().manual_seed(0)
    there = pipe.transformer.device
    return {
        "hidden_states": torch.randn(1, 2, config.in_channels, 4, 4, generator=made).to(there),
        "encoder_hidden_states": torch.randn(1, 8, config.text_embed_dim, generator=made).to(there),
        "timestep": torch.tensor([500], device=there),
        "return_dict": False,
    }


def call_transformer(pipe: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return pipe.transformer(**cast_floats(make_arguments(pipe), dtype))[0]  # type: ignore[no-any-return]


def plan_pipe(pipe: Any) -> Plan:
    """The transformer scaled for that call, everything else in fp32: as `measure_plan` would say it."""
    bare = {
        name: ComponentPlan(name, type(module).__name__, sample_weights(module), "fp32")
        for name, module in find_components(pipe).items()
    }
    callee = Callee("transformer", pipe.transformer, "forward", "denoise")
    calls = [ComponentCall(callee, (), make_arguments(pipe))]
    scaling, _ = scale_component(pipe.transformer, calls)
    bare["transformer"] = describe_scaling(bare["transformer"], scaling, "fp16", 1)
    name, versions = type(pipe).__name__, read_class_versions()
    return seal_plan(Plan(name, "", name, "fp16", versions, tuple(bare.values()), "cpu", 0.0))


def load_lora(pipe: Any, folder: Path) -> None:
    """Without the words of the library about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe.load_lora_weights(folder, adapter_name="style")


@pytest.fixture(scope="module")
def bare_plan() -> Plan:
    """The plan of a pipeline without adapters."""
    return plan_pipe(build())


@pytest.fixture(scope="module")
def styled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Plan]:
    """A pipeline with a LoRA in place, and the plan that was made so."""
    pipe = build()
    load_lora(pipe, write_lora(pipe, tmp_path_factory.mktemp("lora")))
    return pipe, plan_pipe(pipe)


def test_a_lora_that_is_there_is_planned_with(styled: tuple[Any, Plan]) -> None:
    """Exact in fp32, near in fp16, and of use: without it the output is another."""
    pipe, plan = styled
    reference = call_transformer(pipe)
    assert relative_l2(call_transformer(build()), reference) > 0.03
    entry = find_entry(plan)
    assert entry.precision == "fp16"
    assert any("lora_B" in name for name in entry.in_force.exponents)
    with assert_untouched(pipe):
        with apply_plan(pipe, plan, cast=False):
            assert torch.equal(call_transformer(pipe), reference)
        with apply_plan(pipe, plan):
            low = call_transformer(pipe, torch.float16)
    assert relative_l2(low, reference) < 0.01
    with pytest.raises(PlanError, match=r"weights other than .* or additional adapters"):
        apply_plan(build(), plan)


def test_another_strength_and_taking_out_are_said(styled: tuple[Any, Plan]) -> None:
    """What is computed is right, but was not measured so: each is said once."""
    pipe, plan = styled
    with apply_plan(pipe, plan):
        pipe.set_adapters("style", 0.5)
        with pytest.warns(StopdownWarning, match="'style' has the strength 0.5, it was 1."):
            call_transformer(pipe, torch.float16)
        call_transformer(pipe, torch.float16)  # said once: a warning would be an error here
        pipe.set_adapters("style", 1.0)
        pipe.transformer.disable_adapters()
        with pytest.warns(StopdownWarning, match="has the strength 1, it was 0.5"):
            call_transformer(pipe, torch.float16)
        pipe.unload_lora_weights()
        with pytest.warns(StopdownWarning, match="the adapter 'style' was taken out"):
            call_transformer(pipe, torch.float16)


@pytest.mark.parametrize("fuse", [False, True], ids=["loaded", "fused and unloaded"])
@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "fp16"])
@pytest.mark.usefixtures("each_device")
def test_a_lora_loaded_after_the_plan_takes_its_exponents(
    bare_plan: Plan, tmp_path: Path, fuse: bool, cast: bool
) -> None:
    """In fp32 the same bit for bit, in fp16 near; taken off, every bit is as before."""
    original, pipe, dtype = build(), build(), torch.float16 if cast else torch.float32
    folder = write_lora(pipe, tmp_path)
    load_lora(pipe, folder)  # Diffusers leaves an attribute of its own behind
    pipe.unload_lora_weights()
    untouched = contextlib.nullcontext() if fuse else assert_untouched(pipe)
    with untouched, apply_plan(pipe, bare_plan, cast=cast):
        before = call_transformer(pipe, dtype)
        for one in (original, pipe):
            load_lora(one, folder)
            if fuse:
                one.fuse_lora()
                one.unload_lora_weights()
        reference, found = call_transformer(original), call_transformer(pipe, dtype)
        assert relative_l2(before, reference) > 0.05
        assert relative_l2(found, reference) < 0.01
        assert cast or torch.equal(found, reference)
        if not fuse:
            pipe.unload_lora_weights()
            assert torch.equal(call_transformer(pipe, dtype), before)


@pytest.mark.usefixtures("each_device")
def test_a_plan_comes_off_beneath_a_fused_lora(bare_plan: Plan, tmp_path: Path) -> None:
    """What was fused while it was on stays fused; what of a LoRA was loaded in fp16 is rounded so."""
    original, pipe = build(), build()
    folder = write_lora(pipe, tmp_path)
    with apply_plan(pipe, bare_plan):
        for one in (original, pipe):
            load_lora(one, folder)
            one.fuse_lora()
        call_transformer(pipe, torch.float16)
    bare = call_transformer(build())
    assert relative_l2(bare, call_transformer(original)) > 0.05
    assert relative_l2(call_transformer(pipe), call_transformer(original)) < 1e-3
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert relative_l2(call_transformer(pipe), bare) < 1e-5


@pytest.mark.filterwarnings("ignore:.*returned values that aren't finite under its plan")
@pytest.mark.usefixtures("each_device")
def test_an_unscaled_lora_on_scaled_weights_is_wrong(
    bare_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing that scales it: refused under the plan, and far off without its check."""
    monkeypatch.setattr(folds.AdapterFolds, "put_on", lambda *_: None)
    pipe, original = build(), build()
    with apply_plan(pipe, bare_plan, cast=False):
        for one in (original, pipe):
            load_lora(one, write_lora(one, tmp_path))
        with pytest.raises(PlanError) as caught:
            call_transformer(pipe)
        assert "the adapter 'style' was loaded into 6 of its layers: it was loaded past" in str(
            caught.value
        )
        assert "make_plan(pipe)" in str(caught.value)
    with Patches() as patches:  # again, around the adapter
        patches.defer(fold_scaling(pipe.transformer, find_entry(bare_plan).scaling).undo)
        assert relative_l2(call_transformer(pipe), call_transformer(original)) > 0.1
    monkeypatch.undo()
    with Patches() as patches:
        patches.defer(fold_scaling(pipe.transformer, find_entry(bare_plan).scaling).undo)
        assert torch.equal(call_transformer(pipe), call_transformer(original))


@pytest.mark.filterwarnings("ignore:.*returned values that aren't finite under its plan")
@pytest.mark.usefixtures("each_device")
def test_a_lora_beyond_the_headroom_is_said(bare_plan: Plan, tmp_path: Path) -> None:
    """Once, with the layer, the bits that it adds and those that there are; a small one is not."""
    pipe = build()
    with apply_plan(pipe, bare_plan):
        load_lora(pipe, write_lora(pipe, tmp_path, size=0.01))
        call_transformer(pipe, torch.float16)  # a warning would be an error here
        pipe.set_adapters("style", 1e5)
        with pytest.warns(StopdownWarning, match=r"'style' may enlarge the output of trans"):
            call_transformer(pipe, torch.float16)
        call_transformer(pipe, torch.float16)


@pytest.mark.slow
def test_a_certificate_with_a_lora_bounds_what_it_adds(tmp_path: Path, save_tiny: Any) -> None:
    """A LoRA that adds 12 bits: the plan of the model alone says so, and runs what is not finite in fp32.

    A plan that was made with it needs neither.
    """
    folder = save_tiny("cogvideox", "fp32", "transformer")
    lora = write_lora(build(), tmp_path) / "pytorch_lora_weights.safetensors"
    source = resolve_source(folder)
    styled = dataclasses.replace(source, loras=((str(lora), 3000.0),))
    reference = call_transformer(load_pipeline(styled, torch_dtypes=torch.float32))
    cpu = choose_device("cpu")
    for name, one in (("alone", source), ("styled", styled)):
        plan = certify_plan(one)
        assert find_entry(plan).in_force.certified
        pipe = load_plan(styled, plan, cpu).pipe
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = call_transformer(pipe, torch.float16)
        told = "\n".join(str(x.message) for x in said)
        for part in ("bits of headroom", "run without exponents, in fp32"):
            assert (part in told) == (name == "alone")
        assert relative_l2(found, reference) < 0.01


@pytest.mark.usefixtures("each_device")
def test_a_certificate_does_not_cover_a_lora(bare_plan: Plan, tmp_path: Path) -> None:
    """Its bounds are those of the weights alone, so any adapter is said."""
    entry = find_entry(bare_plan)
    certified = dataclasses.replace(
        entry, scaling=dataclasses.replace(entry.scaling, certified=True)
    )
    others = [x for x in bare_plan.components if x.component != "transformer"]
    plan = seal_plan(dataclasses.replace(bare_plan, components=(*others, certified)))
    pipe = build()
    with apply_plan(pipe, plan):
        load_lora(pipe, write_lora(pipe, tmp_path, size=0.01))
        with pytest.warns(StopdownWarning, match="'style' isn't covered by its certificate"):
            call_transformer(pipe, torch.float16)


@pytest.mark.thorough
def test_a_run_puts_a_lora_on_a_plan_that_was_made_without(
    bare_plan: Plan, tmp_path: Path, save_tiny: Any, run: Any
) -> None:
    """`generate --lora` with a plan of the model alone: near the same run in fp32, which bare is not."""
    folder = save_tiny("cogvideox", "fp32", "transformer")
    source = resolve_source(folder)
    plan = seal_plan(dataclasses.replace(bare_plan, fingerprint=fingerprint(source)))
    write_plan(plan, tmp_path / "plan.json")
    lora = write_lora(build(), tmp_path) / "pytorch_lora_weights.safetensors"
    styled = dataclasses.replace(source, loras=((str(lora), 0.7),))
    cpu = choose_device("cpu")
    loaded = load_plan(styled, plan, cpu).pipe
    original = load_pipeline(styled, torch_dtypes=torch.float32)
    reference = call_transformer(original)
    assert relative_l2(call_transformer(loaded, torch.float16), reference) < 0.01
    assert relative_l2(call_transformer(build()), reference) > 0.03
    made = ("--frames", 1, "--steps", 1, "--height", 32, "--width", 32, "-o", tmp_path / "a.png")
    given = ("--lora", f"{lora}:0.7", "--precision", tmp_path / "plan.json")
    code, _, err = run("generate", folder, "a", *given, *made)
    assert code == 0, err


def test_a_lora_for_another_model_is_refused(
    bare_plan: Plan, tmp_path: Path, save_tiny: Any, run: Any
) -> None:
    """One message and exit code 2, with a plan as without; nothing is written."""
    folder = save_tiny("cogvideox", "fp32", "transformer")
    plan = dataclasses.replace(bare_plan, fingerprint=fingerprint(resolve_source(folder)))
    write_plan(seal_plan(plan), tmp_path / "plan.json")
    weights = {f"transformer.blocks.0.attn1.to_q.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    save_file(weights, tmp_path / "other.safetensors")
    given = ("--lora", tmp_path / "other.safetensors", "--precision", tmp_path / "plan.json")
    code, out, err = run("generate", folder, "a", *given, "-o", tmp_path / "a.mp4")
    assert (code, out) == (2, "")
    assert "other.safetensors doesn't fit CogVideoXPipeline" in err
    assert not (tmp_path / "a.mp4").exists()


@pytest.mark.filterwarnings("ignore:.*its exponents didn't hold")
@pytest.mark.parametrize(
    ("put", "error", "message"),
    [
        (apply_plan, ScalingError, r"another transformer_blocks\.0\.attn1\.to_q"),
        (guard, PlanError, r"its modules have changed \(\d+ then, \d+ now\)"),
    ],
)
def test_a_layer_that_was_replaced_is_refused(
    bare_plan: Plan, put: Any, error: type[Exception], message: str
) -> None:
    """Whatever put it there: the message names the layer, or the numbers of modules."""
    pipe = build()
    block = pipe.transformer.transformer_blocks[0].attn1
    with put(pipe, bare_plan):
        held = block.to_q
        block.to_q = torch.nn.Sequential(held)
        with pytest.raises(error, match=message):
            call_transformer(pipe, torch.float16)
        block.to_q = held


def mark_rescaled(pipe: Any, folder: Path) -> None:
    """The transformer as if it had been loaded from what `convert` wrote."""
    metadata = {RESCALED_ENTRY: "transformer: weights are multiplied by powers of two"}
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors", metadata=metadata)
    pipe.transformer.register_to_config(_name_or_path=str(folder))


@pytest.mark.thorough
def test_an_adapter_on_a_converted_component_is_found(tmp_path: Path) -> None:
    """`check` warns of rescaled weights, and calls an adapter on them wrong, naming it."""
    pipe = build()
    mark_rescaled(pipe, tmp_path)
    (bare,) = check_rescaled(pipe, find_components(pipe))
    assert (bare.kind, bare.severity, bare.module_path) == (
        "rescaled-weights",
        "note",
        "transformer",
    )
    load_lora(pipe, write_lora(pipe, tmp_path))
    (found,) = check_rescaled(pipe, find_components(pipe))
    assert (found.kind, found.severity) == ("adapter-on-rescaled", "wrong")
    assert found.evidence.endswith("multiplied by powers of two. It has the adapter style.")
    assert "adapter-on-rescaled" in {x.kind for x in check(pipe)}


def test_an_adapter_on_its_own_model_is_no_finding(styled: tuple[Any, Plan]) -> None:
    """Weights that nobody rescaled take adapters."""
    assert list(check_rescaled(styled[0], find_components(styled[0]))) == []


def test_a_module_can_be_collected_while_another_is_built() -> None:
    """Its hook on registrations isn't taken out of the table that PyTorch iterates over then."""
    kept: list[torch.nn.Module] = []

    def collect(*_: Any) -> None:
        kept.clear()
        gc.collect()

    handle = register_module_module_registration_hook(collect)
    try:
        kept.append(torch.nn.Linear(2, 2))
        found = weakref.ref(kept[0])
        AdapterFolds(kept[0], Scaling(), {}).put_on(Patches())
        torch.nn.Sequential(torch.nn.Linear(2, 2))
    finally:
        handle.remove()
    assert found() is None
