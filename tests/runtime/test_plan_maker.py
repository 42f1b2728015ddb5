"""`stopdown.fp16`: what is loaded is rescaled, cast and guarded by one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import stopdown
from models.pipeline_calls import CALLS, call_pipeline, name_denoiser
from models.snapshots import assert_untouched
from stopdown.errors import OptionError
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.runtime import plan_maker
from stopdown.scaling.trials.trial import WideProducts
from stopdown.testing import PIPELINE_NAMES, make_pipeline


class Loud(nn.Module):
    """Overflows fp16 between its layers, and gives values of about 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, *, scale: float = 100.0) -> torch.Tensor:
        return self.norm(self.last(self.first(x) * 1000) * scale)


def make_loud() -> tuple[Loud, torch.Tensor, torch.Tensor]:
    """The module, what it is called with, and what it gives in fp32."""
    torch.manual_seed(0)
    module, x = Loud().eval().requires_grad_(False), 10 * torch.randn(4, 8)
    return module, x, module(x)


def test_a_module_runs_in_fp16_by_one_line() -> None:
    """Near to fp32 where plain fp16 is NaN, with fp16 and fp32 inputs; the guard takes it all off."""
    module, x, expected = make_loud()
    assert not Loud().half()(x.half()).isfinite().all()
    with assert_untouched(module):
        handle = stopdown.fp16(module, x)
        assert {p.dtype for p in module.parameters()} == {torch.float16}
        for given in (x.half(), x):
            found = module(given)
            assert found.dtype == given.dtype
            assert (found.float() - expected).norm() < 2e-3 * expected.norm()
        assert handle.plan is not None
        assert handle.repairs == ()
        handle.remove()
    assert torch.equal(module(x), expected)


def test_keywords_belong_to_the_example() -> None:
    """They are arguments of the call, under any name."""
    module, x, _ = make_loud()
    handle = stopdown.fp16(module, x, scale=300.0)
    assert module(x.half(), scale=300.0).isfinite().all()
    handle.remove()


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in PIPELINE_NAMES if x not in ("sd", "wan")]


@pytest.mark.default_rows(1)
@pytest.mark.filterwarnings("ignore:.* not certified")
@pytest.mark.parametrize("name", ["sd", "wan", *SLOW])
def test_a_pipeline_runs_in_fp16_by_one_line(name: str) -> None:
    """Its denoiser overflows in plain fp16; by the example of a call it needs no repair."""
    pipe = make_pipeline(name, overflow=name_denoiser(name))
    pipe.set_progress_bar_config(disable=True)
    denoiser = getattr(pipe, name_denoiser(name))
    expected = call_pipeline(pipe, name)
    handle = stopdown.fp16(pipe, **{**CALLS[name], "num_inference_steps": 2})
    assert {x.precision for x in handle.plan.components} == {"fp16"}
    assert torch.float16 in {x.dtype for x in denoiser.parameters()}
    with WideProducts():
        found = call_pipeline(pipe, name)
    assert np.abs(found - expected).mean() < 0.01
    assert handle.repairs == ()
    handle.remove()
    assert {x.dtype for x in denoiser.parameters()} == {torch.float32}


@pytest.mark.thorough
def test_a_pipeline_is_planned_from_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No component runs with values, weights stay as they were, and the second time the plan is kept."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    pipe = make_pipeline("cogvideox", dtype=torch.bfloat16)
    expected, real = sample_weights(pipe.transformer), []

    def note(module: nn.Module, args: object) -> None:
        real.extend(
            x for x in module.parameters() if not x.is_meta and not isinstance(x, FakeTensor)
        )

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.modules.module, "_global_forward_pre_hooks", {1: note})
        plan = stopdown.make_plan(pipe)
    assert real == []
    assert sample_weights(pipe.transformer) == expected
    for entry in plan.components:
        assert entry.precision == "fp16"
        assert entry.calls == 0
        assert entry.in_force.bounded >= 0.99 * entry.in_force.values
    streams = {x.component for x in plan.components if x.in_force.stream is not None}
    assert "transformer" in streams
    with stopdown.fp16(pipe) as guarded:
        assert guarded.plan == plan


def test_a_pipeline_needs_no_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one whose call has arguments without defaults, such as a picture."""
    given = list[Any]()

    def note(program: Any, *, arguments: dict[str, Any]) -> Any:
        given.append(arguments)
        raise stopdown.StopdownError("That was all.")

    monkeypatch.setattr(plan_maker, "certify_program", note)
    with pytest.raises(stopdown.StopdownError, match="That was all"):
        stopdown.fp16(make_pipeline("svd"))
    assert given == [{}]


def test_what_stays_in_another_precision_is_said() -> None:
    """An exponential of 64 fits no fp16, and nothing scales it: a warning names the precision."""

    class Squared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x * self.weight).exp().log()

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 1.0), requires_grad=False)

    with pytest.warns(stopdown.StopdownWarning, match="`Squared` runs in (bf16|fp32): "):
        stopdown.fp16(Squared().eval(), torch.full((2, 4), 8.0)).remove()


def test_a_run_beside_a_source_is_refused() -> None:
    """A plan of a source comes from its weights: what was given to be run is not ignored in silence."""
    with pytest.raises(OptionError, match="Leave `run` out"):
        stopdown.make_plan("shapes", run=lambda: None)
