"""`compare` of programs that are no pipelines: cast where they are, and as before at the end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models.programs import KINDS, make_faulty, make_program
from models.snapshots import assert_untouched
from stopdown import compare
from stopdown.comparison import subjects
from stopdown.comparison.records import Comparison
from stopdown.errors import InputError, OptionError
from stopdown.pipelines.requests import Request
from stopdown.plans.plan_files import read_plan
from stopdown.testing import make_pipeline

NAMES = "fp32,bf16,fp16-plain,autocast,clamp,fp16"


def list_verdicts(made: Comparison) -> dict[str, str]:
    """Of each precision."""
    return {variant.name: variant.verdict for variant in made.variants}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_compared_where_it_is(kind: str) -> None:
    """Plain fp16 is broken at its layer, the plan is nearest to fp32, and every bit is as before."""
    program = make_faulty(kind, torch.float32)
    with assert_untouched(program.given):
        made = compare(program.given, program.run, NAMES)
    assert [v.error for v in made.variants if v.error] == []
    verdicts = list_verdicts(made)
    assert (verdicts["fp32"], verdicts["fp16-plain"]) == ("reference", "broken")
    assert (verdicts["fp16"], verdicts["bf16"], made.reference) == ("same", "same", "fp32")
    (row,) = made.rows
    cells = {cell.precision: cell for cell in row.cells}
    errors = {name: x.measures.rmse for name, x in cells.items() if x.measures is not None}
    assert errors["fp16"] < errors["bf16"]
    assert (
        cells["fp16-plain"].faults[0].module_path
        == f"{program.component}:{program.path}blocks.1.wide"
    )
    assert cells["clamp"].clamped > 0
    assert all(cell.sheet is None for cell in row.cells)


@pytest.mark.parametrize("names", ["fp32,fp16-plain", "fp32,fp16"])
def test_a_cast_that_fails_half_way_leaves_nothing(
    names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a device has no memory for the second module in another precision."""
    program, put, count = make_faulty("dict", torch.float32), subjects.put_precision, 0

    def fail(module: Any, dtype: Any, patches: Any) -> None:
        nonlocal count
        put(module, dtype, patches)
        count += 1
        if count == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    program.unet.double()  # so that each cast changes it
    monkeypatch.setattr(subjects, "put_precision", fail)
    with assert_untouched(program.given):
        made = compare(program.given, lambda: torch.zeros(2), names)
    assert count > 0
    assert any("out of memory" in variant.error for variant in made.variants)


def test_a_healthy_program_is_the_same_in_every_precision() -> None:
    """Its own noise is drawn from one seed, so only rounding is left between two runs."""
    program = make_program("module")

    def run() -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = program.unet(torch.randn(2, 4, 8), torch.ones(2))
            return out

    state = torch.get_rng_state()
    made = compare(program.given, run, "fp32,fp16-plain", request=Request(seed=3))
    assert torch.equal(torch.get_rng_state(), state)
    assert list_verdicts(made) == {"fp32": "reference", "fp16-plain": "same"}
    (row,) = made.rows
    assert row.cells[1].measures is not None
    assert 0 < row.cells[1].measures.rmse < 1e-3


@pytest.mark.thorough
def test_each_function_is_a_row_and_pictures_are_seen_as_pictures() -> None:
    """A row each; what is a picture of bytes has a sheet, and is measured as one."""
    vae, said = make_pipeline("sd").vae.eval(), list[str]()

    def run(prompt: str) -> list[Image.Image]:
        said.append(prompt)
        z = torch.randn(1, vae.config.latent_channels, 8, 8)
        with torch.no_grad():
            decoded = vae.decode(z).sample[0].clamp(-1, 1)
        array = ((decoded + 1) * 127.5).permute(1, 2, 0).byte().numpy()
        return [Image.fromarray(np.ascontiguousarray(array))]

    with assert_untouched(vae):
        made = compare({"vae": vae}, [partial(run, "a"), partial(run, "b")], "fp32,bf16")
    assert sorted(said) == ["a", "a", "b", "b"]
    assert [row.line for row in made.rows] == [1, 2]
    assert all(cell.sheet is not None for row in made.rows for cell in row.cells)
    assert {call.component for cell in made.rows[0].cells for call in cell.calls} == set()


@pytest.mark.thorough
def test_classes_of_diffusers_and_transformers_without_a_pipeline() -> None:
    """T5 by itself, made to overflow: broken in fp16, right by a plan and under autocast."""
    encoder = make_pipeline("cogvideox", overflow="text_encoder").text_encoder.eval()
    tokens = torch.tensor([[3, 4, 5, 1]])

    def run() -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = encoder(tokens).last_hidden_state
            return out

    made = compare(encoder, run, "fp32,bf16,fp16-plain,fp16")
    cells = {cell.precision: cell for cell in made.rows[0].cells}
    assert cells["fp16"].measures is not None
    assert cells["bf16"].measures is not None
    assert cells["fp16"].measures.rmse < cells["bf16"].measures.rmse


@pytest.mark.thorough
def test_a_second_start_goes_on(tmp_path: Path) -> None:
    """With a folder rows and the plan are kept, and not made again."""
    program, counts = make_faulty("dict", torch.float32), list[int]()

    def run() -> Any:
        counts.append(1)
        return program.run()

    first = compare(program.given, run, "fp32,fp16", folder=tmp_path)
    before = len(counts)
    again = compare(program.given, run, "fp32,fp16", folder=tmp_path)
    assert len(counts) == before
    assert again.rows == first.rows
    (path,) = tmp_path.rglob("plan.json")
    made = compare(program.given, run, f"fp32,{path}")
    assert list_verdicts(made) == {"fp32": "reference", str(path): "same"}
    assert {entry.component for entry in read_plan(path).components} == {"unet", "vae"}


@pytest.mark.thorough
def test_it_comes_off_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails is said in its cell; Ctrl-C inside of a run leaves nothing behind."""
    program, calls = make_program("engine"), list[int]()

    def fail() -> Any:
        program.run()
        raise ZeroDivisionError("of values")

    def interrupt() -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return program.run()

    with assert_untouched(program.given):
        made = compare(program.given, fail, "fp32,fp16-plain")
        assert {cell.error for cell in made.rows[0].cells} == {"ZeroDivisionError: of values"}
        with pytest.raises(KeyboardInterrupt):
            compare(program.given, interrupt, "fp32,fp16-plain")
        monkeypatch.setattr(subjects, "apply_plan", lambda program, plan: 1 / 0)
        made = compare(program.given, program.run, "fp32,fp16")
        assert made.rows[0].cells[1].error == "ZeroDivisionError: division by zero"


def test_bad_input_is_refused() -> None:
    """One message each."""
    program = make_program("engine")
    with pytest.raises(InputError, match="A DiffusionEngine isn't a pipeline, so") as no:
        compare(program.given, "a cat")
    assert no.value.remedy == "Give a function that runs it: compare(program, lambda: ...)."
    with pytest.raises(OptionError, match="A request with more than a seed was given"):
        compare(program.given, program.run, request=Request(steps=2))
    with pytest.raises(InputError, match="runs it was given for the source shapes"):
        compare("shapes", program.run)
    with pytest.raises(InputError, match=r"Texts and functions were given together\."):
        compare(program.given, ["a cat", program.run])
    with pytest.raises(InputError, match=r"The argument \(object\) holds no module"):
        compare(object(), program.run)
    made = compare(program.given, program.run, "fp32,model=bf16")
    assert made.rows[0].cells[1].error.startswith("What is in memory can't be compared in")
    made = compare(program.given, lambda: None, "fp32,bf16")
    assert "returned a NoneType without values" in made.rows[0].cells[0].error
