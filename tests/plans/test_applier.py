"""Plans on tiny pipelines of real classes that overflow in fp16: made, applied, run, taken off."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from models.measured_plans import measure_pipeline
from models.signature_cases import measure_error
from models.snapshots import assert_untouched
from stopdown.errors import NonFiniteError, PlanError
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.tiny_pipelines import overflow_
from stopdown.plans.applier import apply_plan
from stopdown.plans.call_recorder import list_requests
from stopdown.plans.plan_files import read_plan
from stopdown.records import Plan, from_json, to_json
from stopdown.runtime.guard import guard
from stopdown.testing import make_pipeline

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")

OVERFLOWING = {
    "cogvideox": ("text_encoder", "transformer", "vae"),
    "cogview3plus": ("text_encoder", "transformer", "vae"),
    "svd": ("unet", "vae"),
}
SIZES: dict[str, dict[str, Any]] = {
    "cogvideox": {"frames": 9},
    "cogview3plus": {},
    "svd": {"height": 32, "width": 32, "frames": 3},
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny pipeline, several of its components beyond fp16."""
    pipe = make_pipeline(name)
    for component in OVERFLOWING[name]:
        overflow_(getattr(pipe, component))
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            module.to(dtype)
    return pipe


def run(pipe: Any, name: str) -> torch.Tensor:
    """Pixels in fp64."""
    sizes = {key.replace("frames", "num_frames"): value for key, value in SIZES[name].items()}
    if name == "svd":
        picture = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        sizes["image"] = PIL.Image.fromarray(picture)
    else:
        sizes["prompt"] = "a ball"
    generator = torch.Generator().manual_seed(0)
    output = pipe(**sizes, num_inference_steps=2, generator=generator, output_type="np")
    return torch.from_numpy(np.asarray(output[0], dtype=np.float64))


@pytest.fixture(scope="module")
def plan_of() -> Callable[[str], tuple[Any, Plan]]:
    """A pipeline in fp32 and its plan, made once for each name."""
    made: dict[str, tuple[Any, Plan]] = {}

    def find(name: str) -> tuple[Any, Plan]:
        if name not in made:
            pipe = build(name)
            with assert_untouched(pipe):
                request = Request(**SIZES[name], steps=2)
                plan = measure_pipeline(pipe, prompts=["a red train"], request=request)
            made[name] = pipe, plan
        return made[name]

    return find


@pytest.mark.parametrize(
    "name",
    ["cogvideox", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cogview3plus", "svd"))],
)
@pytest.mark.usefixtures("each_device")
def test_a_pipeline_that_is_black_in_fp16_is_right_with_its_plan(
    name: str, plan_of: Callable[[str], tuple[Any, Plan]]
) -> None:
    """Naive fp16 is NaN; folded, fp32 is bit for bit; cast, fp16 is nearer to it than bf16."""
    pipe, plan = plan_of(name)
    assert {entry.precision for entry in plan.components} == {"fp16"}
    reference = run(pipe, name)
    assert not bool(run(build(name, torch.float16), name).isfinite().all())
    with assert_untouched(pipe):
        with apply_plan(pipe, plan, cast=False):
            assert torch.equal(run(pipe, name), reference)
        with apply_plan(pipe, plan), guard(pipe, on_fault="raise"):
            low = run(pipe, name)
    assert torch.equal(run(pipe, name), reference)
    error = measure_error(low, reference)
    other = measure_error(run(build(name, torch.bfloat16), name), reference)
    print(f"{name}: fp16 by plan {error:.5f}, bf16 {other:.5f}, ratio {other / error:.1f}")  # noqa: T201 - the figure, with -s
    assert bool(low.isfinite().all())
    assert error <= other / 4


def build_any_size(name: str) -> Any:
    """CogVideoX whose positions are computed in `forward`, its transformer beyond fp16."""
    import diffusers

    pipe = make_pipeline("cogvideox" if name == "control" else name)
    if (
        name != "cogvideox-image"
    ):  # which learns positions for 9 frames, and computes them for others
        config = {**pipe.transformer.config, "use_rotary_positional_embeddings": False}
        config |= {"in_channels": 8} if name == "control" else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = type(pipe.transformer).from_config(config)
        pipe.transformer = made.eval().requires_grad_(False).to(pipe.vae.device)
    if name == "control":
        pipe = diffusers.CogVideoXFunControlPipeline(**pipe.components)
    pipe.set_progress_bar_config(disable=True)
    positions = pipe.transformer.patch_embed.pos_embedding.clone()
    overflow_(pipe.transformer)
    pipe.transformer.patch_embed.pos_embedding.copy_(positions)  # as they are computed
    return pipe


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "cogvideox",
        pytest.param("cogvideox-video", marks=pytest.mark.slow),
        pytest.param("cogvideox-image", marks=pytest.mark.slow),
        pytest.param("control", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("each_device")
def test_a_plan_for_a_size_whose_positions_are_computed_is_right_at_every_size(name: str) -> None:
    """In fp32 bit for bit, and finite and near in fp16, at the planned, configured and other sizes."""
    pipe = build_any_size(name)
    takes_video = name in ("cogvideox-video", "control")
    frames = {} if takes_video else {"frames": 9 if name == "cogvideox" else 17}
    height = 32 if name == "cogvideox-image" else 16
    wanted = Request(height=height, width=32, steps=2, **frames)
    plan = measure_pipeline(pipe, prompts=["a red train"], request=wanted)
    entry = next(x for x in plan.components if x.component == "transformer")
    assert (entry.precision, entry.in_force.fp32_modules) == ("fp16", ())
    assert (entry.in_force.headroom_bits or 0) >= 1  # for longer videos than the plan's

    def run_at(frames: int, height: int, width: int) -> torch.Tensor:
        asked = Request(
            height=height,
            width=width,
            frames=None if takes_video else frames,
            arguments={"output_type": "latent"},
        )
        (request,) = list_requests(pipe, ["a ball"], dataclasses.replace(asked, steps=2))
        return torch.as_tensor(pipe(**build_arguments(pipe, request)).frames).float()

    sizes = [(9, 16, 32), (9, 32, 32), (9 if takes_video else 17, 48, 16)]  # a drawn video has 9
    for size in [(9, 32, 32), (17, 32, 32)] if name == "cogvideox-image" else sizes:
        reference = run_at(*size)
        with apply_plan(pipe, plan, cast=False):
            assert torch.equal(run_at(*size), reference)
        with apply_plan(pipe, plan), guard(pipe, on_fault="raise"):
            low = run_at(*size)
        assert measure_error(low, reference) < 0.01


@pytest.mark.usefixtures("each_device")
def test_nothing_stays_in_fp32_not_even_what_its_authors_keep(
    plan_of: Callable[[str], tuple[Any, Plan]],
) -> None:
    """T5's `wo` is fp16 after a plan; so are all matrices but those of the timestep and of the stream."""
    pipe, plan = plan_of("cogvideox")
    assert type(pipe.text_encoder)._keep_in_fp32_modules == ["wo"]
    with apply_plan(pipe, plan):
        for entry in plan.components:
            module = getattr(pipe, entry.component)
            assert entry.in_force.fp32_modules == ()
            matrices = {n: p for n, p in module.named_parameters() if p.dim() > 1}
            wide = {n.partition(".")[0] for n, p in matrices.items() if p.dtype != torch.float16}
            assert wide == ({"time_embedding", "norm_out"} if module is pipe.transformer else set())


@pytest.mark.usefixtures("each_device")
def test_undoing_twice_is_harmless(plan_of: Callable[[str], tuple[Any, Plan]]) -> None:
    """A plan that was taken off stays off, and its handle says what it is."""
    pipe, plan = plan_of("cogvideox")
    with assert_untouched(pipe):
        applied = apply_plan(pipe, plan)
        assert repr(applied).endswith(" on a CogVideoXPipeline, .undo() takes it off)")
        applied.undo()
        applied.undo()


@pytest.mark.usefixtures("each_device")
def test_every_difference_is_in_one_refusal(
    plan_of: Callable[[str], tuple[Any, Plan]],
) -> None:
    """Other weights, classes, versions and components are named together; nothing is changed."""
    _, plan = plan_of("cogvideox")
    other = make_pipeline("cogvideox", seed=1)
    renamed = [
        dataclasses.replace(entry, class_name="UNet") if entry.component == "vae" else entry
        for entry in plan.components
    ]
    strange = dataclasses.replace(renamed[0], component="vocoder")
    edited = dataclasses.replace(
        plan, components=(*renamed, strange), versions={**plan.versions, "diffusers": "0.1"}
    )
    with assert_untouched(other), pytest.raises(PlanError) as caught:
        apply_plan(other, edited)
    text = str(caught.value)
    assert "it was made with diffusers 0.1, and 0." in text
    assert "vae was a UNet, and the pipeline has a AutoencoderKLCogVideoX" in text
    assert "transformer has weights other than those that were measured" in text
    assert "it has a vocoder, and the pipeline has none" in text
    assert "stopdown plan SOURCE" in text


@pytest.mark.thorough
def test_components_that_cannot_be_scaled_fall_back_with_the_reason() -> None:
    """A forward that leaves torch runs in fp16 between casts, NaN in fp32; the rest is scaled."""
    pipe = build("cogview3plus")
    forward = type(pipe.transformer).forward

    class Leaving(type(pipe.transformer)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            hidden_states = torch.from_numpy(hidden_states.numpy())
            return forward(self, hidden_states, *args, **kwargs)

    pipe.transformer.__class__ = Leaving
    pipe.vae.encoder.conv_in.bias.data[0] = float("nan")
    plan = measure_pipeline(pipe, prompts=["a ball"], request=Request(steps=1))
    planned = {entry.component: entry for entry in plan.components}
    assert {name: entry.precision for name, entry in planned.items()} == {
        "text_encoder": "fp16",
        "transformer": "fp16",
        "vae": "fp32",
    }
    reasons = " ".join(planned["transformer"].reasons)
    assert "Leaving can't be captured as a graph" in reasons
    assert "matrices run in fp16 between casts" in reasons
    assert planned["transformer"].in_force.exponents == {}
    assert planned["vae"].reasons == (
        "1 of its tensors hold NaN or Inf: encoder.conv_in.bias (1 of 8).",
        "fp32 is the reference.",
    )
    with assert_untouched(pipe), apply_plan(pipe, plan):
        assert pipe.transformer.proj_out.weight.dtype == torch.float16
        matrices = [x for x in pipe.text_encoder.parameters() if x.dim() > 1]
        assert {x.dtype for x in matrices} == {torch.float16}
        assert bool(run(pipe, "cogview3plus").isfinite().all())


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_the_command_line_plans_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan` writes a file, `generate --precision plan.json` runs in fp16 by it and says so."""
    from stopdown.app.cli import main
    from stopdown.files.outputs import find_record_path
    from stopdown.records import RunRecord, read_record

    source, file, clip = tmp_path / "model", tmp_path / "plan.json", tmp_path / "clip.png"
    pipe = build("cogview3plus", torch.bfloat16)
    pipe.save_pretrained(source)
    with pytest.raises(SystemExit) as left:
        main(["plan", str(source), "-o", str(file)])
    assert left.value.code == 0
    table = capsys.readouterr().out
    verdict, command = table.splitlines()[:2]
    assert verdict.startswith("Proven not to overflow in fp16: ")
    assert re.search(r" Smallest headroom: \d\.\d bits\.$", verdict)
    assert command == f"→ stopdown generate {source} PROMPT --precision {file}"
    assert "from the weights alone)" in table
    plan = read_plan(file)
    assert plan.fingerprint
    common = ["generate", str(source), "a ball", "--steps", "2", "-o", str(clip)]
    with pytest.raises(NonFiniteError):
        _generate(source, clip, "fp16-plain")
    with pytest.raises(SystemExit) as left:
        main([*common, "--precision", str(file)])
    assert left.value.code == 0
    card = capsys.readouterr().out
    assert "fp16 with plan.json: " in card
    record = read_record(find_record_path(clip), RunRecord)
    assert {d.precision for d in record.decisions} == {"fp16"}
    assert {call.precisions[0] for call in record.calls} == {"fp16"}
    fp32_modules = {path for entry in plan.components for path in entry.in_force.fp32_modules}
    assert {path for d in record.decisions for path in d.kept_fp32} == fp32_modules
    assert "bits of headroom" in " ".join(d.reason for d in record.decisions)


def _generate(source: Path, clip: Path, precision: str) -> None:
    from stopdown.app.generate_command import GenerateOptions, generate

    options = GenerateOptions(
        str(source), "a ball", output=str(clip), steps=2, precision=precision, on_fault="raise"
    )
    generate(options)


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_a_plan_keeps_residual_streams_in_fp32() -> None:
    """It says so, survives its file, is exact in fp32, finite and nearer in fp16, and comes off."""
    pipe = build("cogview3plus")
    plan = measure_pipeline(
        pipe, prompts=["a red train"], residual="fp32", request=Request(steps=1)
    )
    assert from_json(to_json(plan), Plan) == plan
    entry = next(x for x in plan.components if x.component == "transformer")
    assert entry.in_force.stream is not None
    assert any("stays in fp32 (" in reason for reason in entry.reasons)
    reference = run(pipe, "cogview3plus")
    with assert_untouched(pipe):
        with apply_plan(pipe, plan, cast=False):
            assert torch.equal(run(pipe, "cogview3plus"), reference)
        with apply_plan(pipe, plan), guard(pipe, on_fault="raise"):
            low = run(pipe, "cogview3plus")
            norm = pipe.transformer.get_submodule("norm_out.norm")
            assert pipe.transformer.proj_out.weight.dtype == torch.float16
            assert {x.dtype for x in norm.parameters()} <= {torch.float32}
    bf16 = run(build("cogview3plus", torch.bfloat16), "cogview3plus")
    assert measure_error(low, reference) < measure_error(bf16, reference) / 6
