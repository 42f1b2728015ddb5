"""What a component returns and the next one takes, through every way in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stopdown
from models.casting_pipelines import CASTING, draw
from models.lora_cases import draw_lora, load_lora, name_lora
from models.pipeline_calls import call_pipeline, load_plain, quiet
from models.signature_cases import draw_ip_adapter, draw_picture
from models.zimage import make_zimage
from stopdown import testing
from stopdown.component_calls.components import read_precisions
from stopdown.errors import NonFiniteError, PlanError, ScalingError, SourceError, StopdownWarning
from stopdown.numerics import relative_l2
from stopdown.runtime import repairs

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("module_cache")]

FP16 = torch.float16


@pytest.fixture(scope="module")
def z_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "z-image"
    make_zimage().to(torch.bfloat16).save_pretrained(folder)
    return folder


def draw_fox(pipe: Any) -> torch.Tensor:
    made = pipe(
        "a fox",
        height=32,
        width=32,
        num_inference_steps=2,
        guidance_scale=0.0,
        output_type="np",
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(0),
    )
    return torch.as_tensor(made.images)


def open_by(way: str, folder: Path) -> Any:
    """The pipeline in fp16, through one of the ways in."""
    if way == "load":
        return stopdown.load(folder, precision="fp16", device="cpu")
    if way == "load without a guard":
        return stopdown.load(folder, precision="fp16", device="cpu", guard=False)
    if way.startswith("quantization"):
        config = stopdown.quantization(folder, guard="guard" in way)
        return load_plain(folder, FP16, quantization_config=config)
    pipe = load_plain(folder, torch.float32)
    if way == "fp16":
        stopdown.fp16(pipe)
    else:
        stopdown.apply_plan(pipe, stopdown.make_plan(folder))
    return pipe


def is_in_fp16(module: torch.nn.Module) -> bool:
    """By its weights: beside a wide encoder its dtype says fp32; without its plan all are in fp32."""
    return FP16 in read_precisions(module)


WAYS = (
    *("quantization", "quantization with a guard", "load", "load without a guard"),
    *("fp16", "apply_plan"),
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:1 call of `transformer` not certified")
def test_states_of_a_hundred_thousand_reach_the_denoiser(z_image: Path, way: str) -> None:
    """The first and the second picture are as near to fp32 as no bf16 is, whatever opened the pipeline."""
    pipe, wanted = open_by(way, z_image), draw_fox(load_plain(z_image, torch.float32))
    plain = relative_l2(draw_fox(load_plain(z_image, torch.bfloat16)), wanted)
    assert is_in_fp16(pipe.transformer)
    for _ in range(2):
        assert relative_l2(draw_fox(pipe), wanted) < plain / 4
    guard = getattr(pipe, "stopdown_guard", None)
    assert guard is None or not guard.repairs


# Pipelines that cast


@pytest.fixture(scope="module")
def casting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name to the folder of a pipeline that casts what its encoder returns, made when it is asked for."""
    folder = tmp_path_factory.mktemp("casting")

    @functools.cache
    def save(name: str) -> Path:
        CASTING[name].make().to(torch.bfloat16).save_pretrained(folder / name)
        return folder / name

    return save


@pytest.mark.parametrize("way", ["quantization", "load", "fp16", "apply_plan"])
@pytest.mark.parametrize(
    "name",
    [
        "qwen-image",
        "kandinsky-5",
        pytest.param("ltx-2", marks=pytest.mark.slow),
    ],  # a plan: a minute
)
@pytest.mark.filterwarnings("ignore:1 call of .* not certified")
@pytest.mark.filterwarnings("ignore:.*The pipeline doesn't call it")
@pytest.mark.filterwarnings("ignore:`connectors` returned finite values")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of bf16's reference
def test_a_pipeline_casts_states_of_a_hundred_thousand_itself(
    casting: Callable[[str], Path], name: str, way: str
) -> None:
    """To the dtype that a component says it has, which would be fp16: its states were Inf there."""
    folder = casting(name)
    wanted, plain = (draw(load_plain(folder, x), name) for x in (torch.float32, torch.bfloat16))
    pipe = open_by(way, folder)
    for _ in range(2):
        assert (
            relative_l2(draw(pipe, name).float(), wanted) < relative_l2(plain.float(), wanted) / 2
        )
    assert is_in_fp16(pipe.transformer)
    assert is_in_fp16(pipe.text_encoder)
    assert getattr(pipe, CASTING[name].reads).dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen-image", "kandinsky-5"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of bf16's reference
def test_a_guard_keeps_what_a_repaired_encoder_returns(
    casting: Callable[[str], Path], name: str
) -> None:
    """The pipeline asks for a dtype before the encoder is repaired: it is said; the next run is right."""
    folder = casting(name)
    wanted, plain = (draw(load_plain(folder, x), name) for x in (torch.float32, torch.bfloat16))
    pipe = load_plain(folder, FP16)
    with stopdown.guard(pipe, announce=lambda text: None):
        said = "`text_encoder` returns values beyond fp16's maximum.*Run the pipeline again"
        with pytest.raises(NonFiniteError, match=said):
            draw(pipe, name)
        made = draw(pipe, name)
        assert relative_l2(made.float(), wanted) < relative_l2(plain.float(), wanted) / 2
        assert pipe.text_encoder.dtype == torch.float32
    assert pipe.text_encoder.dtype == FP16


# Saved


@pytest.fixture(scope="module")
def cogvideox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose transformer and text encoder overflow, as Diffusers saves it."""
    folder = tmp_path_factory.mktemp("models") / "cogvideox"
    pipe = testing.make_pipeline("cogvideox", overflow="transformer")
    testing.overflow_(pipe.text_encoder)
    pipe.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fused(cogvideox: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A folder saved from a planned pipeline with a fused LoRA, and what fp32 makes with that LoRA."""
    folder = tmp_path_factory.mktemp("fused")
    wide = load_plain(cogvideox, torch.float32)
    tensors = name_lora(draw_lora(wide, "cogvideox"), "peft", "cogvideox")
    load_lora(wide, tensors, folder, "style")
    pipe = load_plain(cogvideox, FP16, quantization_config=stopdown.quantization(cogvideox))
    load_lora(pipe, tensors, folder, "style")
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    with pytest.warns(StopdownWarning, match="transformer is saved with other weights"):
        pipe.save_pretrained(folder / "saved")
    return folder / "saved", torch.as_tensor(call_pipeline(wide, "cogvideox"))


def load_saved(folder: Path, way: str) -> Any:
    import diffusers

    kinds = {"fp16": FP16, "fp32": torch.float32, "bf16": torch.bfloat16}
    options: dict[str, Any] = {"dtype": kinds[way]} if way in kinds else {}
    if way == "quantization":
        options = {"dtype": FP16, "quantization_config": stopdown.quantization(folder)}
    if way == "StopdownConfig":
        kind: Any = diffusers.CogVideoXTransformer3DModel
        config = stopdown.StopdownConfig()
        options["dtype"] = FP16
        options["transformer"] = kind.from_pretrained(
            folder, subfolder="transformer", dtype=FP16, quantization_config=config
        )
    return diffusers.CogVideoXPipeline.from_pretrained(folder, **options)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("way", ["fp16", "fp32", "bf16", "none", "quantization", "StopdownConfig"])
def test_a_pipeline_with_a_fused_lora_is_saved_and_loads(
    fused: tuple[Path, torch.Tensor], way: str
) -> None:
    """The folder gives what fp32 gives with the LoRA, in each dtype and by each config."""
    pipe = load_saved(fused[0], way)
    pipe.set_progress_bar_config(disable=True)
    made = torch.as_tensor(call_pipeline(pipe, "cogvideox"))
    assert relative_l2(made, fused[1]) < (0.02 if way == "bf16" else 0.003)
    if way != "bf16":
        scaling = pipe.transformer.hf_quantizer.applied_plan.components[0].in_force
        assert scaling.exponents
        assert not scaling.certified


@pytest.mark.parametrize("way", ["make_plan", "load"])
def test_weights_with_exponents_are_not_planned_again(
    fused: tuple[Path, torch.Tensor], way: str
) -> None:
    """A plan that was made from scaled weights would be one of another model."""
    with pytest.raises(SourceError, match="transformer have exponents"):
        getattr(stopdown, way)(fused[0])


def test_a_model_that_was_cast_for_good_is_not_saved(
    cogvideox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exponents are off, and its config has the plan that they belong to: a refusal names the way."""
    monkeypatch.setattr(repairs, "computes_bf16", lambda device: False)
    config = stopdown.quantization(cogvideox)
    pipe = load_plain(cogvideox, FP16, quantization_config=config)
    wanted = call_pipeline(pipe, "cogvideox")
    pipe.transformer.transformer_blocks[0].register_forward_hook(lambda *_: None)
    with pytest.warns(StopdownWarning, match="to fp32"):
        call_pipeline(pipe, "cogvideox")
    assert pipe.transformer.dtype == torch.float32
    with pytest.raises(
        PlanError, match=r"was repaired since it was loaded.*Load it again, and save"
    ):
        pipe.save_pretrained(tmp_path / "saved")
    again = load_plain(cogvideox, FP16, quantization_config=config)
    again.save_pretrained(tmp_path / "saved")
    saved = load_plain(tmp_path / "saved", FP16)
    assert relative_l2(*map(torch.as_tensor, (call_pipeline(saved, "cogvideox"), wanted))) == 0


# One component that is changed


@pytest.mark.parametrize("name", ["transformer", "text_encoder", "vae"])
def test_one_component_is_dequantized(cogvideox: Path, name: str) -> None:
    """It is in fp32 beside others in fp16, and gets and gives what it did."""
    wanted = torch.as_tensor(call_pipeline(load_plain(cogvideox, torch.float32), "cogvideox"))
    pipe = load_plain(cogvideox, FP16, quantization_config=stopdown.quantization(cogvideox))
    getattr(pipe, name).dequantize()
    assert getattr(pipe, name).dtype == torch.float32
    assert relative_l2(torch.as_tensor(call_pipeline(pipe, "cogvideox")), wanted) < 0.003


def test_a_component_is_compiled_after_its_plan_was_put_on(cogvideox: Path) -> None:
    """`pipe.transformer = torch.compile(pipe.transformer)` adds a module around it, and no adapter."""
    wanted = torch.as_tensor(call_pipeline(load_plain(cogvideox, torch.float32), "cogvideox"))
    pipe = load_plain(cogvideox, torch.float32)
    guard = stopdown.fp16(pipe)
    pipe.transformer = torch.compile(pipe.transformer)
    with torch.compiler.set_stance("force_eager"):
        made = call_pipeline(pipe, "cogvideox")
    assert relative_l2(torch.as_tensor(made), wanted) < 0.003
    assert not guard.repairs
    guard.remove()


# Components that two pipelines share


def make_two() -> tuple[Any, Any]:
    """Two pipelines with UNets of their own, one autoencoder and one text encoder."""
    import diffusers

    first, second = (testing.make_pipeline("sd", overflow="unet") for _ in range(2))
    shared = {"vae": first.vae, "text_encoder": first.text_encoder}
    kind = diffusers.StableDiffusionPipeline
    second = kind(**{**second.components, **shared}, requires_safety_checker=False)
    second.set_progress_bar_config(disable=True)
    return first, second


def plan_by(way: str, pipe: Any) -> Any:
    if way == "fp16":
        guard = stopdown.fp16(pipe)
        return guard, guard.remove
    applied = stopdown.apply_plan(pipe, stopdown.make_plan(pipe))
    return applied, applied.undo


@pytest.mark.parametrize("first_off", [True, False])
@pytest.mark.parametrize("way", ["fp16", "apply_plan"])
@pytest.mark.filterwarnings("ignore:.*not certified")
@pytest.mark.filterwarnings("ignore:.*of another pipeline that shares it")
def test_a_shared_component_has_one_plan(way: str, first_off: bool) -> None:
    """Both pipelines are right, one is after the other's plan came off, and then all bits are back."""
    pipes = make_two()
    wanted = [torch.as_tensor(call_pipeline(pipe, "sd")) for pipe in pipes]
    before = [
        {name: x.clone() for name, x in pipe.components[part].state_dict().items()}
        for pipe in pipes
        for part in ("unet", "vae", "text_encoder")
    ]

    def measure(number: int) -> float:
        made = torch.as_tensor(call_pipeline(pipes[number], "sd"))
        return relative_l2(made, wanted[number])

    held, first = [plan_by(way, pipe) for pipe in pipes], int(not first_off)
    assert max(measure(0), measure(1)) < 0.003
    held[first][1]()
    assert measure(1 - first) < 0.003
    held[1 - first][1]()
    assert max(measure(0), measure(1)) == 0
    after = [
        pipe.components[part].state_dict()
        for pipe in pipes
        for part in ("unet", "vae", "text_encoder")
    ]
    for then, now in zip(before, after, strict=True):
        assert all(torch.equal(x, now[name]) for name, x in then.items())


def test_a_plan_of_a_folder_is_refused_for_a_component_that_has_one(cogvideox: Path) -> None:
    """Its exponents would be folded in twice."""
    pipe, plan = load_plain(cogvideox, torch.float32), stopdown.make_plan(cogvideox)
    with (
        stopdown.apply_plan(pipe, plan),
        pytest.raises(PlanError, match="under a plan or a repair"),
    ):
        stopdown.apply_plan(pipe, plan)


# IP-Adapters


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Stable Diffusion whose UNet overflows."""
    return testing.save_pipeline("sd", tmp_path_factory.mktemp("models") / "sd", overflow="unet")


def load_ip_adapter(pipe: Any) -> dict[str, Any]:
    weights = draw_ip_adapter(pipe.unet)
    pipe.load_ip_adapter([weights], subfolder="", weight_name="", image_encoder_folder=None)
    return {"ip_adapter_image_embeds": [draw_picture(2).to(pipe.dtype)]}


@pytest.mark.filterwarnings("ignore:.*not certified")
def test_a_pipeline_with_an_ip_adapter_runs_in_fp16(sd: Path) -> None:
    """The dry run gives it a picture, without an example."""
    pipe = load_plain(sd, torch.float32)
    given = load_ip_adapter(pipe)
    wanted = torch.as_tensor(call_pipeline(pipe, "sd", **given))
    guard = stopdown.fp16(pipe)
    assert [x.precision for x in guard.plan.components] == ["fp16"] * 3
    assert relative_l2(torch.as_tensor(call_pipeline(pipe, "sd", **given)), wanted) < 0.003
    guard.remove()


def test_an_ip_adapter_after_a_plan_is_refused_with_the_way(sd: Path) -> None:
    """Diffusers casts the whole UNet for it: that was called a cast of the user's."""
    pipe = load_plain(sd, torch.float32)
    guard = stopdown.fp16(pipe)
    with pytest.raises(PlanError, match=r"An IP-Adapter.*load the IP-Adapter.*fp16\(pipe\)"):
        load_ip_adapter(pipe)
    guard.remove()
    given = load_ip_adapter(pipe)
    assert given


# Projections that are fused, and weights in fp8


def fuse(module: Any) -> None:
    module.fuse_qkv_projections()


def cast_to_fp8(module: Any) -> None:
    module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float16)


@pytest.mark.parametrize(("change", "what"), [(fuse, "fuse them"), (cast_to_fp8, "casting")])
def test_what_copies_or_narrows_scaled_weights_is_refused(sd: Path, change: Any, what: str) -> None:
    """The fused copies kept their exponents, and fp8 lost them: pictures were wrong without a word."""
    pipe = load_plain(sd, torch.float16)
    with stopdown.guard(pipe, announce=quiet):
        before = call_pipeline(pipe, "sd")
        with pytest.raises(PlanError, match=rf"a UNet2DConditionModel under a plan.*{what}"):
            change(pipe.unet)
        assert (call_pipeline(pipe, "sd") == before).all()
    change(pipe.unet)  # what fp8 gives then is up to the model


def test_other_weights_are_loaded_once_the_guard_is_off(sd: Path) -> None:
    """Under it they're refused; they were divided by powers of two as it came off, without a word."""
    pipe = load_plain(sd, torch.float16)
    other = {name: x * 0.5 for name, x in pipe.unet.state_dict().items()}
    with stopdown.guard(pipe, announce=quiet) as guarded:
        before = call_pipeline(pipe, "sd")
        assert guarded.repairs[0].action == "rescaled"
        with pytest.raises(ScalingError, match="weights of unet were to be loaded"):
            pipe.unet.load_state_dict(other)
        assert (call_pipeline(pipe, "sd") == before).all()
    pipe.unet.load_state_dict(other)
    assert all(torch.equal(x, other[name]) for name, x in pipe.unet.state_dict().items())
