"""Weights that wait on disk: nothing of them outlives the process, and a full disk is a message."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import stopdown
from models import pipeline_calls
from stopdown.devices.device_choice import choose_device
from stopdown.devices.format_support import probe_formats
from stopdown.errors import OutputError, StopdownWarning
from stopdown.memory.offloader import Offloader, predict_run
from stopdown.memory.strategies import Strategy
from stopdown.memory.weight_stores import WeightStore
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.plans.planned_loader import decide, gather_facts, load_plan
from stopdown.records import MemoryPlan, Plan
from stopdown.sources.sources import resolve_source

REQUEST = Request(prompt="a cat", steps=2, height=32, width=32, frames=5)

posix = pytest.mark.skipif(os.name != "posix", reason="a file that is mapped stays where it is")


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file may grow over a size."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@posix
def test_waiting_weights_leave_no_file(tmp_path: Path) -> None:
    """What waits is mapped and has no name any more, so a kill leaves nothing of it; it comes back."""
    store = WeightStore("cpu", tmp_path)
    weights = [torch.randn(300), torch.zeros(0)]
    before = [weight.clone() for weight in weights]
    for weight in weights:
        store.store(weight)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert weights[0].untyped_storage().nbytes() == 0
    for weight, old in zip(weights, before, strict=True):
        store.load(weight)
        assert torch.equal(weight, old)
    store.close()
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_disk_without_room_for_weights_is_a_message(tmp_path: Path) -> None:
    """The room is taken before values are written into the mapping, which would end the process."""
    store, weight = WeightStore("cpu", tmp_path), torch.ones(1000)

    def keep() -> None:
        with limited_files(2000):
            store.store(weight)

    with pytest.raises(OutputError) as caught:
        keep()
    said = str(caught.value)
    assert said.startswith(f"Weights kept on disk need 4000 bytes in {tmp_path}")
    assert said.endswith(
        "File too large. On the CPU, weights that don't fit into `memory` are written to the "
        "folder for temporary files. So are weights that are large compared with the machine's "
        "memory. Free some space "
        "there, set TMPDIR to another disk, or give a larger `memory`."
    )
    assert caught.value.exit_code == 1
    store.close()
    assert torch.equal(weight, torch.ones(1000))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::stopdown.errors.StopdownWarning")
@pytest.mark.parametrize("placement", ["component", "block"])
def test_a_repair_finds_weights_wherever_they_wait(
    save_tiny: Callable[..., Path], placement: str, tmp_path: Path
) -> None:
    """A denoiser whose weights come and go is scaled, keeps its exponents, and makes the same frames."""
    source = resolve_source(save_tiny("cogvideox", overflow="transformer"))
    cpu = choose_device("cpu")
    decisions = Plan(
        source.name, components=decide(gather_facts(source), probe_formats(cpu), "fp16")
    )

    def run(place: str | None) -> torch.Tensor:
        memory = None if place is None else MemoryPlan()
        pipe = load_plan(source, dataclasses.replace(decisions, memory=memory), cpu).pipe
        pipe.set_progress_bar_config(disable=True)
        arguments = {**build_arguments(pipe, REQUEST), "output_type": "pt"}
        with contextlib.ExitStack() as stack:
            if place is not None:
                fit = predict_run(pipe, arguments, steps=2, fused=True)
                taken = next(x for x in fit.predictions if x.strategy == Strategy(placement=place))
                offloader = Offloader(pipe, taken, [], fit.strays, store=tmp_path)
                stack.enter_context(offloader)
            guarded = stack.enter_context(stopdown.guard(pipe))
            frames = pipe(**arguments).frames
        assert [one.action for one in guarded.record.repairs] == ["rescaled"]
        return frames

    assert torch.equal(run(placement), run(None))


@pytest.mark.thorough
@pytest.mark.parametrize(("placement", "is_guarded"), [("block", False), ("block", True)])
def test_calls_under_a_plan_while_weights_come_and_go(
    save_tiny: Callable[..., Path], placement: str, is_guarded: bool, tmp_path: Path
) -> None:
    """Ordinary calls are not refused, nor taken for those of rewritten weights; the frames are the same."""
    source = resolve_source(save_tiny("cogvideox", overflow="transformer"))
    cpu = choose_device("cpu")
    wide, narrow = (
        Plan(source.name, components=decide(gather_facts(source), probe_formats(cpu), dtype))
        for dtype in ("fp32", "fp16")
    )
    pipe = load_plan(source, wide, cpu).pipe
    pipe.set_progress_bar_config(disable=True)
    plan = measure_plan(pipe, run=lambda: pipe(**build_arguments(pipe, REQUEST)))
    assert any(x.in_force.exponents for x in plan.components)

    def run(place: str | None) -> list[torch.Tensor]:
        pipe = load_plan(source, narrow, cpu).pipe
        pipe.set_progress_bar_config(disable=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                stopdown.guard(pipe, plan) if is_guarded else apply_plan(pipe, plan)
            )
            if place is not None:
                arguments = build_arguments(pipe, REQUEST)
                fit = predict_run(pipe, arguments, steps=2, fused=True)
                taken = next(x for x in fit.predictions if x.strategy == Strategy(placement=place))
                stack.enter_context(Offloader(pipe, taken, [], fit.strays, store=tmp_path))
            given = [{**build_arguments(pipe, REQUEST), "output_type": "pt"} for _ in range(2)]
            return [pipe(**x).frames for x in given]

    with warnings.catch_warnings():
        warnings.simplefilter("error", StopdownWarning)
        assert all(map(torch.equal, run(placement), run(None)))


def test_weights_of_inference_mode_are_changed_where_they_wait(tmp_path: Path) -> None:
    """PyTorch counts no writes of tensors that were made in inference mode; the store has them anyway."""
    with torch.inference_mode():
        module, store = torch.nn.Linear(4, 4), WeightStore("cpu", tmp_path)
        module.weight.fill_(1)
        store.store(module.weight)
        with store.opened(module):
            module.weight.mul_(2)
        store.close()
        assert torch.equal(module.weight, torch.full((4, 4), 2.0))


@pytest.mark.usefixtures("each_device")
def test_weights_that_wait_in_their_file_go_back_there(
    save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """A store that closes leaves them without memory, and the next one reads them again."""
    source, cpu = resolve_source(save_tiny("sd")), choose_device("cpu")
    decisions = Plan(
        source.name, components=decide(gather_facts(source), probe_formats(cpu), "fp32")
    )
    unet = load_plan(source, dataclasses.replace(decisions, memory=MemoryPlan()), cpu).pipe.unet
    right = load_plan(source, decisions, cpu).pipe.unet
    for _ in range(2):
        store = WeightStore(pipeline_calls.where, tmp_path)
        for weight, wanted in zip(unet.parameters(), right.parameters(), strict=True):
            store.store(weight)
            store.load(weight)
            assert torch.equal(weight.cpu(), wanted)
        store.close()
        assert {x.untyped_storage().nbytes() for x in unet.parameters()} == {0}
        assert {x.device.type for x in unet.parameters()} == {"cpu"}
        assert all("whose values are stored elsewhere" in repr(x) for x in unet.parameters())
        assert list(tmp_path.iterdir()) == []
