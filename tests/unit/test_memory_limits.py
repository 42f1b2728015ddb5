"""Smaller sizes where they are allowed, and entries that a plan keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stopdown.app.display import Display
from stopdown.app.generate_command import GenerateOptions, generate
from stopdown.app.memory_command import plan_memory
from stopdown.app.plan_command import PlanOptions
from stopdown.errors import StopdownError
from stopdown.memory.forecast import Fit
from stopdown.memory.smaller_requests import Size, find_largest, list_smaller
from stopdown.memory.strategies import Prediction, Strategy
from stopdown.memory.weight_stores import WeightStore
from stopdown.pipelines.allowed_sizes import Grid
from stopdown.pipelines.components import find_components
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.requests import Request
from stopdown.pipelines.sources import fingerprint, resolve_source
from stopdown.plans.out_of_memory_history import MOST_KEPT, add_out_of_memory, find_failed
from stopdown.plans.plan_files import read_class_versions, read_plan, seal_plan, write_plan
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, OutOfMemory, Plan, RunRecord
from stopdown.testing import save_pipeline

pytestmark = pytest.mark.usefixtures("known_speed")

VIDEO = Grid(16, 8, "")
OUT_OF_MEMORY = OutOfMemory("cpu", 1000, "64x64", 4096, ("resident",), "component")


class Heard(Display):
    """A display that keeps what is announced."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def progress(self, stage: str, what: str, done: int, total: int) -> None:
        """Nothing."""

    def announce(self, text: str) -> None:
        self.texts.append(text)


def test_smaller_sizes_fit_the_grid() -> None:
    """Frames go first and stay a multiple plus one, sides a multiple; the ratio is about kept."""
    found = list_smaller(Size(49, 480, 720), VIDEO)
    assert [str(one) for one in found[:3]] == [
        "33 frames of 480x720",
        "25 frames of 480x720",
        "25 frames of 352x528",
    ]
    for one in found:
        assert (one.frames - 1) % 8 == one.height % 16 == one.width % 16 == 0
    pixels = [one.frames * one.height * one.width for one in found]
    assert pixels == sorted(pixels, reverse=True)


def test_what_a_model_cannot_make_is_not_tried() -> None:
    """One size only: fewer frames; a video that was given: smaller sides; neither: nothing."""
    only = Grid(16, 8, "", only=(480, 720))
    assert {(one.height, one.width) for one in list_smaller(Size(49, 480, 720), only)} == {
        (480, 720)
    }
    kept = list_smaller(Size(49, 480, 720), VIDEO, keeps_frames=True)
    assert {one.frames for one in kept} == {49}
    assert list_smaller(Size(1, 480, 720), only) == []


def test_the_largest_that_fits_is_found_in_few_predictions() -> None:
    """Of six sizes the largest within the limit is found after three at most, or none is."""
    sizes = [Size(1, side, side) for side in (60, 50, 40, 30, 20, 10)]
    asked: list[Size] = []

    def predict(size: Size) -> Fit:
        asked.append(size)
        return Fit((Prediction(Strategy(), size.height, "", 0, 0),))

    found = find_largest(sizes, predict, 45)
    assert found is not None
    assert found[0] == Size(1, 40, 40)
    assert len(asked) <= 3
    assert find_largest(sizes, predict, 5) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline("sd", tmp_path_factory.mktemp("sd") / "m", dtype=torch.float32)


def generate_small(
    folder: Path, output: Path, memory: str, display: Heard | None = None, **options: Any
) -> RunRecord:
    sizes = {"steps": 1, "height": 64, "width": 64, "precision": "fp32", **options}
    return generate(
        GenerateOptions(source=str(folder), prompt="a", output=str(output), memory=memory, **sizes),
        display,
    )


def test_a_smaller_picture_only_when_allowed(folder: Path, tmp_path: Path) -> None:
    """What fits at no size asked for is made smaller with --allow smaller, said and recorded; refused
    without."""
    heard = Heard()
    record = generate_small(folder, tmp_path / "a.png", "500KiB", heard, allow=("smaller",))
    assert record.reduced is not None
    assert record.reduced.asked == "64x64"
    height, width = np.asarray(Image.open(tmp_path / "a.png")).shape[:2]
    assert record.reduced.made == f"{height}x{width}"
    assert height < 64
    said = f"No strategy stays within 500 KiB at 64x64; {height}x{width} is made instead"
    assert record.reduced.reason.startswith(said)
    assert record.reduced.reason in heard.texts
    with pytest.raises(StopdownError) as caught:
        generate_small(folder, tmp_path / "b.png", "500KiB")
    assert 'Add allow="smaller"' in str(caught.value)


def test_plan_memory_shrinks_what_may_be_smaller(folder: Path) -> None:
    """The table is that of the smaller size, and the first reason says so."""
    options = PlanOptions(
        source=str(folder), device="cpu", memory="500KiB", allow=("smaller",), precision="fp32"
    )
    found = plan_memory(options, Request(height=64, width=64), Heard())
    assert found.reduced is not None
    assert found.reasons[0] == found.reduced.reason
    assert found.chosen
    assert f"{found.request['height']}x{found.request['width']}" == found.reduced.made


def make_fp32_plan(folder: Path) -> Plan:
    """A plan that leaves every component in fp32: what it teaches about memory is all that counts."""
    source = resolve_source(str(folder))
    pipe = load_pipeline(source, torch_dtypes=torch.float32)
    entries = tuple(
        ComponentPlan(name, type(part).__name__, sample_weights(part), "fp32", reasons=("Small.",))
        for name, part in find_components(pipe).items()
    )
    return seal_plan(
        Plan(
            source=str(folder),
            fingerprint=fingerprint(source),
            pipeline=type(pipe).__name__,
            precision="fp16",
            versions=read_class_versions(),
            components=entries,
            prompts=(),
            steps=1,
            device="cpu",
            elapsed_s=0.0,
        )
    )


def run_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first call of the UNet run out of memory."""
    stand, left = (
        WeightStore.stand,
        [torch.OutOfMemoryError("out of memory: tried to allocate 1 GiB")],
    )

    def fail(self: WeightStore, component: str, *rest: Any) -> Any:
        if component == "unet" and left:
            raise left.pop()
        return stand(self, component, *rest)

    monkeypatch.setattr(WeightStore, "stand", fail)


@pytest.mark.usefixtures("each_device")
def test_the_next_run_begins_with_what_worked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stepped down writes it into its plan; the next one does not try what failed."""
    path = tmp_path / "plan.json"
    write_plan(make_fp32_plan(folder), path)
    options = {"precision": str(path), "keep_repairs": True}
    with monkeypatch.context() as faulty:
        run_out_once(faulty)
        first = generate_small(folder, tmp_path / "a.png", "1GiB", **options)
    assert [one.component for one in first.steps_down] == ["unet"]
    assert first.updated_plan == str(path)
    entry = read_plan(path).out_of_memory[0]
    assert (entry.failed, entry.worked) == ((first.steps_down[0].before,), first.strategy)
    heard = Heard()
    second = generate_small(folder, tmp_path / "b.png", "1GiB", heard, **options)
    assert second.strategy != first.steps_down[0].before
    assert second.steps_down == ()
    assert heard.texts == [
        "Not used, because the plan has recorded that they ran out of memory: "
        f"{first.steps_down[0].before}."
    ]


@pytest.mark.parametrize(
    ("device", "limit", "pixels", "expected"),
    [
        ("cpu", 1000, 4096, ("resident",)),
        ("cpu", 900, 9000, ("resident",)),
        ("cpu", 1001, 4096, ()),
        ("cpu", 1000, 4095, ()),
        ("cuda:0", 1000, 4096, ()),
    ],
)
def test_where_running_out_of_memory_counts_again(
    device: str, limit: int, pixels: int, expected: tuple[str, ...]
) -> None:
    """A entry counts on its device, within its limit and from its size on, and nowhere else."""
    plan = dataclasses.replace(EMPTY, out_of_memory=(OUT_OF_MEMORY,))
    assert find_failed(plan, device, limit, pixels) == expected
    assert find_failed(None, device, limit, pixels) == ()


EMPTY = Plan("m", "", "P", "fp16", {}, (), (), 4, "cpu", 0.0)


def test_what_ran_out_of_memory_is_kept_short_and_sealed() -> None:
    """A entry that is learnt twice counts once, the oldest goes, and the file fits its seal."""
    plan = EMPTY
    for limit in range(MOST_KEPT + 2):
        plan = add_out_of_memory(plan, dataclasses.replace(OUT_OF_MEMORY, limit_bytes=limit))
    plan = add_out_of_memory(plan, plan.out_of_memory[3])
    assert len(plan.out_of_memory) == MOST_KEPT
    assert plan.out_of_memory[0].limit_bytes == 2
    assert plan.seal == seal_plan(plan).seal
