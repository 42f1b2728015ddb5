"""`check` on live pipelines and sources: one fault through the whole path, and what its parts say."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.bare_plans import write_bare_plan
from models.pipeline_calls import CALLS
from models.single_file_layout import save_single_file
from models.snapshots import assert_untouched
from stopdown import check, mend
from stopdown.dtype_rules.check import find_weightless_source, inspect_pipeline
from stopdown.errors import OptionError, PlanError
from stopdown.pipelines.loader import load_pipeline
from stopdown.sources.headers import RESCALED_ENTRY
from stopdown.sources.sources import resolve_source
from stopdown.testing import make_pipeline, save_pipeline

SaveTiny = Callable[..., Path]

CALL: dict[str, Any] = {**CALLS["cogvideox"], "num_inference_steps": 2}
BLOCK = "transformer_blocks.1.ff.net.2"


def make_partly_loaded() -> Any:
    """A tiny CogVideoX in bf16 of which one linear stayed in fp32."""
    pipe = make_pipeline("cogvideox", dtype=torch.bfloat16)
    pipe.transformer.get_submodule(BLOCK).float()
    return pipe


def test_a_linear_left_in_fp32_is_found_at_its_place() -> None:
    """One error, at the linear, with its parameter, the operands, and what to type; nothing stays."""
    pipe = make_partly_loaded()
    with assert_untouched(pipe):
        (found,) = check(pipe, device="a100", arguments=CALL)
    assert (found.kind, found.module_path) == ("mixed-parameters", f"transformer:{BLOCK}")
    assert found.severity == "error"
    assert found.evidence == (
        f"The parameter {BLOCK}.weight brings in fp32; linear on cuda takes operands of one dtype, "
        "and got input bf16, weight fp32, bias fp32."
    )
    assert "pipe.transformer.to(torch.bfloat16)" in found.remedy


def test_a_healthy_pipeline_has_no_finding() -> None:
    """The same pipeline without the fault."""
    pipe = make_pipeline("cogvideox", dtype=torch.bfloat16)
    assert check(pipe, device="a100", arguments=CALL) == []


def _cast_by_layer(pipe: Any) -> None:
    pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)


def _offload_by_group(pipe: Any) -> None:
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(cpu, cpu, offload_type="leaf_level")


def _compile(pipe: Any) -> None:
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")


@pytest.mark.parametrize("prepare", [_cast_by_layer, _offload_by_group, _compile])
def test_what_diffusers_puts_on_a_model_is_no_fault(prepare: Callable[[Any], None]) -> None:
    """The copy that is checked ran the original's code and its fp8 weights, or couldn't be made."""
    pipe = make_pipeline("cogvideox", dtype=torch.bfloat16)
    prepare(pipe)
    assert check(pipe, device="a100", arguments=CALL) == []
    pipe.transformer.get_submodule(BLOCK).float()
    if prepare is not _cast_by_layer:  # whose hook casts that back
        (found,) = check(pipe, device="a100", arguments=CALL)
        assert (found.kind, found.module_path) == ("mixed-parameters", f"transformer:{BLOCK}")


def test_mending_leaves_weights_that_are_stored_in_fp8() -> None:
    """Norms and whatever else isn't stored in fp8 were cast to it, and so were all arguments."""
    pipe = make_pipeline("cogvideox", dtype=torch.bfloat16)
    _cast_by_layer(pipe)
    norm = pipe.transformer.norm_final
    assert pipe.transformer.patch_embed.proj.weight.dtype == torch.bfloat16
    norm.float()
    before = {name: x.dtype for name, x in pipe.transformer.named_parameters()}
    done = mend(pipe, device="a100", arguments=CALL).done
    assert done == ("transformer: 2 parameters cast to bf16, as the rest.",)
    after = {name: x.dtype for name, x in pipe.transformer.named_parameters()}
    changed = {name: dtype for name, dtype in after.items() if dtype != before[name]}
    assert set(changed.values()) == {torch.bfloat16}
    assert all(name.startswith("norm_final.") for name in changed)


def test_a_component_of_unknown_format_is_taken_for_one_like_the_others(tmp_path: Path) -> None:
    """A UNet of pickles, which aren't read, was taken for fp32, and refused what the others return."""
    folder = save_pipeline("sd", tmp_path / "model", dtype=torch.float16)
    (weights,) = (folder / "unet").glob("*.safetensors")
    weights.rename(weights.with_suffix(".bin"))
    assert [x.kind for x in check(folder, device="t4")] == ["force-upcast-unread"]


class _Sum(torch.nn.Module):
    """Adds two products of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4).half())

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.functional.linear
        return linear(a, self.weight) + linear(b, self.weight)


def test_two_faults_in_one_place_are_both_found() -> None:
    """The second argument was told only after the first was mended."""
    module, a, b = _Sum(), torch.ones(1, 4), torch.ones(1, 4)
    found = check({"denoiser": module}, device="a100", run=lambda: module(a, b))
    assert [x.kind for x in found] == ["boundary", "boundary"]
    assert [x.evidence.split()[2] for x in found] == ["a", "b"]


def test_another_thread_gets_its_results_while_a_program_is_checked() -> None:
    """It got zeros, as the checked run does."""
    module, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    seen = list[torch.Tensor]()

    def run() -> None:
        other = threading.Thread(target=lambda: seen.append(module(x)))
        other.start()
        other.join()
        seen.append(module(x))

    assert check({"denoiser": module}, device="a100", run=run) == []
    right, checked = seen
    assert torch.equal(right, module(x))
    assert not checked.any()


@pytest.mark.thorough
def test_mending_unifies_the_component_and_comes_off() -> None:
    """The linear is cast to the rest, nothing is left to find, and undo restores every bit."""
    pipe = make_partly_loaded()
    with assert_untouched(pipe):
        mending = mend(pipe, device="a100", arguments=CALL)
        assert mending.done == ("transformer: 2 parameters cast to bf16, as the rest.",)
        assert mending.remaining == []
        assert pipe.transformer.get_submodule(BLOCK).weight.dtype == torch.bfloat16
        mending.undo()


def test_configs_alone_are_enough(tmp_path: Path) -> None:
    """A folder without weights is checked for a device: fp16 with the plan of a run, or without one."""
    folder = save_pipeline("cogvideox", tmp_path / "model")
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    checked = inspect_pipeline(folder, precision="fp16-plain", device="v100", arguments=CALL)
    kinds = {finding.kind for finding in checked.findings}
    assert kinds == {"clamp-may-bite", "force-upcast-unread"}
    planned = inspect_pipeline(folder, precision="fp16", device="v100", arguments=CALL)
    assert planned.findings == []
    assert planned.precisions == checked.precisions


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["vae.encode=fp16,vae.decode=fp32", "vae.decode=fp32,vae=fp16"])
def test_each_method_is_judged_in_its_own_precision(save_tiny: SaveTiny, text: str) -> None:
    """Encode in fp16 and decode in fp32, in any order, of a folder or a pipeline: each call in its own."""
    call = {**CALLS["cogvideox-video"], "num_inference_steps": 1}
    is_live = text.endswith("vae=fp16")
    subject = make_pipeline("cogvideox-video") if is_live else save_tiny("cogvideox-video", "fp32")
    checked = inspect_pipeline(subject, precision=text, device="v100", arguments=call)
    mains = {name: seen.main for name, seen in checked.seen.callees.items()}
    assert (mains["vae.encode"], mains["vae.decode"]) == (torch.float16, torch.float32)
    assert checked.precisions["vae.encode"] == "fp16"
    assert checked.precisions["vae.decode"] == "fp32"
    kinds = [finding.kind for finding in checked.findings]
    assert "force-upcast-unread" in kinds  # though the other method is in fp32


@pytest.mark.thorough
def test_a_plan_is_judged_as_if_it_were_on(save_tiny: SaveTiny, tmp_path: Path) -> None:
    """By configs and by weights: in fp16, without the findings that a plan answers; others are refused."""
    folder, path = save_tiny("cogview3plus"), tmp_path / "plan.json"
    write_bare_plan(folder, path)
    bare = shutil.copytree(folder, tmp_path / "configs")
    for weights in bare.rglob("*.safetensors"):
        weights.unlink()
    call = {**CALLS["cogview3plus"], "num_inference_steps": 1}
    pipe = load_pipeline(resolve_source(folder), torch_dtypes=torch.float32)
    plain = check(pipe, precision="fp16", device="v100", arguments=call)
    assert "clamp-may-bite" in {finding.kind for finding in plain}
    for subject in (folder, bare, pipe):
        checked = inspect_pipeline(subject, precision=str(path), device="v100", arguments=call)
        assert checked.findings == []
        assert set(checked.precisions.values()) == {"fp16"}
    with pytest.raises(PlanError, match="transformer was a CogView3PlusTransformer2DModel"):
        check(save_tiny("cogvideox"), precision=str(path))
    with pytest.raises(OptionError, match="Sums were requested with the plan"):
        check(folder, precision=str(path), sums=True)


def test_an_unknown_component_is_refused() -> None:
    """The message names what the model has."""
    with pytest.raises(
        OptionError, match=r"It has text_encoder, transformer, vae, vae\.decode"
    ) as error:
        check(make_pipeline("cogvideox"), precision="unet=fp16")
    assert "The model has no component 'unet'." in str(error.value)


@pytest.mark.thorough
def test_a_mended_boundary_runs_and_comes_off() -> None:
    """A decoder in fp32 behind latents in bf16: refused, mended at the call, run, and as before."""
    pipe = make_pipeline("sd", dtype=torch.bfloat16)
    pipe.vae.float()
    call: dict[str, Any] = {**CALLS["sd"], "num_inference_steps": 1}
    with pytest.raises(RuntimeError, match="Input type"):
        pipe(**call)
    with assert_untouched(pipe), mend(pipe, device="cpu", arguments=call) as mending:
        assert mending.done == (
            "vae: its arguments are cast to fp32 at each call, its outputs back.",
        )
        assert pipe(**call, output_type="np").images.shape == (1, 32, 32, 3)


@pytest.mark.thorough
def test_mended_modules_are_fp32_again() -> None:
    """T5's wo after .to(float16): fp32 inside the block, fp16 behind it."""
    pipe = make_pipeline("cogview3plus", dtype=torch.float16)
    wo = pipe.text_encoder.encoder.block[0].layer[1].DenseReluDense.wo
    call = {**CALLS["cogview3plus"], "num_inference_steps": 1}
    with mend(pipe, device="v100", arguments=call) as mending:
        assert any("keeps in fp32" in line or "keep in fp32" in line for line in mending.done)
        assert wo.weight.dtype == torch.float32
        assert "fp32-module-lost" not in {finding.kind for finding in mending.remaining}
    assert wo.weight.dtype == torch.float16


@pytest.mark.thorough
def test_a_scheduler_is_made_anew() -> None:
    """Tables in bf16 are those of the config again, and undone the spoilt ones are back."""
    pipe = make_pipeline("cogvideox", dtype=torch.bfloat16)
    pipe.scheduler.alphas_cumprod = pipe.scheduler.alphas_cumprod.bfloat16()
    spoilt = pipe.scheduler
    with mend(pipe, device="a100", arguments=CALL) as mending:
        assert mending.remaining == []
        assert pipe.scheduler.alphas_cumprod.dtype != torch.bfloat16
    assert pipe.scheduler is spoilt


def test_a_single_file_is_checked_by_the_configs_beside_it(tmp_path: Path) -> None:
    """Its pipeline is that of the config folder, its values are read from the file."""
    folder = save_pipeline("sd", tmp_path / "model")
    save_single_file(whole := tmp_path / "whole.safetensors")
    name = "model.diffusion_model.out.2.bias"
    weights = {**load_file(whole)}
    weights[name] = weights[name].bfloat16().index_fill(0, torch.tensor([1]), 1e6)
    save_file(weights, whole)
    checked = inspect_pipeline(
        find_weightless_source(resolve_source(whole, config=folder, with_weights=False)),
        precision="fp16-plain",
        device="v100",
        arguments={**CALLS["sd"], "num_inference_steps": 1},
    )
    found = {finding.kind: finding for finding in checked.findings}
    assert set(found) == {"weight-out-of-range", "force-upcast-unread"}
    assert found["weight-out-of-range"].module_path == f"checkpoint:{name}"
    assert found["weight-out-of-range"].evidence == (
        "1 of 4 values are beyond 65504, where fp16 ends; the largest is 9.994e+05."
    )


@pytest.mark.thorough
def test_causes_are_mended_before_what_they_lead_to() -> None:
    """One parameter in fp32 makes four findings at three components; casting it is enough."""
    pipe = make_pipeline("cogview3plus", dtype=torch.bfloat16)
    pipe.text_encoder.shared.float()
    call = {**CALLS["cogview3plus"], "num_inference_steps": 1}
    assert len(check(pipe, device="a100", arguments=call)) == 4
    with assert_untouched(pipe), mend(pipe, device="a100", arguments=call) as mending:
        assert mending.done == ("text_encoder: 1 parameters cast to bf16, as the rest.",)
        assert mending.remaining == []


@pytest.mark.thorough
def test_a_clamp_of_rescaled_weights_is_no_finding(tmp_path: Path) -> None:
    """Whose files say that their values were scaled into range is not told that its clamp may bite."""
    folder = save_pipeline("cogvideox", tmp_path / "model", dtype=torch.float16)

    def list_kinds() -> set[str]:
        found = check(str(folder), precision="fp16-plain", device="v100", arguments=CALL)
        return {x.kind for x in found if x.module_path.startswith("text_encoder")}

    assert list_kinds() == {"clamp-may-bite"}
    path = folder / "text_encoder" / "model.safetensors"
    save_file(load_file(path), path, {"format": "pt", RESCALED_ENTRY: "times powers of two"})
    assert list_kinds() == {"rescaled-weights"}
