"""Tests of repairs on top of a plan, and of the plan that keeps them for the next run."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.bare_plans import write_bare_plan
from models.injected_faults import inject
from models.measured_plans import measure_pipeline
from models.pipeline_calls import call_pipeline, make_used_pipeline, quiet
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.app.display import Display
from stopdown.app.generate_command import GenerateOptions, generate
from stopdown.errors import OptionError, PlanError
from stopdown.module_calls.module_code import list_foreign_code
from stopdown.pipelines.requests import Request
from stopdown.plans.plan_files import read_plan, seal_plan, write_plan
from stopdown.records import Plan
from stopdown.runtime.guard import guard

pytestmark = pytest.mark.thorough

NAME = "flux"


def make_pipeline() -> Any:
    """A pipeline whose first text encoder and transformer are as they were made."""
    return make_used_pipeline(NAME)


@functools.cache
def plan_pipeline() -> Plan:
    """A plan of that pipeline, made before anything overflows."""
    request = Request(height=32, width=32, steps=1)
    return measure_pipeline(make_pipeline(), prompts=["a"], request=request)


def measure_error(pixels: Any, reference: Any) -> float:
    """RMSE."""
    return float(np.sqrt(np.mean((pixels - reference) ** 2)))


def test_a_guard_puts_a_plan_on_and_takes_it_off() -> None:
    """While it is on, fp16 by the plan; afterwards the pipeline is in fp32, bit for bit."""
    pipe, plan = make_pipeline(), plan_pipeline()
    reference = call_pipeline(pipe, NAME)
    with assert_untouched(pipe), guard(pipe, plan) as handle:
        assert next(pipe.transformer.parameters()).dtype == torch.float16
        pixels = call_pipeline(pipe, NAME)
        assert handle.updated_plan() is None
    assert handle.repairs == ()
    assert 0 < measure_error(pixels, reference) < 2e-3


def test_a_plan_for_another_pipeline_is_refused() -> None:
    """Nothing is changed, and all that differs is said."""
    plan = plan_pipeline()
    entries = [dataclasses.replace(entry, weights="0" * 64) for entry in plan.components]
    other = dataclasses.replace(plan, components=tuple(entries))
    pipe = make_pipeline()
    with (
        assert_untouched(pipe),
        pytest.raises(PlanError, match="transformer has weights other than those"),
    ):
        guard(pipe, other)


def give_fp32_module(plan: Plan, path: str) -> Plan:
    """The plan with an fp32 module in its transformer."""
    entries = {entry.component: entry for entry in plan.components}
    entry = entries["transformer"]
    scaling = dataclasses.replace(entry.scaling, fp32_modules=(path,))
    entries["transformer"] = dataclasses.replace(entry, scaling=scaling)
    return seal_plan(dataclasses.replace(plan, components=tuple(entries.values())))


def test_a_repair_on_top_of_a_plan_with_fp32_modules(tmp_path: Any) -> None:
    """Exponents are found relative to the model itself, kept in the file, and serve the next run."""
    pipe = make_pipeline()
    plan = give_fp32_module(plan_pipeline(), "x_embedder")
    with inject(pipe, "transformer", step=0, kind="clamp", lasting=True):
        reference = call_pipeline(pipe, NAME)
        with assert_untouched(pipe), guard(pipe, plan, announce=quiet) as handle:
            pixels = call_pipeline(pipe, NAME)
            updated = handle.updated_plan()
        (repair,) = handle.repairs
        assert (repair.kind, repair.action, repair.replays) == ("clamped", "rescaled", 1)
        assert measure_error(pixels, reference) < 2e-3
        assert updated is not None
        write_plan(updated, tmp_path / "plan.json")
        kept = read_plan(tmp_path / "plan.json")
        with assert_untouched(pipe), guard(pipe, kept) as again:
            same = call_pipeline(pipe, NAME)
    assert again.repairs == ()
    np.testing.assert_array_equal(same, pixels)
    found = {entry.component: entry for entry in kept.components}
    before = {entry.component: entry for entry in plan.components}
    assert found["transformer"] != before["transformer"]
    assert any(
        "A run repaired it: `transformer` returned" in x for x in found["transformer"].reasons
    )
    assert {n: e for n, e in found.items() if n != "transformer"} == {
        n: e for n, e in before.items() if n != "transformer"
    }


def plan_changed_code(pipe: Any, plan: Plan) -> Plan:
    """Return the plan as one that was made under the code that is on a pipeline now."""
    entries = [
        dataclasses.replace(x, code=list_foreign_code(getattr(pipe, x.component)))
        for x in plan.components
    ]
    return seal_plan(dataclasses.replace(plan, components=tuple(entries)))


@pytest.mark.parametrize(
    ("module_path", "precision", "fp32_modules"),
    [("x_embedder", "fp16", ("x_embedder",)), ("", "bf16", ())],
)
def test_fp32_modules_and_casts_are_kept_as_well(
    monkeypatch: pytest.MonkeyPatch, module_path: str, precision: str, fp32_modules: tuple[str, ...]
) -> None:
    """What one module or a whole component was brought to stands in the plan."""
    from stopdown.runtime.session import Session

    monkeypatch.setattr(Session, "has_bf16", lambda *_: True)
    pipe, plan = make_pipeline(), plan_pipeline()
    with (
        assert_untouched(pipe),
        inject(pipe, "transformer", step=0, module_path=module_path, lasting=True),
        guard(pipe, plan_changed_code(pipe, plan), announce=quiet) as handle,
    ):
        call_pipeline(pipe, NAME)
        updated = handle.updated_plan()
    assert updated is not None
    (entry,) = (entry for entry in updated.components if entry.component == "transformer")
    (before,) = (entry for entry in plan.components if entry.component == "transformer")
    assert (entry.precision, entry.in_force.fp32_modules) == (
        precision,
        (*before.in_force.fp32_modules, *fp32_modules),
    )
    assert entry.weights == before.weights
    assert updated.seal != plan.seal


class Heard(Display):
    """What a run announces."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def announce(self, text: str) -> None:
        """Keep it."""
        self.texts.append(text)


def test_a_run_keeps_its_repair_when_asked(save_tiny: Any, tmp_path: Path) -> None:
    """A plan's file is left as it is by default; with --keep-repairs the next run needs none."""
    folder = save_tiny("cogview3plus", "bf16", "text_encoder")
    path = tmp_path / "plan.json"
    write_bare_plan(folder, path)
    bare = path.read_bytes()
    options = GenerateOptions(
        *(str(folder), "a", str(tmp_path / "a.png")),
        precision=str(path),
        steps=1,
        height=32,
        width=32,
        force=True,
    )
    heard = Heard()
    first = generate(options, heard)
    assert [(r.component, r.action) for r in first.repairs] == [("text_encoder", "rescaled")]
    assert heard.texts[-1] == (
        f"The repair only lasts for this run; --keep-repairs writes it into {path}."
    )
    assert (first.updated_plan, path.read_bytes()) == (None, bare)
    second = generate(dataclasses.replace(options, keep_repairs=True), heard)
    assert heard.texts[-1] == f"The repair was written into {path}, for the next run."
    assert second.updated_plan == str(path)
    third = generate(dataclasses.replace(options, maxima=True), heard)
    assert (third.repairs, third.updated_plan) == ((), None)
    assert "transformer_blocks.0" in {found.path for found in third.maxima}


def test_repairs_need_a_plan_to_be_kept_in() -> None:
    """Without a plan there is no file to write to."""
    with pytest.raises(OptionError) as caught:
        generate(GenerateOptions("shapes", "a", keep_repairs=True, precision="fp16"))
    assert str(caught.value).startswith("--keep-repairs was given with --precision fp16. ")
    assert str(caught.value).endswith("and use --precision plan.json.")


@pytest.mark.slow
def test_a_repaired_run_is_as_near_to_fp32_as_a_planned_one() -> None:
    """What a guard finds in one failing call is about as good as a plan from many calls."""
    wide = testing.make_pipeline(NAME, overflow="transformer")
    reference = call_pipeline(wide, NAME)
    plan = measure_pipeline(wide, prompts=["a"], request=Request(height=32, width=32, steps=2))
    with guard(wide, plan) as planned:
        error = measure_error(call_pipeline(wide, NAME), reference)
    assert planned.repairs == ()
    pipe = testing.make_pipeline(NAME, overflow="transformer", dtype=torch.float16)
    with guard(pipe, announce=quiet) as handle:
        repaired = measure_error(call_pipeline(pipe, NAME), reference)
    assert [repair.action for repair in handle.repairs] == ["rescaled"]
    assert repaired < 2 * error
