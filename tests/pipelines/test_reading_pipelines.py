"""Pipelines whose components read values of their arguments: fit, plans and converted folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stopdown
from models.conversions import convert_made
from models.pipeline_calls import load_plain
from models.reading_pipelines import draw_lumina, make_lumina
from stopdown.memory.run_memory import listen_to_run
from stopdown.numerics import relative_l2
from stopdown.pipelines.dry_run import make_arguments
from stopdown.pipelines.skeletons import build_skeleton
from stopdown.records import Plan
from stopdown.sources.sources import resolve_source

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("module_cache")]

SIZES = {"height": 64, "width": 64, "max_sequence_length": 32, "num_inference_steps": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "lumina"
    make_lumina().to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plan(folder: Path) -> Plan:
    return stopdown.make_plan(folder)


def test_what_a_run_takes_is_foreseen(folder: Path) -> None:
    """The lengths of the prompts follow from the tokenizer, so the transformer is run dry."""
    dtypes = dict.fromkeys(("transformer", "text_encoder", "vae"), torch.float16)
    pipe = build_skeleton(resolve_source(folder), dtypes)
    run = listen_to_run(pipe, {**make_arguments(pipe), **SIZES})
    assert {"transformer", "vae.decode"} <= {call.component for call in run.calls}
    assert all(call.peak_bytes > 0 for call in run.calls)


def test_a_plan_holds_for_other_lengths(folder: Path, plan: Plan) -> None:
    """Each prompt is nearer to fp32 than bf16 is, whatever lengths the code reads."""
    (entry,) = (x for x in plan.components if x.component == "transformer")
    assert entry.precision == "fp16"
    assert any("reads" in x for x in entry.in_force.signatures)
    prompts = ("a fox", "a red fox in snow", "a fox")
    wide, low = (load_plain(folder, x) for x in (torch.float32, torch.bfloat16))
    pipe = load_plain(folder, torch.float32)
    with stopdown.apply_plan(pipe, plan):
        for prompt in prompts:
            wanted = draw_lumina(wide, prompt)
            plain = relative_l2(draw_lumina(low, prompt), wanted)
            assert relative_l2(draw_lumina(pipe, prompt), wanted) < plain
            assert torch.float16 in {x.dtype for x in pipe.transformer.parameters()}


def test_a_converted_folder_carries_the_plan(folder: Path, plan: Plan, tmp_path: Path) -> None:
    """Files compare nothing at a call: the weights stay, and the configuration has the plan and why."""
    made = convert_made("lumina", folder, tmp_path / "out", plan)
    (entry,) = (x for x in made.components if x.component == "transformer")
    assert entry.precision == "as stored, plan in config.json"
    assert entry.reasons[0] == (
        "Its code reads values of its arguments, and its exponents hold only for the values it read: "
        "files can't compare them at each call."
    )
