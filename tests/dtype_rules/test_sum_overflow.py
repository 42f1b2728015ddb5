"""`check --sums`: what fp16 accumulators and fp16 itself would not hold, from one run in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline

from models.pipeline_calls import SCORED_PATH, make_scored_svd
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.dtype_rules.check import check
from stopdown.dtype_rules.findings import is_fault
from stopdown.dtype_rules.partial_sums import Sum
from stopdown.records import Finding

SMALL = {"height": 32, "width": 32, "num_frames": 2, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def scored() -> Any:
    """SVD whose scores pass 65504 before they are divided, and not after it; in fp16."""
    pipe = make_scored_svd()
    pipe.unet.half()
    return pipe


def look(pipe: Any, device: str) -> list[Finding]:
    """Findings about sums, of the UNet alone."""
    found = check(pipe, device=device, arguments=SMALL, sums=True)
    return [finding for finding in found if "overflow" in finding.kind]


@pytest.mark.thorough
def test_an_a100_is_warned_of_and_a_v100_is_not(scored: Any) -> None:
    """The failure that was seen on an A100, and not on a V100, told before it happens, on a CPU."""
    with assert_untouched(scored):
        (a100,), (v100,) = (look(scored, name) for name in ("a100", "v100"))
    assert {f.module_path for f in (a100, v100)} == {f"unet:{SCORED_PATH}"}
    assert [(f.kind, f.severity) for f in (a100, v100)] == [
        ("sum-overflows", "wrong"),
        ("sum-may-overflow", "note"),
    ]
    assert a100.evidence.startswith("The sums of its scores (attention scores) reach ")
    assert "siliconflow/onediff#958" in a100.evidence
    assert a100.remedy.startswith("Use PyTorch's attention, or set ONEFLOW_ATTENTION_ALLOW_")
    assert "allow_fp16_accumulation = False" in a100.remedy


@pytest.mark.thorough
def test_a_fault_of_other_kernels_is_a_note() -> None:
    """PyTorch sums in fp32 on an A100: what OneDiff's attention did there is told, and fails no check."""
    pipe = testing.make_pipeline("svd", dtype=torch.float16)
    found = check(pipe, device="a100", arguments=SMALL)
    (note,) = [x for x in found if x.kind == "kernel-fault"]
    assert (note.severity, is_fault(note.kind)) == ("note", False)
    assert "siliconflow/onediff#958" in note.evidence
    assert note.remedy.startswith("Use PyTorch's attention, or set ONEFLOW_ATTENTION_ALLOW_")
    assert not [x for x in check(pipe, device="v100", arguments=SMALL) if "kernel" in x.kind]


@pytest.mark.thorough
def test_a_healthy_pipeline_has_no_such_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16 and in range: silent. The same pipeline with every sum called too large is not."""
    pipe = testing.make_pipeline("svd", dtype=torch.float16)
    assert look(pipe, "a100") == []
    monkeypatch.setattr(Sum, "fits", False)
    assert look(pipe, "a100")


class _Staged(StableDiffusionPipeline):
    """A pipeline that takes the steps of its stages alone, as UnCLIP's."""

    def __call__(
        self, prompt: str, prior_num_inference_steps: int = 25, generator: Any = None
    ) -> Any:
        self.steps = prior_num_inference_steps
        size = {"height": 64, "width": 64, "output_type": "np"}
        call = super().__call__
        return call(prompt, num_inference_steps=self.steps, generator=generator, **size)


def test_a_pipeline_with_stages_runs_two_steps_of_each() -> None:
    """It was handed a number of steps, which its code refused, and each stage ran all of its own."""
    pipe = testing.make_pipeline("sd", dtype=torch.float16)
    pipe.__class__ = _Staged
    found = check(pipe, device="a100", sums=True)
    assert pipe.steps == 2
    assert {x.module_path for x in found if x.kind == "sums-in-fp16"} >= {"unet", "vae"}


@pytest.mark.thorough
def test_the_answer_names_each_kind(scored: Any) -> None:
    """Convolutions, linear layers and both products of attention; only the scores are too large."""
    found = check(scored, device="v100", arguments=SMALL, sums=True)
    (note,) = [x for x in found if x.kind == "sums-in-fp16"]
    assert (note.module_path, note.severity, is_fault(note.kind)) == ("unet", "note", False)
    said = note.evidence
    assert said.startswith("In this run fp16 accumulation is not safe: linear layers and ")
    for kind in ("convolutions reach", "attention scores reach", "softmax-weighted sums reach"):
        assert kind in said
    assert said.count("don't fit") == 1
    assert "don't fit" in said.partition("attention scores")[2].partition(";")[0]


@pytest.mark.thorough
def test_a_healthy_pipeline_is_called_safe() -> None:
    """The same kinds, and the error that sums in fp16 cost."""
    pipe = testing.make_pipeline("svd", dtype=torch.float16)
    found = check(pipe, device="v100", arguments=SMALL, sums=True)
    notes = {x.module_path: x.evidence for x in found if x.kind == "sums-in-fp16"}
    assert "unet" in notes
    assert all(x.startswith("In this run fp16 accumulation is safe: ") for x in notes.values())
    assert "(error about " in notes["unet"]


@pytest.mark.thorough
def test_what_is_not_to_run_in_fp16_is_not_judged(scored: Any) -> None:
    """In fp32 the same sums are harmless."""
    found = check(scored, precision="unet=fp32", device="a100", arguments=SMALL, sums=True)
    assert not [finding for finding in found if "overflow" in finding.kind]


@pytest.mark.thorough
def test_the_command_foretells_an_overflow(run: Any, save_tiny: Callable[..., Path]) -> None:
    """A source whose text encoder overflows: the product is named; without --sums it cannot be known."""
    folder = save_tiny("cogview3plus", overflow="text_encoder")
    words = ("check", folder, "--precision", "fp16", "--device", "v100", "--json")
    code, out, err = run(*words, "--sums")
    assert (code, err) == (1, "")
    assert json.loads(out)["judged"] == "Two steps were run in fp32 to check sums."
    named = [f for f in json.loads(out)["findings"] if f["kind"] == "product-overflows"]
    assert named
    assert all(f["module_path"].startswith("text_encoder:encoder.block.") for f in named)
    assert "fp16's maximum is 65504" in named[0]["evidence"]
    assert f"stopdown generate {folder} PROMPT --precision fp16" in named[0]["remedy"]
    _, out, _ = run(*words)
    assert "product-overflows" not in {f["kind"] for f in json.loads(out)["findings"]}
