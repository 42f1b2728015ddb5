"""Smaller sizes where they are allowed, and entries that a plan keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stopdown.app.display import Display
from stopdown.app.generate_command import GenerateOptions, generate
from stopdown.errors import StopdownError
from stopdown.memory.forecast import Fit
from stopdown.memory.smaller_requests import Size, find_largest, list_smaller
from stopdown.memory.strategies import Prediction, Strategy
from stopdown.pipelines.allowed_sizes import Grid
from stopdown.records import RunRecord
from stopdown.testing import save_pipeline

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
    assert record.memory is not None
    assert (record.memory.reduced, record.memory.size) == (record.reduced, (1, height, width))
    assert (record.memory.strategy, record.memory.limit_bytes) == (record.strategy, 500 * 2**10)
    assert 0 < record.memory.peak_bytes <= record.memory.limit_bytes
    with pytest.raises(StopdownError) as caught:
        generate_small(folder, tmp_path / "b.png", "500KiB")
    assert 'Add allow="smaller"' in str(caught.value)
    assert str(caught.value).startswith(
        "No strategy stays within 500 KiB on cpu in fp32: the smallest"
    )
