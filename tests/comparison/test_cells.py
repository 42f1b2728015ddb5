"""Cells of a comparison: stored, read back, and their pictures in a page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.comparisons import draw_clip
from stopdown.comparison.cells import (
    fail_cell,
    make_sheet,
    read_outcome,
    share_bytes,
    write_outcome,
)
from stopdown.errors import InputError


def test_a_finished_cell_that_was_changed_is_named(tmp_path: Path) -> None:
    """The message says what to remove; a cell as it was written comes back."""
    path = tmp_path / "cell.msgpack"
    write_outcome(fail_cell("bf16", "no memory"), path)
    assert read_outcome(path).cell.error == "no memory"
    content = path.read_bytes()
    for changed in (b"", content[:40], content.replace(b"precision", b"precisiom")):
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"cell\.msgpack can't be read: .*rm "):
            read_outcome(path)


def test_a_small_clip_is_kept_without_loss() -> None:
    """Every pixel of every frame comes back from the sheet."""
    frames = (draw_clip(4) * 255).round().astype(np.uint8)
    sheet = make_sheet(frames, 100_000)
    whole = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet.data))).convert("RGB"))
    for index, frame in enumerate(frames):
        y, x = (index // sheet.columns) * sheet.height, (index % sheet.columns) * sheet.width
        assert np.array_equal(whole[y : y + sheet.height, x : x + sheet.width], frame)


def test_a_large_clip_is_made_to_fit() -> None:
    """Noise that does not compress is made smaller until it fits; its frames stay in order."""
    frames = np.random.default_rng(0).integers(0, 256, (16, 96, 96, 3), np.uint8)
    sheet = make_sheet(frames, 12_000)
    assert len(base64.b64decode(sheet.data)) <= 12_000
    assert sheet.width < 96 or sheet.every > 1
    assert sheet.frames * sheet.every >= 16


def test_twenty_prompts_by_six_stay_below_thirty_megabytes() -> None:
    """All shares together, difference maps and base64 included, leave room for the page."""
    cells = 20 * 6
    pictures = cells * (share_bytes(cells) + share_bytes(cells) // 3)
    assert pictures * 4 / 3 < 28_000_000
