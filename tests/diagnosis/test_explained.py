"""What `explain` takes: exceptions, logs, streams, pictures and clips."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.failure_messages import CAST
from stopdown.diagnosis import explained, texts
from stopdown.diagnosis.explained import explain, explain_stream
from stopdown.diagnosis.knowledge import UNKNOWN
from stopdown.errors import InputError
from stopdown.frames import media
from stopdown.frames.media import write_media


def test_an_exception_is_read_with_its_traceback() -> None:
    """What torch really raises is recognised, and both dtypes are named."""
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float16)
    found = explain(caught.value)
    assert found.fault == "dtype-mismatch"
    assert "fp32" in found.title
    assert "fp16" in found.title


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        (np.zeros((4, 16, 16, 3), np.uint8), "unattributed"),
        (np.full((4, 16, 16, 3), 128, np.uint8), "positions"),
        (np.random.default_rng(0).integers(0, 255, (9, 64, 64, 3), np.uint8), "fp32-module"),
    ],
)
def test_a_video_is_looked_at(tmp_path: Path, frames: np.ndarray[Any, Any], fault: str) -> None:
    """Black, grey and noisy frames give what they can come from."""
    write_media(f"{tmp_path}/frames/", frames, fps=8)
    assert explain(tmp_path / "frames").fault == fault


def test_a_healthy_picture_has_no_fault(tmp_path: Path) -> None:
    """Smooth and uneven frames that move are called healthy, and no more than that."""
    ramp = np.linspace(20, 230, 16)
    frame = np.stack([np.add.outer(ramp, ramp) / 2] * 3, axis=-1)
    frames = np.stack([np.roll(frame, 4 * i, axis=1) for i in range(4)]).astype(np.uint8)
    write_media(f"{tmp_path}/frames/", frames, fps=8)
    assert explain(tmp_path / "frames").fault == "none"


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    """The message names the file."""
    with pytest.raises(InputError, match=r"run\.log can't be read: No such file"):
        explain(tmp_path / "run.log")


def test_of_a_long_clip_the_beginning_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more frames are decoded than the limit, and the answer says so; a shorter clip says nothing."""
    write_media(f"{tmp_path}/frames/", np.zeros((4, 16, 16, 3), np.uint8))
    assert "Only its first" not in explain(tmp_path / "frames").why
    monkeypatch.setattr(explained, "MOST_FRAMES", 3)
    assert explain(tmp_path / "frames").why.endswith("Only its first 3 frames were looked at.")
    monkeypatch.setattr(media, "MOST_CLIP_BYTES", 2 * 16 * 16 * 3)
    assert explain(tmp_path / "frames").why.endswith("Only its first 2 frames were looked at.")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A named pipe that nobody writes to, and a device, are refused before they are opened."""
    os.mkfifo(tmp_path / "pipe.log")
    for path in (tmp_path / "pipe.log", Path("/dev/zero")):
        with pytest.raises(InputError, match=r"can't be read: it isn't a file\. .*explain -$"):
            explain(path)


class _Endless(io.RawIOBase):
    """A stream of lines that never ends, and the bytes that were taken from it."""

    taken = 0

    def read(self, size: int = -1) -> bytes:
        assert size > 0
        self.taken += size
        return (b"step 1 of 2\n" * (size // 12 + 1))[:size]


def test_a_stream_without_end_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is piped in is read piece by piece and no further than the limit."""
    monkeypatch.setattr(explained, "MOST_BYTES", 2_000)
    monkeypatch.setattr(explained, "MOST_STREAM_BYTES", 10_000)
    endless = _Endless()
    assert explain_stream(endless).fault == UNKNOWN  # type: ignore[arg-type]
    assert endless.taken <= 11_000


def test_of_a_long_stream_and_file_both_ends_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message at the end of what is longer than the limit is found, and gets no false number."""
    monkeypatch.setattr(explained, "MOST_BYTES", 2_000)
    monkeypatch.setattr(texts, "MOST_BYTES", 2_000)
    lines = "".join(f"{'x' * (i % 90)}\n" for i in range(200))
    text = f"{lines}{CAST}\n"
    (tmp_path / "run.log").write_text(text)
    for found in (
        explain(tmp_path / "run.log"),
        explain(text),
        explain_stream(io.BytesIO(text.encode())),
    ):
        assert (found.fault, found.evidence[0].line) == ("unattributed", 0)


def test_bytes_that_are_no_text_are_read_past(tmp_path: Path) -> None:
    """A log with bytes that are not UTF-8 is read, from a file and from a pipe."""
    content = b"\xff\xfe caf\xe9\n" + CAST.encode()
    (tmp_path / "run.log").write_bytes(content)
    assert explain(tmp_path / "run.log").fault == "unattributed"
    assert explain_stream(io.BytesIO(content)).fault == "unattributed"
