"""Smaller sizes where they are allowed, and entries that a plan keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch._subclasses.fake_tensor import FakeTensorMode

from stopdown.app.display import Display
from stopdown.app.generate_command import GenerateOptions, generate
from stopdown.devices.device_choice import choose_device
from stopdown.errors import StopdownError
from stopdown.memory.allocation_tracker import StorageTracker
from stopdown.memory.forecast import USABLE_SHARE, Fit
from stopdown.memory.smaller_requests import Size, find_largest_size, list_smaller
from stopdown.memory.strategies import Prediction, Strategy
from stopdown.pipelines.allowed_sizes import Grid
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.requests import Request
from stopdown.plans.plan_choice import choose_plan
from stopdown.plans.planned_loader import load_plan
from stopdown.records import RunRecord
from stopdown.runtime import memory_limits
from stopdown.sources.sources import resolve_source
from stopdown.testing import make_pipeline, save_pipeline

pytestmark = pytest.mark.usefixtures("known_speed")

VIDEO = Grid(16, 8, "")


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

    found = find_largest_size(sizes, predict, 45)
    assert found is not None
    assert found[0] == Size(1, 40, 40)
    assert len(asked) <= 3
    assert find_largest_size(sizes, predict, 5) is None


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


def test_pictures_that_are_made_at_a_time_are_bounded_together() -> None:
    """Four of a prompt take four times the activations of one, which were taken for those of one."""
    decisions = (SimpleNamespace(precision="fp16"),)
    loaded: Any = SimpleNamespace(pipe=make_pipeline("sd"), decisions=decisions)
    sizes, cpu = {"height": 64, "width": 64}, choose_device("cpu")

    def bound(**arguments: Any) -> int:
        request = Request("a", **sizes, arguments=arguments)
        return memory_limits._bound_run(loaded, request, cpu)

    more = 3 * 64 * 64 * memory_limits.DECODED_VALUES * 2
    assert bound(num_images_per_prompt=4) - bound() == more
    assert bound(prompt=["a", "b"], num_images_per_prompt=2) - bound() == more
    loaded.decisions = (*decisions, SimpleNamespace(precision="fp32"))
    assert bound(num_images_per_prompt=4) - bound() == 2 * more


DECODERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "AutoencoderKL": (
        {
            "block_out_channels": (128, 256, 512, 512),
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "layers_per_block": 2,
        },
        (1, 4, 32, 32),
    ),
    "AutoencoderKLQwenImage": ({}, (1, 16, 1, 32, 32)),
}


@pytest.mark.parametrize("name", list(DECODERS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_decoder_at_full_size_stays_below_its_bound(name: str, dtype: torch.dtype) -> None:
    """Activations of 128 channels, in 16 bits and in fp32, which were bounded as if they had 16 bits."""
    import diffusers

    config, shape = DECODERS[name]
    kind, before = getattr(diffusers, name), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode(), torch.no_grad():
            vae, tracker = kind(**config).eval(), StorageTracker(on_cpu=False)
            tracker.ignore(vae.parameters())
            with tracker:
                picture = vae.decode(torch.empty(shape)).sample
    finally:
        torch.set_default_dtype(before)
    pixels = picture.shape[-1] * picture.shape[-2]
    assert tracker.peak_bytes <= pixels * memory_limits.DECODED_VALUES * dtype.itemsize


@pytest.mark.thorough
def test_what_fits_at_no_strategy_is_refused(folder: Path, tmp_path: Path) -> None:
    """The picture is not made smaller unasked: the refusal names what would do."""
    with pytest.raises(StopdownError) as caught:
        generate_small(folder, tmp_path / "b.png", "500KiB")
    assert "Use a smaller `height` and `width`" in str(caught.value)
    assert str(caught.value).startswith(
        "No strategy stays within 500 KiB on cpu in fp32: the smallest"
    )


def test_a_plan_is_offloaded_as_much_as_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its watch asks weights for their device, which was taken for reading: all stayed on the device."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    source, cpu = complete_source(resolve_source(folder)), choose_device("cpu")
    request = Request(prompt="a", steps=2, height=32, width=32)

    def predict(precision: str) -> dict[str, int]:
        loaded = load_plan(source, choose_plan(source, precision, cpu), cpu)
        formats = {x.precision for x in loaded.decisions}
        fit = memory_limits.predict_pipe(loaded.pipe, formats, request, cpu)
        assert not any(any(found.values()) for found in fit.strays.values())
        return {x.strategy.name: x.peak_bytes for x in fit.predictions}

    assert predict("fp16")["block"] < predict("fp32")["block"]


@pytest.mark.thorough
def test_what_has_no_dry_run_is_bounded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiDream's code reads values as NumPy: a run within a limit was refused, whatever the limit."""
    forward = UNet2DConditionModel.forward

    def read(module: Any, sample: torch.Tensor, *given: Any, **more: Any) -> Any:
        sample.cpu().numpy()
        return forward(module, sample, *given, **more)

    generate_small(folder, tmp_path / "a.png", "none")
    monkeypatch.setattr(UNet2DConditionModel, "forward", read)
    heard = Heard()
    record = generate_small(folder, tmp_path / "b.png", "2GiB", heard)
    assert record.memory.strategy == "resident"
    most = record.memory.peak_bytes
    assert most <= 2**31
    assert any("Its memory can't be forecast" in text for text in heard.texts)
    limit = f"{int((most - 1) / USABLE_SHARE)}B"
    smaller = generate_small(folder, tmp_path / "smaller.png", limit).memory
    assert (smaller.strategy, smaller.peak_bytes < most) == ("component", True)
    for name in ("b.png", "smaller.png"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "a.png").read_bytes()
    with pytest.raises(StopdownError, match=r"\.numpy\(\)"):
        generate_small(folder, tmp_path / "c.png", "200MiB")


@pytest.mark.thorough
def test_a_host_without_room_for_the_weights_reads_them_at_the_speed_of_a_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run counts the disk as `fit` does: what moves blocks at each step costs twenty times as much."""
    pipe = make_pipeline("sd", dtype=torch.float32)
    request = Request(prompt="a", steps=4, height=64, width=64)

    def predict(host_bytes: int) -> Fit:
        monkeypatch.setattr(memory_limits, "find_host_bytes", lambda: host_bytes)
        return memory_limits.predict_pipe(pipe, {"fp32"}, request, choose_device("cpu"))

    ample, small = predict(2**40), predict(2**10)
    assert ample.speed is not None
    assert small.speed is not None
    assert (ample.speed.link_bytes_per_s, small.speed.link_bytes_per_s) == (1e10, 5e8)
    moved = {x.strategy.name: x for x in small.predictions}["block"]
    before = {x.strategy.name: x for x in ample.predictions}["block"]
    assert moved.seconds - before.seconds == pytest.approx(moved.moved_bytes * (1 / 5e8 - 1 / 1e10))
