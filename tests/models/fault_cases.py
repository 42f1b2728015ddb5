"""The fault matrix: what goes wrong, where, when, under which scheduler; and what must come of it.

A case is run on a tiny pipeline of real classes. What is asked of each: the fault is found, at the
right module path and step; one call is run again for it; and the pixels are those of a run without the
fault, bit for bit when it does not come again, else about as near to fp32's as fp16 is. `run_case` with
`watching=False` switches the detector off: `check` must then fail.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import numpy as np

from models.injected_faults import find_first_layer, inject
from models.pipeline_calls import call_pipeline, name_denoiser
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.component_calls.components import find_callees
from stopdown.module_calls.call_interception import find_module
from stopdown.number_formats import FORMATS
from stopdown.records import Repair
from stopdown.runtime import run_check, session
from stopdown.runtime.call_check import CallCheck
from stopdown.runtime.guard import guard

STEPS = 3
NOISE_LEVEL = 5e-3
"""Pixels of a repaired fp16 run are nearer to fp32's than this; a bad one is 0.05 and more away."""

_SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}

SCHEDULERS: dict[str, dict[str, dict[str, Any]]] = {
    "sdxl": {
        "DPMSolverMultistepScheduler": _SD,
        "DPMSolverSinglestepScheduler": _SD,
        "UniPCMultistepScheduler": _SD,
        "PNDMScheduler": {**_SD, "skip_prk_steps": True},
        "DEISMultistepScheduler": _SD,
        "SASolverScheduler": _SD,
        "IPNDMScheduler": {},
        "LMSDiscreteScheduler": _SD,
        "EulerDiscreteScheduler": _SD,
        "EulerAncestralDiscreteScheduler": _SD,
        "HeunDiscreteScheduler": _SD,
        "KDPM2DiscreteScheduler": _SD,
        "KDPM2AncestralDiscreteScheduler": _SD,
        "DDIMScheduler": _SD,
        "DDPMScheduler": _SD,
        "LCMScheduler": _SD,
        "TCDScheduler": _SD,
    },
    "cogvideox": {"CogVideoXDPMScheduler": {"prediction_type": "v_prediction"}},
    "cogview3plus": {"CogVideoXDPMScheduler": {"prediction_type": "v_prediction"}},
    "wan": {
        "FlowMatchHeunDiscreteScheduler": {"shift": 3.0},
        "UniPCMultistepScheduler": _FLOW,
        "DPMSolverMultistepScheduler": _FLOW,
    },
}
"""Pipeline to the schedulers that are put in the place of its own, with their options."""

COMPONENTS: dict[str, tuple[str, ...]] = {
    "cogvideox": ("text_encoder", "transformer", "vae.decode"),
    "cogvideox-video": ("text_encoder", "transformer", "vae.encode", "vae.decode"),
    "cogview3plus": ("text_encoder", "transformer", "vae.decode"),
    "svd": ("image_encoder", "unet", "vae.encode", "vae.decode"),
    "sdxl": ("text_encoder", "text_encoder_2", "unet", "vae.decode"),
    "flux": ("text_encoder", "text_encoder_2", "transformer", "vae.decode"),
    "wan": ("text_encoder", "transformer", "vae.decode"),
}
"""Pipeline to the components that a run calls."""

Kind = Literal["nan", "inf", "row", "frame", "range", "clamp"]
Moment = Literal["first", "middle", "last"]
WITHOUT_RULE = ("sdxl text_encoder", "sdxl text_encoder_2", "flux text_encoder", "wan vae.decode")
"""Classes that `overflow_` has no rule for: CLIP's text encoders and Wan's autoencoder."""

UPCAST = ("svd vae.encode", "sdxl vae.decode")
"""What a pipeline brings to fp32 by itself, where fp16 cannot overflow."""


@dataclass(frozen=True)
class Case:
    """One cell of the matrix.

    Attributes:
        kind: as `inject` has it.
        lasting: comes again until something is done; else it is gone when the call is run again.
        moment: which of the component's calls.
        scheduler: class in the place of the pipeline's own; "" for that.
        precision: of the pipeline.
    """

    pipeline: str
    component: str
    kind: Kind
    lasting: bool = False
    moment: Moment = "first"
    scheduler: str = ""
    precision: str = "fp16"

    def __str__(self) -> str:
        words = [self.pipeline, self.component, self.kind, self.moment, self.scheduler]
        words += ["lasting"] * self.lasting
        return "-".join(filter(None, words))


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        repairs: by the guard, one a fault.
        call, step: number of the component's call that went wrong, and the step it belongs to.
        is_equal: the pixels are those of the run without a fault, bit for bit.
        rmse: of the pixels to those of fp32; infinite when some are NaN.
    """

    repairs: tuple[Repair, ...]
    call: int
    step: int | None
    is_equal: bool
    rmse: float


@dataclass(frozen=True)
class _Plain:
    """A run without a fault: its pixels, and the step of every call of each component."""

    pixels: np.ndarray[Any, Any]
    steps: dict[str, list[int]]


def make_pipeline(name: str, precision: str, scheduler: str = "") -> Any:
    """A tiny pipeline that has run before, with the scheduler put in."""
    pipe = _make_bare(name, precision)
    pipe.scheduler = _OWN_SCHEDULERS.setdefault(f"{name} {precision}", pipe.scheduler)
    if scheduler:
        import diffusers

        pipe.scheduler = getattr(diffusers, scheduler)(**SCHEDULERS[name][scheduler])
    return pipe


_OWN_SCHEDULERS: dict[str, Any] = {}


@functools.cache
def _make_bare(name: str, precision: str) -> Any:
    pipe = testing.make_pipeline(name, dtype=FORMATS[precision].torch_dtype)
    call_pipeline(pipe, name, steps=STEPS)  # some classes make themselves ready in their first run
    return pipe


@functools.cache
def run_plain(name: str, precision: str, scheduler: str) -> _Plain:
    """A run without a fault."""
    pipe = make_pipeline(name, precision, scheduler)
    steps: dict[str, list[int]] = {}
    with guard(
        pipe, on_fault="raise", observer=lambda c, _, done, __: steps.setdefault(c, []).append(done)
    ):
        pixels = call_pipeline(pipe, name, steps=STEPS)
    return _Plain(pixels, steps)


def run_case(case: Case, *, watching: bool = True) -> Outcome:
    """Run a case; the pipeline is left as it was."""
    plain = run_plain(case.pipeline, case.precision, case.scheduler)
    steps = plain.steps[case.component]
    call = {"first": 0, "middle": len(steps) // 2, "last": len(steps) - 1}[case.moment]
    pipe = make_pipeline(case.pipeline, case.precision, case.scheduler)
    with (
        assert_untouched(pipe),
        _faulty(pipe, case, call),
        switched_off(not watching),
        guard(pipe, announce=lambda text: None) as handle,
    ):
        pixels = call_pipeline(pipe, case.pipeline, steps=STEPS)
    is_equal = np.array_equal(pixels, plain.pixels)
    error = float(np.sqrt(np.mean((pixels - run_wide(case, call)) ** 2)))
    rmse = error if np.isfinite(error) else float("inf")
    step = steps[call] if case.component in ("transformer", "unet") else None
    return Outcome(handle.repairs, call, step, is_equal, rmse)


def run_wide(case: Case, call: int) -> np.ndarray[Any, Any]:
    """The pixels of fp32: of the same function, where the fault is one of range."""
    if not (case.lasting and case.kind in ("range", "clamp")):
        return run_plain(case.pipeline, "fp32", case.scheduler).pixels
    pipe = make_pipeline(case.pipeline, "fp32", case.scheduler)
    with _faulty(pipe, case, call):
        return call_pipeline(pipe, case.pipeline, steps=STEPS)


@contextlib.contextmanager
def _faulty(pipe: Any, case: Case, call: int) -> Iterator[None]:
    with inject(
        pipe,
        case.component,
        step=call,
        kind=case.kind,
        module_path=_find_module_path(pipe, case),
        lasting=case.lasting,
    ):
        yield


def _find_module_path(pipe: Any, case: Case) -> str:
    """A lasting fault sits in one module, as faults of a kernel do; another in the whole output.

    Of the outputs of CLIP not every one is used, so there it sits in a module as well.
    """
    is_clip = "text_encoder" in case.component and case.pipeline in ("sdxl", "flux")
    if case.kind in ("range", "clamp") or not (case.lasting or is_clip):
        return ""
    callee = next(callee for callee in find_callees(pipe) if callee.name == case.component)
    return find_first_layer(find_module(callee), case.component)


@contextlib.contextmanager
def switched_off(wanted: bool) -> Iterator[None]:
    """The detectors switched off: whatever is looked at is good."""
    with contextlib.ExitStack() as stack:
        if wanted:
            stack.enter_context(mock.patch.object(session, "check_call", return_value=CallCheck()))
            stack.enter_context(mock.patch.object(run_check, "count_bad", return_value=(0, 0, 0)))
        yield


def check(case: Case, outcome: Outcome, noise: float = NOISE_LEVEL) -> None:
    """What must come of a case.

    Args:
        noise: RMSE to fp32's pixels that a repaired run stays below.

    Raises:
        AssertionError: it did not.
    """
    repair, *more = outcome.repairs
    assert repair.component == case.component
    assert repair.step == outcome.step
    assert all(one.replays == 1 for one in outcome.repairs), repair.tried
    # Larger values of a later call, or of the other direction of an autoencoder, are faults as well.
    part = case.component.partition(".")[0]
    assert not more or (case.lasting and case.kind in ("range", "clamp"))
    assert all(one.component.partition(".")[0] == part for one in more)
    if not case.lasting:
        assert (repair.kind, repair.action) == ("intermittent", "replayed")
        assert outcome.is_equal
        return
    pipe = make_pipeline(case.pipeline, case.precision, case.scheduler)
    assert repair.module_path.startswith(f"{case.component}:")
    path = repair.module_path.partition(":")[2]
    if case.kind == "range":
        assert (repair.kind, repair.action) == ("range", "rescaled"), repair.tried
        assert path in dict(getattr(pipe, case.component.partition(".")[0]).named_modules())
    elif case.kind == "clamp":
        callee = next(callee for callee in find_callees(pipe) if callee.name == case.component)
        assert path == find_first_layer(find_module(callee), case.component)
        assert repair.kind == "clamped"
    else:
        assert path == _find_module_path(pipe, case)
        assert (repair.kind, repair.action) == ("written", "fp32-module")
    assert outcome.rmse < noise


def list_covering() -> tuple[Case, ...]:
    """Each kind in each component, each scheduler, each component of each pipeline, each moment."""
    kinds: tuple[Kind, ...] = ("nan", "inf", "row", "frame")
    found = [
        Case(name, component, kinds[(i + j) % 3])
        for i, (name, parts) in enumerate(COMPONENTS.items())
        for j, component in enumerate(parts)
    ]
    found += [
        Case(name, name_denoiser(name), kinds[i % 3], False, _MOMENTS[i % 3], scheduler)
        for name, schedulers in SCHEDULERS.items()
        for i, scheduler in enumerate(schedulers)
    ]
    found += [Case("wan", "transformer", kind, False, "last") for kind in kinds]
    found += [Case("wan", "transformer", "nan", True, moment) for moment in _MOMENTS]
    for component in ("text_encoder", "vae.encode", "vae.decode"):
        found += [Case("cogvideox-video", component, kind) for kind in (*kinds, "clamp")]
    found += [Case("flux", "text_encoder_2", "clamp", True), Case("flux", "transformer", "clamp")]
    found += [Case("flux", "text_encoder_2", "range", True)]
    found += [
        Case("flux", "vae.decode", "inf", True),
        Case("cogview3plus", "text_encoder", "row", True),
    ]
    quick = [c if c.lasting or c.kind == "clamp" else replace(c, precision="fp32") for c in found]
    return tuple(dict.fromkeys(quick))


_MOMENTS: tuple[Moment, ...] = ("first", "middle", "last")


def list_repairing() -> tuple[Case, ...]:
    """Faults that exponents mend: each needs a capture and a solution, which takes seconds."""
    return tuple(
        Case(name, component, kind, True, moment)
        for name, parts in COMPONENTS.items()
        for component in parts
        for kind in ("range", "clamp")
        if f"{name} {component}" not in UPCAST
        if kind == "clamp" or f"{name} {component}" not in WITHOUT_RULE
        for moment in (_MOMENTS if component in ("transformer", "unet") else ("first",))
    )


def list_all() -> tuple[Case, ...]:
    """Every kind in every component of every pipeline at every moment, and under every scheduler."""
    found = [
        Case(name, component, kind, lasting, moment)
        for name, parts in COMPONENTS.items()
        for component in parts
        for kind in ("nan", "inf", "row", "frame", "clamp")
        for lasting in ((False, True) if kind != "clamp" else (False,))
        for moment in (_MOMENTS if component in ("transformer", "unet") else ("first",))
        if can_happen(name, component, kind, lasting)
    ]
    found += [
        Case(name, name_denoiser(name), kind, False, moment, scheduler)
        for name, schedulers in SCHEDULERS.items()
        for scheduler in schedulers
        for kind in ("nan", "row", "clamp")
        for moment in _MOMENTS
    ]
    covering = [replace(case, precision="fp16") for case in list_covering()]
    return tuple(dict.fromkeys([*covering, *list_repairing(), *found]))


def can_happen(name: str, component: str, kind: str, lasting: bool) -> bool:
    """Whether this fault exists there: pictures have no frames, and fp32 has no wider format.

    A lasting one sits in the first layer, which sees frames only in a text (as tokens).
    """
    if kind == "frame" and lasting and component != "text_encoder":
        return False
    is_picture = name in ("sdxl", "flux", "cogview3plus")
    has_frames = "text_encoder" in component or not (is_picture or component == "image_encoder")
    is_upcast = f"{name} {component}" in UPCAST
    if kind == "frame" and not (has_frames and component != "vae.encode"):
        return kind == "frame" and name == "cogvideox-video"
    return not (is_upcast and (lasting or kind == "clamp"))
