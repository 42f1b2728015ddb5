"""The one dry run: who listens hears the same alone and together, and each call's code runs once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline

from models.other_pipelines import (
    make_animated_control,
    make_easyanimate,
)
from models.pipeline_calls import PICTURE
from stopdown.component_calls.components import find_callees
from stopdown.devices.device_profiles import find_device_target
from stopdown.dtype_rules.check import make_place
from stopdown.dtype_rules.inspection import DtypeListener
from stopdown.interception.module_paths import ModulePaths
from stopdown.interception.patches import Patches
from stopdown.memory.run_memory import MemoryListener
from stopdown.module_calls.call import ComponentCall
from stopdown.pipelines.dry_run import (
    Answers,
    ComponentFailed,
    DryCall,
    Listener,
    dry_run,
    make_arguments,
)
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.skeletons import copy_skeleton
from stopdown.plans.dry_calls import CallListener, list_pipeline_calls, list_source_calls
from stopdown.scaling.bounds.input_limits import list_timesteps
from stopdown.sources.sources import resolve_source
from stopdown.testing import make_pipeline

SaveTiny = Callable[..., Path]

SIZES = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "np"}


class Told(Listener):
    """Keeps what it is told, as words."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self, call: DryCall) -> None:
        self.told.append(f"begin {call.call.callee.name}")

    @contextlib.contextmanager
    def inside(self, call: DryCall, paths: ModulePaths) -> Any:
        self.told.append("inside")
        assert paths.stack == [""]
        yield
        assert paths.stack == [""]

    def enter(self, path: str) -> None:
        self.told.append(f"enter {path}")

    def leave(self, path: str) -> None:
        self.told.append(f"leave {path}")

    def end(self, call: DryCall) -> None:
        self.told.append(f"end {call.call.callee.name}")


def listen(*listeners: Listener, answers: Answers | None = None, name: str = "sd") -> Any:
    skeleton = copy_skeleton(make_pipeline(name))
    dry_run(skeleton, {**make_arguments(skeleton), **SIZES}, listeners, answers)
    return skeleton


def make_check() -> DtypeListener:
    return DtypeListener(make_place(find_device_target("v100")[1]), "cuda")


def list_kept(answers: Answers) -> list[Any]:
    """What was noted of each call's memory, in the order of the run."""
    return [answer.kept["memory"] for answer in answers.values()]


@pytest.mark.thorough
def test_listeners_hear_together_what_each_hears_alone() -> None:
    """One pass for memory, dtypes and a certificate gives what three give, each call's peak to a byte."""
    alone = MemoryListener(), make_check(), CallListener()
    together = MemoryListener(), make_check(), CallListener()
    for_memory: Answers = {}
    for_all: Answers = {}
    listen(alone[0], answers=for_memory)
    for one in alone[1:]:
        listen(one)
    listen(*together, answers=for_all)
    assert list_kept(for_all) == list_kept(for_memory)
    seen, seen_alone = together[1].conclude(), alone[1].conclude()
    assert seen.operations == seen_alone.operations
    assert seen.observations == seen_alone.observations
    assert list(seen.callees) == list(seen_alone.callees)
    found, wanted = (
        {name: [x.callee.method for x in calls] for name, calls in one.calls.items()}
        for one in (together[2], alone[2])
    )
    assert found == wanted
    assert found["vae"] == ["decode", "encode"]


def test_code_of_a_call_runs_once_for_each_signature() -> None:
    """Three steps are three calls of the denoiser, and its modules are entered in the first alone."""
    told = Told()
    listen(told)
    assert told.told.count("begin unet") == told.told.count("end unet") == 3
    assert told.told.count("enter conv_in") == told.told.count("leave conv_in") == 1


def test_answers_are_kept_for_the_next_run() -> None:
    """A second run with the answers of the first runs no component's code, and is as long."""
    answers: Answers = {}
    first, second = Told(), Told()
    listen(first, answers=answers)
    listen(second, answers=answers)
    assert "inside" in first.told
    assert "inside" not in second.told
    assert first.told.count("begin unet") == second.told.count("begin unet")


def test_formats_of_weights_tell_calls_apart() -> None:
    """The same arguments for weights in another format are another call."""
    answers: Answers = {}
    listen(answers=answers)
    before = len(answers)
    skeleton = copy_skeleton(make_pipeline("sd"))
    skeleton.vae.to(torch.bfloat16)
    with contextlib.suppress(ComponentFailed):
        dry_run(skeleton, {**make_arguments(skeleton), **SIZES}, answers=answers)
    assert len(answers) >= before
    found = MemoryListener()
    with pytest.raises(ComponentFailed) as failed:
        dry_run(skeleton, {**make_arguments(skeleton), **SIZES}, [found], answers)
    assert failed.value.callee.name == "vae.decode"


def test_a_run_ends_at_the_decoder_when_nobody_needs_more() -> None:
    """The forecast of memory hears what follows the decoder; without it the run ends there."""
    told = Told()
    listen(told)
    assert told.told[-1] == "end vae.decode"


def test_an_error_ends_what_was_begun() -> None:
    """A component that raises is named, listeners are told of its end, and every hook is off."""
    told, memory = Told(), MemoryListener()
    skeleton = copy_skeleton(make_pipeline("sd"))
    broken = skeleton.unet.conv_in

    def fail(*_: Any) -> None:
        raise ValueError("no such channel")

    with Patches() as patches:
        patches.defer(broken.register_forward_pre_hook(fail).remove)
        with pytest.raises(ComponentFailed, match="unet: no such channel") as failed:
            dry_run(skeleton, {**make_arguments(skeleton), **SIZES}, [memory, told])
    assert isinstance(failed.value.error, ValueError)
    assert told.told[-2:] == ["leave conv_in", "end unet"]
    assert not broken._forward_hooks
    assert not broken._forward_pre_hooks
    listen(MemoryListener())  # the mode that counts is off again


def test_a_share_of_the_steps_is_as_many_as_somebody_needs() -> None:
    """SDXL changes a picture in 0.3 of its steps by default; of three steps that left none, and a forecast
    ended in an error about the decoder."""
    parts = {x: y for x, y in make_pipeline("sdxl").components.items() if y is not None}
    pipe = StableDiffusionXLImg2ImgPipeline(**parts, add_watermarker=False)
    skeleton, memory = copy_skeleton(pipe), MemoryListener()
    given = {"prompt": "a", "image": PICTURE, "num_inference_steps": 50, "output_type": "np"}
    dry_run(skeleton, given, [memory])
    run = memory.conclude(skeleton)
    assert sum(call.component == "unet" for call in run.calls) == 3
    assert run.steps == 10


def test_steps_are_as_many_as_somebody_needs() -> None:
    """The forecast alone needs three steps; one that hears all of them makes it hear them too."""
    given = {"num_inference_steps": 5}
    for others, steps in (((), 3), ((Told(),), 5)):
        skeleton, memory = copy_skeleton(make_pipeline("sd")), MemoryListener()
        dry_run(skeleton, {**make_arguments(skeleton), **SIZES, **given}, [memory, *others])
        run = memory.conclude(skeleton)
        assert run.steps == steps
        assert sum(call.component == "unet" for call in run.calls) == steps


@pytest.mark.thorough
def test_a_pipeline_that_upcasts_its_autoencoder_is_run_dry_to_its_end(save_tiny: SaveTiny) -> None:
    """Stable Video Diffusion, whose autoencoder says force_upcast: calls of every component are found."""
    source, sizes = complete_source(resolve_source(save_tiny("svd"))), {"height": 64, "width": 64}
    calls, ended = list_source_calls(source, {**sizes, "frames": 2})
    assert not ended
    assert calls.keys() == {"image_encoder", "unet", "vae"}


@pytest.mark.thorough
def test_a_config_without_steps_and_size_is_run_dry_to_its_end() -> None:
    """Marigold's configs may leave both to the caller: its components are planned nevertheless."""
    from diffusers import MarigoldNormalsPipeline

    parts = {**make_pipeline("sd").components}
    parts["unet"] = type(parts["unet"]).from_config(parts["unet"].config, in_channels=8)
    names = ("unet", "vae", "scheduler", "text_encoder", "tokenizer")
    pipe = MarigoldNormalsPipeline(**{name: parts[name] for name in names})
    assert pipe.default_denoising_steps is pipe.default_processing_resolution is None
    calls, ended = list_pipeline_calls(pipe, {})
    assert not ended
    assert calls.keys() == {"text_encoder", "unet", "vae"}
    pipe.default_denoising_steps = 4
    assert "num_inference_steps" not in make_arguments(pipe)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [make_easyanimate, make_animated_control])
def test_a_call_without_a_request_gets_what_its_code_needs(make: Callable[[], Any]) -> None:
    """A negative prompt, a picture of each frame: components were left unplanned."""
    pipe = make()
    calls, ended = list_pipeline_calls(pipe, {})
    assert not ended
    assert {"text_encoder", "vae"} < calls.keys()
    assert calls.keys() & {"transformer", "unet"}


@pytest.mark.parametrize("count", [1, 2])
def test_joined_controlnets_get_a_picture_each(count: int) -> None:
    """Also one alone takes a list, if it is joined as several are; by itself it takes a picture."""
    from diffusers import ControlNetModel, MultiControlNetModel, StableDiffusionControlNetPipeline

    pipe = make_pipeline("sd")
    own = ControlNetModel.from_unet(pipe.unet)
    joined = MultiControlNetModel([own] * count)
    parts = {**pipe.components, "safety_checker": None}
    for part, pictures in ((joined, count), (own, 0)):
        made = StableDiffusionControlNetPipeline(
            **parts, controlnet=part, requires_safety_checker=False
        )
        given = make_arguments(made)["image"]
        assert (len(given) if isinstance(given, list) else 0) == pictures


def test_a_call_with_a_later_timestep_is_kept() -> None:
    """Z-Image's first timestep is 0 and the others lie below 1: bounds hold for 0 to 1, not to 1000."""
    pipe = make_pipeline("sd")
    unet = next(x for x in find_callees(pipe) if x.component_name == "unet")
    listener = CallListener()
    latents = torch.zeros(2, 4, 8, 8)
    for step in (0.0, 0.5, 0.25):
        call = ComponentCall(unet, (latents, torch.full((2,), step)), {})
        if step == 0.0:
            listener.inside(DryCall(call), None)  # type: ignore[arg-type]
        listener.end(DryCall(call))
    [kept] = listener.calls["unet"]
    assert kept.args[1].tolist() == [0.5, 0.5]
    assert list_timesteps(kept.args[1]).values[-1] == 1.0
