"""`stopdown.load`: an ordinary pipeline, each component in its precision, quiet while it loads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stopdown
from models.pipeline_calls import call_pipeline
from models.single_file_layout import save_single_file
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.plans.precision import parse_request, write_request
from stopdown.records import Plan
from stopdown.runtime.guard import guard
from stopdown.sources.library_messages import quiet_libraries

SaveTiny = Callable[..., Path]


@pytest.mark.usefixtures("each_device")
def test_a_loaded_pipeline_is_that_of_plain_diffusers(save_tiny: SaveTiny) -> None:
    """In fp32 its class and its pixels are those of `from_pretrained`."""
    import diffusers

    folder = save_tiny("cogview3plus")
    pipe = stopdown.load(folder, precision="fp32", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    plain = diffusers.CogView3PlusPipeline.from_pretrained(folder, dtype=torch.float32)
    plain.set_progress_bar_config(disable=True)
    assert type(pipe) is type(plain)
    np.testing.assert_array_equal(
        call_pipeline(pipe, "cogview3plus"), call_pipeline(plain, "cogview3plus")
    )


@pytest.mark.usefixtures("each_device")
def test_mixed_precisions_run_and_are_told(save_tiny: SaveTiny) -> None:
    """The pipeline runs as it is, watched or not, and its decisions stand on it."""
    precision = "text_encoder=fp32,transformer=bf16,vae=fp32"
    pipe = stopdown.load(save_tiny("cogvideox"), precision=precision, device="cpu", guard=False)
    pipe.set_progress_bar_config(disable=True)
    assert {d.component: d.precision for d in pipe.stopdown_decisions} == {
        "text_encoder": "fp32",
        "vae.encode": "fp32",
        "vae.decode": "fp32",
        "transformer": "bf16",
    }
    alone = call_pipeline(pipe, "cogvideox")
    with assert_untouched(pipe), guard(pipe, on_fault="raise") as handle:
        np.testing.assert_array_equal(call_pipeline(pipe, "cogvideox"), alone)
    assert np.isfinite(alone).all()
    (transformer,) = (call for call in handle.record.calls if call.component == "transformer")
    assert transformer.precisions == ("bf16",)


@pytest.mark.usefixtures("each_device")
def test_a_single_file_is_loaded_with_its_configs(save_tiny: SaveTiny, tmp_path: Path) -> None:
    """Decisions come from the file's header and the folder of configs."""
    file = save_single_file(tmp_path / "tiny.safetensors")
    config = save_tiny("sd", "fp16")
    pipe = stopdown.load(file, precision="unet=bf16", device="cpu", config=config)
    decided = {d.component: d for d in pipe.stopdown_decisions}
    assert (decided["unet"].precision, decided["unet"].stored) == ("bf16", "fp16")
    assert pipe.unet.dtype == torch.bfloat16


def test_noise_is_dropped_and_the_rest_passes() -> None:
    """Only sentences of the list are dropped, only inside the block, nested or not."""
    import diffusers  # noqa: F401

    logger = logging.getLogger("diffusers.models.modeling_utils")
    handler = logging.getLogger("diffusers").handlers[0]
    filters = list(handler.filters)
    records: list[str] = []
    handler.addFilter(keep := lambda record: records.append(record.getMessage()) or False)
    try:
        with quiet_libraries():
            handler.removeFilter(keep)
            handler.addFilter(keep)  # behind the filter of the block
            with quiet_libraries():
                logger.warning("There are modules in X that should be kept in float32: [].")
            logger.warning("Your input was truncated.")
        logger.warning("There are modules in Y that should be kept in float32: [].")
    finally:
        handler.removeFilter(keep)
    assert records == [
        "Your input was truncated.",
        "There are modules in Y that should be kept in float32: [].",
    ]
    assert handler.filters == filters


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("transformer=bf16", "transformer=bf16"),
        (Path("plan.json"), "plan.json"),
        (torch.float16, "fp16"),
        ({"transformer": torch.bfloat16, "vae.decode": "fp32"}, "transformer=bf16,vae.decode=fp32"),
        ({}, "auto"),
    ],
)
def test_a_precision_may_be_a_dtype(asked: Any, text: str) -> None:
    """Names, plans, dtypes and either by component say the same."""
    assert write_request(asked) == text
    parse_request(text)


@pytest.mark.parametrize("asked", [torch.int8, 16, None, {"vae": 16}, ["fp16"]])
def test_what_is_no_precision_is_refused(asked: Any) -> None:
    """Integers and lists get a message that shows what is taken."""
    with pytest.raises(
        stopdown.errors.OptionError, match="neither a name nor a floating-point dtype"
    ):
        write_request(asked)


@pytest.mark.usefixtures("each_device")
def test_a_dtype_and_parts_reach_the_pipeline(save_tiny: SaveTiny) -> None:
    """As in Diffusers a scheduler can be given, and a part left out; the dtype is what was asked for."""
    import diffusers

    scheduler = diffusers.DDIMScheduler()
    pipe = stopdown.load(
        save_tiny("sd"),
        precision=torch.bfloat16,
        device=torch.device("cpu"),
        scheduler=scheduler,
        feature_extractor=None,
    )
    assert pipe.scheduler is scheduler
    assert pipe.feature_extractor is None
    assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "said"),
    [("torch_dtype", "precision="), ("nothing", "Leave it out"), ("unet", "pipe.unet")],
)
def test_a_part_that_cannot_be_taken_is_refused(save_tiny: SaveTiny, name: str, said: str) -> None:
    """Another name, Diffusers' own dtype, and a model whose precision nobody decided: each has its way."""
    with pytest.raises(stopdown.errors.OptionError) as raised:
        stopdown.load(save_tiny("sd"), device="cpu", **{name: torch.float16})
    assert said in str(raised.value)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::stopdown.errors.StopdownWarning")
def test_a_loaded_pipeline_is_guarded(tmp_path: Path) -> None:
    """Faults are repaired without another line; another guard takes its place, and gives it back."""
    folder = testing.save_pipeline("sd", tmp_path / "m", overflow="unet")
    pipe = stopdown.load(folder, precision="fp16-plain", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    with stopdown.guard(pipe) as guarded:
        assert np.isfinite(call_pipeline(pipe, "sd")).all()
    assert [x.component for x in guarded.repairs] == ["unet"]
    own = pipe.stopdown_guard
    assert (guarded.is_on, own.is_on, own.repairs) == (False, True, ())
    assert np.isfinite(call_pipeline(pipe, "sd")).all()
    assert [x.component for x in own.record.repairs] == ["unet"]


def test_a_pipeline_is_loaded_without_a_guard(save_tiny: SaveTiny) -> None:
    """The same values, and no handle."""
    pipes = [
        stopdown.load(save_tiny("sd"), precision="fp32", device="cpu", guard=guarded)
        for guarded in (True, False)
    ]
    assert not hasattr(pipes[1], "stopdown_guard")
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    np.testing.assert_array_equal(*(call_pipeline(pipe, "sd") for pipe in pipes))


@pytest.fixture(scope="module")
def planned(save_tiny: SaveTiny) -> tuple[Path, Plan]:
    """A tiny Stable Diffusion and its plan."""
    folder = save_tiny("sd")
    return folder, stopdown.make_plan(folder)


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:.*not certified:stopdown.StopdownWarning")  # random latents
@pytest.mark.parametrize("by_path", [True, False])
def test_a_pipeline_is_loaded_by_a_plan(
    planned: tuple[Path, Plan], tmp_path: Path, by_path: bool
) -> None:
    """Given as itself or as the path of its file; what is done to a guarded pipeline goes on."""
    folder, plan = planned
    given = stopdown.write_plan(plan, tmp_path / "plan.json") if by_path else plan
    pipe = stopdown.load(folder, precision=given, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    assert pipe.unet.dtype == torch.float16
    assert np.isfinite(call_pipeline(pipe, "sd")).all()
    assert pipe.stopdown_guard.plan.seal == plan.seal
    with stopdown.guard(pipe) as guarded:
        assert guarded.plan.seal == plan.seal
        call_pipeline(pipe, "sd")
    assert guarded.repairs == pipe.stopdown_guard.repairs == ()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* not certified")
def test_a_guarded_pipeline_is_planned_checked_and_compared(save_tiny: SaveTiny) -> None:
    """The guard of `load` is in nobody's way: plans are made, put on and taken off below it."""
    pipe = stopdown.load(save_tiny("sd"), precision="fp32", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    expected = call_pipeline(pipe, "sd")
    plan = stopdown.make_plan(pipe)
    with stopdown.apply_plan(pipe, plan):
        assert np.isfinite(call_pipeline(pipe, "sd")).all()
    np.testing.assert_array_equal(call_pipeline(pipe, "sd"), expected)
    stopdown.check(pipe, device="v100")
    with stopdown.fp16(pipe, "a", height=32, width=32, num_inference_steps=1) as guarded:
        call_pipeline(pipe, "sd")
    assert guarded.repairs == ()
    np.testing.assert_array_equal(call_pipeline(pipe, "sd"), expected)
    assert pipe.stopdown_guard.repairs == ()
