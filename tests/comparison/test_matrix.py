"""Whole comparisons of a tiny pipeline that overflows: order of error, resuming, failures in place."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch

import stopdown
from models.comparisons import SMALL, run_by_hand
from models.snapshots import assert_untouched
from stopdown import compare, testing
from stopdown.comparison import cells as cells_module
from stopdown.comparison import matrix
from stopdown.comparison.records import Comparison
from stopdown.comparison.subjects import Subject, _describe_run, describe_subject
from stopdown.errors import InputError, OptionError, OutputError
from stopdown.pipelines.requests import Request

PROMPTS = ["a red circle", "a blue square"]


def small(**changes: Any) -> Request:
    """The small request, with its steps."""
    return dataclasses.replace(SMALL, **changes)


@pytest.fixture(scope="module")
def pipe() -> Any:
    """CogVideoX, tiny, with a transformer that overflows in fp16."""
    return testing.make_pipeline("cogvideox", overflow="transformer")


@pytest.fixture(scope="module")
def made(pipe: Any) -> Comparison:
    """Two prompts under fp32, bf16, naive fp16, clamped fp16 and a plan, two steps each."""
    with assert_untouched(pipe):
        names = "fp32,bf16,fp16-plain,clamp,fp16"
        return compare(pipe, PROMPTS, names, request=small(steps=2, seed=5))


@pytest.mark.thorough
def test_the_order_of_error(made: Comparison) -> None:
    """Naive fp16 is broken, clamped fp16 another picture, rescaled fp16 nearer than bf16 each time."""
    verdicts = {variant.name: variant.verdict for variant in made.variants}
    assert verdicts["fp16-plain"] == "broken"
    assert verdicts["clamp"] == "other"
    assert verdicts["fp16"] == "same"
    for row in made.rows:
        cells = {cell.precision: cell for cell in row.cells}
        assert cells["fp16"].measures.rmse < cells["bf16"].measures.rmse / 2
        assert cells["fp16"].latents_rel_err[-1] < cells["bf16"].latents_rel_err[-1] / 2
        assert cells["fp16-plain"].findings[0].kind == "black-frames"
        assert cells["clamp"].clamped > 0
        assert cells["clamp"].saturated > 0
    assert "fp16 is closer to the reference than bf16 on 2 of 2 prompts." in made.reasons


@pytest.mark.thorough
def test_numbers_equal_those_of_runs_by_hand(pipe: Any, made: Comparison) -> None:
    """fp32 and bf16 run without Stopdown, measured by the formula, give the record's own numbers."""
    for index, row in enumerate(made.rows):
        frames = {
            name: run_by_hand(pipe, PROMPTS[index], 5 + index, dtype).astype(np.float64)
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        }
        error = frames["bf16"] - frames["fp32"]
        bf16 = next(cell for cell in row.cells if cell.precision == "bf16").measures
        assert row.seed == 5 + index
        assert bf16.rmse == pytest.approx(math.sqrt((error**2).mean()), rel=1e-9)
        assert bf16.psnr_db == pytest.approx(-10 * math.log10((error**2).mean()), rel=1e-6)
        changes = error[1:] - error[:-1]
        assert bf16.flicker == pytest.approx(math.sqrt((changes**2).mean()), rel=1e-9)


@pytest.mark.thorough
def test_naive_fp16_names_where_it_begins(made: Comparison) -> None:
    """The layer whose output first is not finite is in the record, and on the first row only."""
    first, second = (next(c for c in row.cells if c.precision == "fp16-plain") for row in made.rows)
    assert first.faults[0].module_path == "transformer:patch_embed.text_proj"
    assert second.faults[0].module_path == "transformer"
    assert first.parting.module_path == "transformer:patch_embed"
    assert first.latents_rel_err == (None, None)
    assert first.headroom_bits is None


@pytest.mark.thorough
def test_headroom_shows_what_the_plan_did(made: Comparison) -> None:
    """In fp32 blocks go beyond 65504, under the plan all stay below; the maps have each step."""
    least = {
        variant.name: min(
            bits for heat in variant.heats for row in heat.bits for bits in row if bits is not None
        )
        for variant in made.variants
    }
    assert least["fp32"] < 0 < least["fp16"]
    assert least["fp16-plain"] == -1000
    heat = next(h for h in made.variants[0].heats if h.component == "transformer")
    assert all(len(row) == 2 for row in heat.bits)


@pytest.mark.thorough
def test_the_noise_is_the_same_in_every_precision(
    pipe: Any, made: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch draws other numbers in bf16, the denoiser gets fp32's, rounded."""
    draw = torch.randn

    def draw_other(*size: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
        noise = draw(*size, dtype=dtype, **options)
        return noise.flip(-1) if dtype == torch.bfloat16 else noise

    monkeypatch.setattr(torch, "randn", draw_other)
    other = compare(pipe, PROMPTS[:1], "fp32,bf16", request=small(steps=2, seed=5))
    found, expected = (
        next(cell for cell in x.rows[0].cells if cell.precision == "bf16").measures
        for x in (other, made)
    )
    assert found.rmse == pytest.approx(expected.rmse, rel=1e-9)


@pytest.mark.thorough
def test_a_comparison_goes_on_where_it_stopped(
    pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C in the third cell, a second start runs the last two and gives the same record."""
    calls: list[str] = []
    run = cells_module.run_cell

    def interrupt(opened: Any, name: str, request: Any, *rest: Any, **options: Any) -> Any:
        calls.append(f"{name} {request.prompt}")
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(opened, name, request, *rest, **options)

    monkeypatch.setattr(matrix, "run_cell", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compare(pipe, PROMPTS, "fp32,bf16", request=small(steps=1), folder=tmp_path)
    again = compare(pipe, PROMPTS, "fp32,bf16", request=small(steps=1), folder=tmp_path)
    assert calls[2:] == ["bf16 a blue square", "bf16 a blue square", "fp32 a blue square"]
    monkeypatch.setattr(matrix, "run_cell", run)
    whole = compare(pipe, PROMPTS, "fp32,bf16", request=small(steps=1))
    for one, other in zip(again.rows, whole.rows, strict=True):
        assert [c.measures for c in one.cells] == [c.measures for c in other.cells]


@pytest.mark.thorough
def test_another_request_does_not_reuse_cells(pipe: Any, tmp_path: Path) -> None:
    """Cells of other steps in the same folder are not taken for those of this comparison."""
    one = compare(pipe, PROMPTS[:1], "fp32,bf16", request=small(steps=1), folder=tmp_path)
    two = compare(pipe, PROMPTS[:1], "fp32,bf16", request=small(steps=2), folder=tmp_path)
    assert len(one.rows[0].cells[1].latents_rel_err) == 1
    assert len(two.rows[0].cells[1].latents_rel_err) == 2


@pytest.mark.thorough
def test_a_precision_that_fails_half_way_stands_in_its_place(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that breaks on the second prompt and a plan that is missing leave the rest complete."""
    run = cells_module._run

    def fail(opened: Any, name: str, request: Any, *rest: Any) -> Any:
        if name == "bf16" and request.prompt == PROMPTS[1]:
            raise RuntimeError("CUDA error:\n  out of memory")
        return run(opened, name, request, *rest)

    monkeypatch.setattr(cells_module, "_run", fail)
    made = compare(pipe, PROMPTS, "fp32,bf16,gone.json", request=small(steps=1))
    cells = [{cell.precision: cell for cell in row.cells} for row in made.rows]
    assert [row["bf16"].verdict for row in cells] == ["same", "failed"]
    assert cells[1]["bf16"].error == "RuntimeError: CUDA error: out of memory"
    assert all("gone.json can't be read" in row["gone.json"].error for row in cells)
    assert [row["fp32"].verdict for row in cells] == ["reference", "reference"]
    assert {v.name: v.verdict for v in made.variants}["gone.json"] == "failed"


def test_pipelines_are_closed_when_there_is_no_room(pipe: Any, tmp_path: Path) -> None:
    """On a device without room for two pipelines the older one is let go before the next is opened."""
    subject: Subject = describe_subject(pipe, Request(prompt="a", steps=1))
    small = dataclasses.replace(subject.device, memory_bytes=1)
    subject = dataclasses.replace(subject, device=small)
    subject.open("fp32", tmp_path)
    subject.open("bf16", tmp_path)
    assert list(subject._opened) == ["bf16"]


def test_a_pipeline_in_memory_has_one_precision(pipe: Any) -> None:
    """By component it cannot be compared: the message says what to do, and the rest runs."""
    made = compare(pipe, PROMPTS[:1], "fp32,vae=bf16", request=small(steps=1))
    assert "Save it with save_pretrained and compare the folder." in made.rows[0].cells[1].error
    with pytest.raises(OptionError, match="it has 1"):
        compare(pipe, PROMPTS[:1], "fp32", request=Request(steps=1))


def test_a_folder_answers_for_the_same_program_alone(tmp_path: Path) -> None:
    """Other weights, another function or another input in the same folder are runs of their own."""
    seen = list[float]()

    def count(folder: Path, weight: float, scale: float, is_squared: bool = False) -> int:
        module = torch.nn.Linear(4, 4).requires_grad_(False)
        module.weight[:] = weight
        x, before = scale * torch.ones(1, 4), len(seen)

        def run() -> Any:
            seen.append(scale)
            return module(x)

        def run_squared() -> Any:
            seen.append(scale)
            return module(x) ** 2

        compare({"net": module}, run_squared if is_squared else run, "fp32,bf16", folder=folder)
        return len(seen) - before

    assert count(tmp_path, 1.0, 1.0) == 2
    assert count(tmp_path, 1.5, 1.0) == 2
    assert count(tmp_path, 1.0, 3.0) == 2
    assert count(tmp_path, 1.0, 1.0, is_squared=True) == 2
    add = functools.partial(torch.add, torch.ones(1))
    described = [functools.partial(add, x) for x in (torch.ones(1), torch.zeros(1))]
    assert len(set(map(_describe_run, described))) == 2


def test_a_pipeline_in_memory_is_known_by_its_weights_and_arguments(tmp_path: Path) -> None:
    """The same class with other weights or arguments, in the same folder, is not answered by old runs."""
    names, prompt = "fp32,bf16", "a"

    def identify(seed: int, **arguments: Any) -> str:
        pipe = testing.make_pipeline("cogvideox", seed=seed)
        asked = small(steps=1, arguments=arguments)
        subject = describe_subject(pipe, dataclasses.replace(asked, prompt=prompt))
        return matrix._sign_request(subject, asked, matrix.Thresholds(), names.split(","), 1)

    assert identify(0) == identify(0)
    assert len({identify(0), identify(1), identify(0, eta=0.5), identify(0, eta=0.25)}) == 4


def test_a_finished_row_has_the_line_of_the_present_file(tmp_path: Path) -> None:
    """A blank line put before a prompt moves its finished row."""
    module = torch.nn.Linear(4, 4).requires_grad_(False)
    subject = describe_subject({"net": module}, Request(), runs=[lambda: module(torch.ones(1, 4))])
    kept = []
    for line in (1, 2):
        made = matrix._Matrix(
            subject,
            Request(),
            [(line, "")],
            ("fp32", "bf16"),
            matrix.Thresholds(),
            tmp_path,
            lambda *_: None,
            ("fp32", "bf16"),
            [lambda: module(torch.ones(1, 4))],
        )
        kept += made.run()
    assert [x.row.line for x in kept] == [1, 2]


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([], "No prompts were given"),
        ([(1, "a", 2)], "was given \\(1, 'a', 2\\), a tuple"),
        ([("a", "b")], "was given \\('a', 'b'\\), a tuple"),
    ],
)
def test_prompts_that_are_none_are_refused(pipe: Any, prompts: Any, said: str) -> None:
    """An empty list was answered with a verdict, and a wrong pair with a traceback."""
    with pytest.raises(OptionError, match=said):
        matrix.number_prompts(prompts)


def test_a_text_without_encoding_is_a_prompt() -> None:
    """A name of a file that isn't UTF-8 is told apart from others like any text."""
    assert matrix._hash("caf\udce9", 0) != matrix._hash("caf\udce8", 0)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """In a sentence, as every other output is."""
    (tmp_path / "cells").touch()
    module = torch.nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(OutputError, match="couldn't be written: Not a directory"):
        compare(
            {"net": module},
            lambda: module(torch.ones(1, 4)),
            "fp32,bf16",
            folder=tmp_path / "cells",
        )


def test_a_pipeline_under_a_plan_is_refused() -> None:
    """Its weights are scaled and cast, so that each precision would be another one's."""
    pipe = testing.make_pipeline("sd")
    with stopdown.fp16(pipe), pytest.raises(InputError, match="is under a plan: its"):
        compare(pipe, PROMPTS[:1], "fp32,bf16", request=Request(steps=1))
    describe_subject(pipe, Request(prompt="a"))


def test_offloaded_weights_are_compared_and_not_recognised() -> None:
    """Between calls they have no values by which a finished run could be known again."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False)
    accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    assert next(module.parameters()).is_meta
    run = functools.partial(module, torch.ones(1, 4))
    program = {"other": torch.nn.Linear(4, 4), "net": module}
    subjects = [describe_subject(program, Request(), runs=[run]) for _ in range(2)]
    assert subjects[0].identity != subjects[1].identity
    assert compare(program, run, "fp32,bf16").reference == "fp32"
