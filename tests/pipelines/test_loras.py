"""LoRAs under a plan: every way to name, load, fuse, weigh and take off one, exact against the original."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stopdown
from models.lora_cases import (
    STYLES,
    draw_lora,
    find_denoiser,
    load_lora,
    make_arguments,
    make_family,
    name_lora,
)
from models.pipeline_calls import call_pipeline, quiet

pytest.importorskip("peft", reason="peft loads LoRA; it is in the extra `adapters`")

from stopdown.errors import ScalingError
from stopdown.interception.patches import Patches
from stopdown.module_calls.call import cast_floats
from stopdown.numerics import relative_l2
from stopdown.pipelines.tiny_pipelines import overflow_
from stopdown.records import Scaling
from stopdown.runtime.repairs import cast_component
from stopdown.scaling.folding.adapters import measure_growth
from stopdown.scaling.folding.folds import cast_, fold_scaling
from stopdown.scaling.rescale import rescale_

CASES = [
    pytest.param(
        family,
        style,
        id=f"{family}-{style}",
        marks=() if (family, style) == ("flux", "kohya") else pytest.mark.slow,
    )
    for family, styles in STYLES.items()
    for style in styles
]


@pytest.fixture(scope="module")
def find_scaling() -> Callable[[str], tuple[Scaling, dict[str, Any]]]:
    """The exponents of a family's denoiser, and the call that they were found for."""

    @functools.cache
    def find(family: str) -> tuple[Scaling, dict[str, Any]]:
        pipe = make_family(family)
        arguments = make_arguments(pipe, family)
        rescaling = rescale_(find_denoiser(pipe)[1], (), arguments)
        assert rescaling.exponents
        return rescaling.scaling, arguments

    return find


def call(pipe: Any, arguments: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The denoiser's output."""
    with torch.no_grad():
        output = find_denoiser(pipe)[1](**cast_floats(arguments, dtype))
    return output[0] if isinstance(output, tuple) else output.sample  # type: ignore[no-any-return]


def list_steps(
    tensors: tuple[Any, Any], folder: Path, is_peft: bool
) -> dict[str, Callable[[Any], object]]:
    """What is done with LoRAs one after the other, by a name."""
    first, second = tensors

    def weigh(pipe: Any, names: list[str], weights: list[float]) -> None:
        find_denoiser(pipe)[1].set_adapters(names, weights)

    def on(method: str, *args: Any, **kwargs: Any) -> Callable[[Any], object]:
        return lambda pipe: getattr(find_denoiser(pipe)[1], method)(*args, **kwargs)

    steps: dict[str, Callable[[Any], object]] = {
        "loaded": lambda pipe: load_lora(pipe, first, folder, "one"),
        "weight changed": lambda pipe: weigh(pipe, ["one"], [0.35]),
        "two at once": lambda pipe: (
            load_lora(pipe, second, folder, "two"),
            weigh(pipe, ["one", "two"], [0.7, -1.25]),
        ),
        "switched off": on("disable_adapters"),
        "switched on": on("enable_adapters"),
        "one of two": lambda pipe: weigh(pipe, ["two"], [1.5]),
        "fused": on("fuse_lora", lora_scale=0.9),
        "taken out of the weights": on("unfuse_lora"),
        "two fused": lambda pipe: (
            weigh(pipe, ["one", "two"], [0.5, 0.5]),
            find_denoiser(pipe)[1].fuse_lora(safe_fusing=True),
        ),
        "taken out again": on("unfuse_lora"),
        "one deleted": on("delete_adapters", "one"),
        "one in its place": lambda pipe: load_lora(pipe, first, folder, "one"),
        "unloaded": on("unload_lora"),
    }
    if not is_peft:
        steps["loaded and fused"] = lambda pipe: (
            load_lora(pipe, second, folder, "three"),
            pipe.fuse_lora(lora_scale=0.4),
        )
        steps["of the fused, the weights"] = lambda pipe: pipe.unload_lora_weights()
    return steps


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "style"), CASES)
def test_every_step_with_loras_is_exact(
    find_scaling: Any, family: str, style: str, tmp_path: Path
) -> None:
    """In fp32, on scaled weights and on the original: the same bits after each step."""
    scaling, arguments = find_scaling(family)
    original, pipe = make_family(family), make_family(family)
    drawn = draw_lora(pipe, family), draw_lora(pipe, family, seed=1)
    first, second = (name_lora(x, style, family) for x in drawn)
    with Patches() as patches:
        patches.defer(fold_scaling(find_denoiser(pipe)[1], scaling).undo)
        bare = call(pipe, arguments)
        assert torch.equal(bare, call(original, arguments))
        for name, step in list_steps((first, second), tmp_path, style == "peft").items():
            step(original)
            step(pipe)
            wanted, found = call(original, arguments), call(pipe, arguments)
            assert torch.equal(wanted, found), (name, relative_l2(found, wanted))
            is_off = name in ("switched off", "unloaded") or name.startswith("taken out")
            assert is_off or relative_l2(wanted, bare) > 0.002, name
    wanted = find_denoiser(original)[1].state_dict()
    for name, tensor in find_denoiser(pipe)[1].state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "style"), CASES)
def test_a_lora_on_fp16_weights_is_near(
    find_scaling: Any, family: str, style: str, tmp_path: Path
) -> None:
    """Loaded, weighed and fused in fp16: nearer to fp32 than bf16 is."""
    scaling, arguments = find_scaling(family)
    original, pipe, brain = (make_family(family) for _ in range(3))
    tensors = name_lora(draw_lora(pipe, family, size=0.2), style, family)
    with Patches() as patches:
        rescaling = fold_scaling(find_denoiser(pipe)[1], scaling)
        patches.defer(rescaling.undo)
        cast_(find_denoiser(pipe)[1], torch.float16, rescaling)
        find_denoiser(brain)[1].to(torch.bfloat16)
        for one in (original, pipe, brain):
            load_lora(one, tensors, tmp_path, "one")
            find_denoiser(one)[1].set_adapters(["one"], [0.8])
        for fuse in (False, True):
            if fuse:
                for one in (original, pipe, brain):
                    find_denoiser(one)[1].fuse_lora()
            wanted = call(original, arguments)
            errors = [
                relative_l2(call(one, arguments, dtype), wanted)
                for one, dtype in ((pipe, torch.float16), (brain, torch.bfloat16))
            ]
            assert errors[0] < errors[1] / 3


def make_configs() -> dict[str, Any]:
    """LoRA in other forms, and kinds of adapters that are no LoRA, by name."""
    from peft import (
        BOFTConfig,
        GloraConfig,
        IA3Config,
        LoHaConfig,
        LoKrConfig,
        LoraConfig,
        OFTConfig,
    )

    layers = ["attn.to_q", "attn.to_v", "to_out.0", "net.2", "proj_out", "norm1.linear"]
    biased = ["to_out.0", "net.2", "norm1.linear"]
    return {
        "dora": LoraConfig(r=2, use_dora=True, target_modules=layers),
        "bias": LoraConfig(r=2, lora_bias=True, target_modules=biased),
        "rslora": LoraConfig(r=2, use_rslora=True, target_modules=layers),
        "hada": LoHaConfig(r=2, target_modules=layers),
        "lokr": LoKrConfig(r=2, target_modules=["attn.to_v", "to_out.0"]),
        "glora": GloraConfig(r=2, target_modules=layers),
        "oft": OFTConfig(r=0, oft_block_size=4, target_modules=layers),
        "boft": BOFTConfig(boft_block_size=4, target_modules=["attn.to_v", "to_out.0"]),
        "ia3": IA3Config(target_modules=layers, feedforward_modules=["net.2"]),
    }


def fill(module: torch.nn.Module, seed: int = 3) -> dict[str, torch.Tensor]:
    """Random values for an adapter `a`; what its state dict has."""
    made, found = torch.Generator().manual_seed(seed), {}
    for name, tensor in module.named_parameters():
        if ".a." in f"{name}.":
            drawn = torch.rand(tensor.shape, generator=made) + 0.5
            tensor.data.mul_(drawn) if "magnitude" in name else tensor.data.copy_((drawn - 1) * 4)
            found[name] = tensor.detach().clone()
    return found


@pytest.mark.parametrize("kind", ["dora", "bias", "rslora"])
def test_other_forms_of_lora_are_exact(find_scaling: Any, kind: str) -> None:
    """By PEFT alone: loaded, merged, taken out, and when the exponents come off beneath a merged one."""
    from peft import inject_adapter_in_model

    scaling, arguments = find_scaling("flux")
    original, pipe = make_family("flux"), make_family("flux")
    rescaling = fold_scaling(pipe.transformer, scaling)
    for one in (original, pipe):
        inject_adapter_in_model(make_configs()[kind], one.transformer, adapter_name="a")
    bare = call(original, arguments)
    pipe.transformer.load_state_dict(fill(original.transformer), strict=False)

    def compare(what: str) -> None:
        wanted = call(original, arguments)
        assert torch.equal(call(pipe, arguments), wanted), what
        assert relative_l2(wanted, bare) > 1e-5, what

    def on(method: str) -> None:
        for one in (original, pipe):
            for layer in one.transformer.modules():
                if hasattr(layer, "merged_adapters"):
                    getattr(layer, method)()

    compare("loaded")
    bits, path = measure_growth(pipe.transformer, "a")
    assert path, "it is used, and was not seen"
    assert 0 <= bits < math.inf
    on("merge")
    compare("merged")
    on("unmerge")
    compare("taken out")
    on("merge")
    rescaling.undo()
    compare("the exponents are off")
    on("unmerge")
    compare("taken out without them")


class Joined(torch.nn.Module):
    """A matrix that reads a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.first(x), x], dim=-1))


def test_columns_have_exponents_of_their_own() -> None:
    """What reads a concatenation is folded by its parts, and the factor with its columns follows."""
    from peft import inject_adapter_in_model

    torch.manual_seed(0)
    module, x = Joined(), torch.randn(3, 4)
    one = copy.deepcopy(module)
    config = make_configs()["rslora"]
    config.target_modules = ["out", "first"]
    for each in (module, one):
        inject_adapter_in_model(config, each, adapter_name="a")
    one.load_state_dict(fill(module), strict=False)
    names = ("first.weight", "first.bias", "out.weight[:,0:4]")
    scaling = Scaling(exponents=dict(zip(names, (-3, -3, 3), strict=True)))
    rescaling = fold_scaling(one, scaling)
    assert torch.equal(one(x), module(x))
    for method in ("merge", "unmerge"):
        for each in (module, one):
            getattr(each.out, method)()
        assert torch.equal(one(x), module(x)), method
    rescaling.undo()
    assert torch.equal(one(x), module(x))


def test_columns_of_a_dora_are_refused() -> None:
    """Its magnitudes are norms of rows, to which every column adds."""
    from peft import inject_adapter_in_model

    module = Joined()
    fold_scaling(module, Scaling(exponents={"out.weight[:,0:4]": 3}))
    config = make_configs()["dora"]
    config.target_modules = ["out"]
    inject_adapter_in_model(config, module, adapter_name="a")
    fill(module)
    with pytest.raises(ScalingError, match="columns of its weight have several exponents"):
        module(torch.randn(3, 4))


def test_an_untrained_dora_does_nothing(find_scaling: Any) -> None:
    """PEFT measures its magnitudes on the scaled weights: they have the exponents already."""
    from peft import inject_adapter_in_model

    scaling, arguments = find_scaling("flux")
    pipe = make_family("flux")
    bare = call(pipe, arguments)
    fold_scaling(pipe.transformer, scaling)
    inject_adapter_in_model(make_configs()["dora"], pipe.transformer, adapter_name="a")
    assert relative_l2(call(pipe, arguments), bare) < 1e-5


def test_a_swapped_and_a_saved_lora_are_as_they_were(find_scaling: Any, tmp_path: Path) -> None:
    """`hotswap` writes over scaled matrices; a file that is saved holds the LoRA of the original."""
    from safetensors.torch import load_file

    scaling, arguments = find_scaling("flux")
    original, pipe = make_family("flux"), make_family("flux")
    fold_scaling(pipe.transformer, scaling)
    first, second = (
        name_lora(draw_lora(pipe, "flux", seed=seed), "diffusers", "flux") for seed in (0, 1)
    )
    for one in (original, pipe):
        load_lora(one, first, tmp_path, "one")
        call(one, arguments)
        load_lora(one, second, tmp_path, "one", hotswap=True)
    assert torch.equal(call(pipe, arguments), call(original, arguments))
    pipe.transformer.save_lora_adapter(tmp_path, adapter_name="one")
    saved = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert {name.removeprefix("transformer.") for name in second} == set(saved)
    assert all(torch.equal(second[f"transformer.{name}"], x) for name, x in saved.items())
    assert torch.equal(call(pipe, arguments), call(original, arguments))


def test_a_lora_of_another_rank_is_swapped_in(find_scaling: Any, tmp_path: Path) -> None:
    """`enable_lora_hotswap` has the first one padded as it's loaded, when it was scaled already."""
    scaling, arguments = find_scaling("flux")
    original, pipe = make_family("flux"), make_family("flux")
    fold_scaling(pipe.transformer, scaling)
    tensors = [name_lora(draw_lora(pipe, "flux", seed=x), "diffusers", "flux") for x in (0, 1)]
    for one in (original, pipe):
        one.enable_lora_hotswap(target_rank=8)
    for number, drawn in enumerate(tensors):
        for one in (original, pipe):
            load_lora(one, drawn, tmp_path, "one", hotswap=number > 0)
        assert torch.equal(call(pipe, arguments), call(original, arguments))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*'one' isn't covered by:stopdown.errors.StopdownWarning")
@pytest.mark.parametrize("is_offloaded_before", [False, True])
def test_a_lora_of_an_offloaded_pipeline(is_offloaded_before: bool, tmp_path: Path) -> None:
    """Under `enable_sequential_cpu_offload` each call ended in a raw error, or the LoRA was unscaled."""
    from accelerate import cpu_offload

    original, pipe = make_family("flux"), make_family("flux")
    tensors = name_lora(draw_lora(original, "flux"), "diffusers", "flux")
    bare = torch.as_tensor(call_pipeline(original, "flux"))
    load_lora(original, tensors, tmp_path, "one")
    wanted = torch.as_tensor(call_pipeline(original, "flux"))
    guarded = stopdown.fp16(pipe)

    def offload() -> None:
        for module in filter(lambda x: isinstance(x, torch.nn.Module), pipe.components.values()):
            cpu_offload(module, torch.device("cpu"), offload_buffers=bool(module._parameters))

    pipe.enable_sequential_cpu_offload = offload  # which wants an accelerator: the same hooks
    if is_offloaded_before:
        offload()
    load_lora(pipe, tensors, tmp_path, "one")
    if not is_offloaded_before:
        offload()
    for _ in range(2):
        found = torch.as_tensor(call_pipeline(pipe, "flux"))
        assert relative_l2(found, wanted) < 0.3 * relative_l2(bare, wanted)
    guarded.remove()


@pytest.mark.filterwarnings("ignore:.*was called with:stopdown.errors.StopdownWarning")
def test_another_lora_takes_the_place_of_a_planned_one(tmp_path: Path) -> None:
    """The guard takes the exponents off; the plan's check refused the call as if they were there."""
    original, pipe = make_family("flux"), make_family("flux")
    first, second = (
        name_lora(draw_lora(original, "flux", seed), "diffusers", "flux") for seed in range(2)
    )
    load_lora(original, second, tmp_path, "other")
    load_lora(pipe, first, tmp_path, "one")
    guarded = stopdown.fp16(pipe)
    call_pipeline(pipe, "flux")
    load_lora(pipe, second, tmp_path, "other")
    pipe.delete_adapters("one")
    wanted, found = (torch.as_tensor(call_pipeline(x, "flux")) for x in (original, pipe))
    guarded.remove()
    assert relative_l2(found, wanted) < 0.01
    assert relative_l2(torch.as_tensor(call_pipeline(pipe, "flux")), wanted) < 1e-4


def test_a_fused_lora_stays_when_a_plan_comes_off(tmp_path: Path) -> None:
    """Its layers were unloaded; the weights of before the cast came back without it."""
    original, pipe = make_family("flux"), make_family("flux")
    tensors = name_lora(draw_lora(original, "flux"), "diffusers", "flux")
    bare = torch.as_tensor(call_pipeline(original, "flux"))
    guarded = stopdown.fp16(pipe)
    for one in (original, pipe):
        load_lora(one, tensors, tmp_path, "one")
        one.fuse_lora()
        one.unload_lora_weights()
    guarded.remove()
    wanted, found = (torch.as_tensor(call_pipeline(x, "flux")) for x in (original, pipe))
    assert relative_l2(found, wanted) < 0.02 * relative_l2(bare, wanted)


@pytest.mark.parametrize("is_fused", [False, True])
def test_what_is_added_under_a_repair_is_in_the_dtype_of_the_rest(
    is_fused: bool, tmp_path: Path
) -> None:
    """Fused projections stayed in bf16 as a repair came off, and the next call ended in a raw error."""
    pipe = make_family("flux").to(torch.float16)
    tensors = name_lora(draw_lora(pipe, "flux"), "diffusers", "flux")
    with stopdown.guard(pipe, announce=quiet) as guarded:
        component = guarded.session.find_component(pipe.transformer)
        component.put_on((cast_component("bf16"),))
        if is_fused:
            pipe.transformer.fuse_qkv_projections()
        else:
            load_lora(pipe, tensors, tmp_path, "one")
        call_pipeline(pipe, "flux")
    assert {x.dtype for x in pipe.transformer.parameters()} == {torch.float16}
    call_pipeline(pipe, "flux")


@pytest.mark.parametrize("swaps", [False, True])
def test_a_lora_beyond_fp16_is_refused(find_scaling: Any, swaps: bool, tmp_path: Path) -> None:
    """Diffusers casts it to fp16 as it loads it: every picture was black without a word."""
    scaling, arguments = find_scaling("flux")
    pipe = make_family("flux")
    tensors = name_lora(draw_lora(pipe, "flux"), "diffusers", "flux")
    large = {name: x * 1e7 if "lora_B" in name else x / 1e7 for name, x in tensors.items()}
    fold_scaling(pipe.transformer, scaling)
    cast_(pipe.transformer, torch.float16, scaling)
    if swaps:
        load_lora(pipe, tensors, tmp_path, "one")
        assert call(pipe, arguments, torch.float16).isfinite().all()
    load_lora(pipe, large, tmp_path, "one", hotswap=swaps)
    with pytest.raises(ScalingError, match=r"The adapter 'one' .*: its lora_B holds Inf or NaN"):
        call(pipe, arguments, torch.float16)
    pipe.delete_adapters("one")
    assert call(pipe, arguments, torch.float16).isfinite().all()


def test_a_lora_with_exponents_of_its_own_is_not_swapped(tmp_path: Path) -> None:
    """A guard finds exponents for a LoRA that is there; `hotswap` wrote over them without a word."""
    original, pipe = make_family("flux"), make_family("flux").to(torch.float16)
    for one in (original, pipe):
        overflow_(one.transformer)
    first, second, third = (
        name_lora(draw_lora(original, "flux", seed, 2.0), "diffusers", "flux") for seed in range(3)
    )
    load_lora(original, third, tmp_path, "other")
    load_lora(pipe, first, tmp_path, "one")
    with stopdown.guard(pipe, announce=quiet):
        before = call_pipeline(pipe, "flux")
        with pytest.raises(
            ScalingError, match=r"'one' was to be hotswapped.*delete_adapters\('one'\)"
        ):
            load_lora(pipe, second, tmp_path, "one", hotswap=True)
        assert (call_pipeline(pipe, "flux") == before).all()
        load_lora(pipe, second, tmp_path, "other")
        pipe.delete_adapters("one")
        call_pipeline(pipe, "flux")
        load_lora(pipe, third, tmp_path, "other", hotswap=True)
        swapped = torch.as_tensor(call_pipeline(pipe, "flux"))
    wanted = torch.as_tensor(call_pipeline(original, "flux"))
    assert relative_l2(swapped, wanted) < 0.005 < relative_l2(torch.as_tensor(before), wanted)


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension", "ignore:Setting boft_n_")
@pytest.mark.parametrize("kind", ["hada", "lokr", "glora", "oft", "boft", "ia3", "fourierft"])
def test_a_kind_that_is_no_lora_is_refused(find_scaling: Any, kind: str) -> None:
    """By its tensor and its layer, when that is called, with the advice to merge it; gone, all is well."""
    from peft import FourierFTConfig, inject_adapter_in_model

    scaling, arguments = find_scaling("flux")
    pipe = make_family("flux")
    fold_scaling(pipe.transformer, scaling)
    fourier = FourierFTConfig(
        n_frequency=8, target_modules=["single_transformer_blocks.0.proj_out"]
    )
    config = {**make_configs(), "fourierft": fourier}[kind]
    inject_adapter_in_model(config, pipe.transformer, adapter_name="a")
    with pytest.raises(
        ScalingError, match=rf"'a' can't take the exponents of .*no rule for {kind}"
    ) as caught:
        call(pipe, arguments)
    assert "Merge it into the original's weights" in str(caught.value)


def test_a_merged_loha_is_a_weight_like_others(find_scaling: Any) -> None:
    """What the refusal advises: merged into the original first, exponents found for that, exact."""
    from peft import inject_adapter_in_model

    _, arguments = find_scaling("flux")
    pipe = make_family("flux")
    bare = call(pipe, arguments)
    inject_adapter_in_model(make_configs()["hada"], pipe.transformer, adapter_name="a")
    fill(pipe.transformer)
    pipe.transformer.fuse_lora()
    pipe.transformer.unload_lora()
    wanted = call(pipe, arguments)
    assert relative_l2(wanted, bare) > 1e-5
    rescale_(pipe.transformer, (), arguments)
    assert torch.equal(call(pipe, arguments), wanted)
