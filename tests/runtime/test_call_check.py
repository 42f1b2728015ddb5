"""Tests of the check of each call: silent, alert, gone and nested, on tiny pipelines of real classes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from models.injected_faults import inject
from models.pipeline_calls import call_pipeline, make_pipeline, name_denoiser
from models.snapshots import assert_untouched
from stopdown.component_calls.step_counter import StepCounter
from stopdown.errors import NonFiniteError, OptionError
from stopdown.module_calls.callee import Callee
from stopdown.number_formats import FORMATS
from stopdown.records import ComponentPlan
from stopdown.runtime.activation_maxima import find_clamping
from stopdown.runtime.fault_texts import suggest_remedy
from stopdown.runtime.guard import Guard, GuardOptions

FAMILIES = ("cogvideox", "cogview3plus", "svd", "sdxl", "flux", "wan")

RESCALED = ', or load the model with `precision="fp16"`, which scales its activations into range.'


def check_calls(pipe: Any, **options: Any) -> Guard:
    """A guard that stops at the first fault, without a search for where it begins."""
    options |= {"on_fault": "raise", "frames": False, "names_culprit": False}
    return Guard(pipe, GuardOptions(**options)).put_on()


def run_checked(pipe: Any, name: str, **options: Any) -> NonFiniteError:
    """The error that ends a run."""
    with pytest.raises(NonFiniteError) as caught, check_calls(pipe, **options):
        call_pipeline(pipe, name)
    return caught.value


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, x, marks=() if x == "fp16" or name == "cogvideox" else pytest.mark.slow)
        for name in FAMILIES
        for x in ("fp32", "bf16", "fp16")
    ],
)
@pytest.mark.usefixtures("each_device")
def test_silent(name: str, precision: str) -> None:
    """A guarded run equals the plain one in every bit, and the pipeline is as it was."""
    pipe = make_pipeline(name, dtype=FORMATS[precision].torch_dtype)
    plain = call_pipeline(pipe, name)
    with assert_untouched(pipe), check_calls(pipe) as handle:
        guarded = call_pipeline(pipe, name)
    assert np.isfinite(plain).all()
    np.testing.assert_array_equal(guarded, plain)
    assert all(call.non_finite == 0 for call in handle.record.calls)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "nan") for name in FAMILIES), ("cogvideox", "inf"), ("svd", "inf")]
)
@pytest.mark.usefixtures("each_device")
def test_alert_at_a_step(name: str, kind: Any) -> None:
    """A fault in the denoiser's second step is found there, by name, and the pipeline is freed."""
    pipe = make_pipeline(name, dtype=torch.bfloat16)
    component = name_denoiser(name)
    calls = 2 if name == "wan" else 1  # with and without the prompt, one after the other
    if name == "sdxl":
        pipe.encode_prompt(
            "a"
        )  # Transformers puts hooks of its own on encoders that are first called
    with assert_untouched(pipe), inject(pipe, component, step=calls, kind=kind):
        error = run_checked(pipe, name)
    word = {"nan": "NaN", "inf": "Inf"}[kind]
    assert re.match(rf"`{component}` returned (only|[\d,]+) {word} ", error.what)
    place = " (sigma 0.00893)" if name == "wan" else ""  # its own code tells it
    assert error.what.endswith(f" in bf16 at step 2 of 2{place}.")
    assert error.expected.startswith("Its inputs were finite (largest ")
    assert error.expected.endswith("; bf16's maximum is 3.3895e+38).")
    assert error.remedy == (
        f'Use `precision="{component}=fp32"`. Or let the run repair it: `on_fault="repair"`.'
    )


@pytest.mark.usefixtures("each_device")
def test_alert_in_fp32() -> None:
    """A fault in a decoder has no step, and nothing wider than fp32 can be advised."""
    pipe = make_pipeline("cogvideox")
    with inject(pipe, "vae.decode", step=0):
        error = run_checked(pipe, "cogvideox")
    assert error.what.startswith("`vae.decode` returned ")
    assert error.what.endswith(" in fp32.")
    assert error.remedy == (
        "It already runs in fp32: its weights may be damaged, or an input may be out of "
        "range. Load the model again from its source."
    )


@pytest.mark.usefixtures("each_device")
def test_the_scheduler_never_sees_the_fault() -> None:
    """The run stops at the component: the step after it is not made."""
    pipe = make_pipeline("cogvideox")
    with inject(pipe, "transformer", step=1), check_calls(pipe) as handle:
        with pytest.raises(NonFiniteError):
            call_pipeline(pipe, "cogvideox", steps=3)
        assert handle.session.steps.done == 1
    (transformer,) = (call for call in handle.record.calls if call.component == "transformer")
    assert (transformer.calls, transformer.non_finite) == (2, 1)


@pytest.mark.usefixtures("each_device")
def test_the_whole_message() -> None:
    """What, where, expected with its reason, and what to type."""
    pipe = make_pipeline("cogvideox", overflow="transformer", dtype=torch.float16)
    reason = 'It fits. Not "calibrated".'
    decisions = (ComponentPlan("transformer", precision="fp16", reasons=(reason,)),)
    error = run_checked(pipe, "cogvideox", decisions=decisions)
    assert error.what == "`transformer` returned only NaN (256 values) in fp16 at step 1 of 2."
    assert error.expected.startswith("Its inputs were finite (largest ")
    assert error.expected.endswith(
        f'; fp16\'s maximum is 65504). fp16 was chosen for `transformer`: "{reason}"'
    )
    assert error.remedy in {
        f'Use `precision="transformer={wider}"`{RESCALED} Or let the run repair it: `on_fault="repair"`.'
        for wider in ("bf16", "fp32")  # of this device
    }
    assert str(error) == f"{error.what} {error.expected} {error.remedy}"


@pytest.mark.usefixtures("each_device")
def test_a_fault_that_came_from_outside_is_said_to() -> None:
    """When the inputs were not finite already, the message does not blame the component alone."""
    pipe = make_pipeline("cogvideox")
    step = pipe.scheduler.step

    def spoil(*args: Any, **kwargs: Any) -> Any:
        return (step(*args, **kwargs)[0] * torch.nan,)

    pipe.scheduler.step = spoil
    try:
        error = run_checked(pipe, "cogvideox")
    finally:
        del pipe.scheduler.step
    assert error.what.endswith(" values) in fp32 at step 2 of 2.")
    assert error.expected == "Its inputs already held 256 values that aren't finite."


@pytest.mark.usefixtures("each_device")
def test_gone_when_it_cannot_be_put_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error half way through putting it on takes off what is on already."""
    pipe = make_pipeline("cogvideox")

    def fail(self: StepCounter) -> None:
        raise RuntimeError("no scheduler")

    monkeypatch.setattr(StepCounter, "follow", fail)
    with assert_untouched(pipe), pytest.raises(RuntimeError, match="no scheduler"):
        check_calls(pipe)


@pytest.mark.usefixtures("each_device")
def test_calls_are_counted_and_timed() -> None:
    """Each component that was called, with its stage, precision and time; the others are absent."""
    pipe = make_pipeline("cogvideox", dtype=torch.bfloat16)
    seen: list[tuple[str, str, int, int]] = []
    with check_calls(pipe, observer=lambda *call: seen.append(call)) as handle:
        call_pipeline(pipe, "cogvideox")
    summary = {call.component: call for call in handle.record.calls}
    assert {name: (call.stage, call.calls) for name, call in summary.items()} == {
        "text_encoder": ("encode", 2),
        "transformer": ("denoise", 2),
        "vae.decode": ("decode", 1),
    }
    assert all(call.precisions == ("bf16",) for call in summary.values())
    assert all(call.elapsed_s > 0 for call in summary.values())
    denoising = [call for call in seen if call[1] == "denoise"]
    assert denoising == [("transformer", "denoise", 0, 2), ("transformer", "denoise", 1, 2)]
    assert handle.record.own_s > 0


@pytest.mark.usefixtures("each_device")
def test_steps_are_those_of_the_run() -> None:
    """A run from a video skips steps, a second run counts anew: the message says what was run."""
    pipe = make_pipeline("cogvideox-video")
    with inject(pipe, "transformer", step=3), check_calls(pipe):
        call_pipeline(pipe, "cogvideox-video", steps=3)
        with pytest.raises(NonFiniteError, match="in fp32 at step 2 of 2"):
            call_pipeline(pipe, "cogvideox-video", steps=3)


@pytest.mark.parametrize(
    ("precision", "has_bf16", "remedy"),
    [
        ("fp16", True, f'Use `precision="vae.decode=bf16"`{RESCALED}'),
        ("fp16", False, f'Use `precision="vae.decode=fp32"`{RESCALED}'),
        ("bf16", True, 'Use `precision="vae.decode=fp32"`.'),
    ],
)
def test_the_remedy_is_what_to_type(precision: str, has_bf16: bool, remedy: str) -> None:
    """It names the very call that failed, and no bf16 on a device that only emulates it."""
    callee = Callee("vae.decode", torch.nn.Module(), "decode", "decode")
    assert suggest_remedy(callee, precision, has_bf16=has_bf16) == remedy


class Clamping(torch.nn.Module):
    """Clamps at a round number below fp16's maximum, as some authors write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-65000.0, 65000.0)


class ClampingByPower(torch.nn.Module):
    """The same as a power of ten."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clip(-6.5e4, 6.5e4)


class Limiting(torch.nn.Module):
    """Clamps where the range of fp16 has nothing to do with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(0, 1) * 65535 + x.clamp(-60.0, 6400)


def test_a_clamp_near_the_end_of_fp16_is_known_by_its_number() -> None:
    """65504 is one way to write it of several."""
    module = torch.nn.Sequential(Clamping(), Limiting(), ClampingByPower())
    assert find_clamping(module) == ("0", "2")


def test_a_device_that_cannot_be_asked_hides_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the message advises depends on the device; what it found does not."""

    def refuse(*_: object) -> None:
        raise OptionError("There is no device xpu:0 here.")

    monkeypatch.setattr("stopdown.runtime.repairs.choose_device", refuse)
    pipe = make_pipeline("cogvideox", overflow="transformer", dtype=torch.float16)
    error = run_checked(pipe, "cogvideox")
    assert "transformer=fp32" in error.remedy
