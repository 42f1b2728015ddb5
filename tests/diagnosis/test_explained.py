"""What `explain` takes: exceptions, logs, streams, pictures and clips."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models.failure_messages import CAST, MESSAGES
from stopdown.app import cli
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
    with pytest.raises(InputError, match=r"run\.log cannot be read: No such file"):
        explain(tmp_path / "run.log")


@pytest.mark.parametrize("name", ["one.png", "one.jpg", "one.webp", "one.bmp", "one.tif"])
def test_the_command_looks_at_a_picture(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A black picture of every kind is called black through the command line."""
    Image.new("RGB", (32, 32)).save(tmp_path / name)
    code, page, error = _run(capsys, "explain", str(tmp_path / name))
    assert (code, error) == (0, "")
    assert page.startswith(f"{name}: the picture is black.\n→ Black without NaN")
    assert page.endswith("Kind unattributed\n")


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif", "frames/"])
def test_the_command_looks_at_a_clip(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A black video, gif or folder of frames is called black through the command line."""
    write_media(f"{tmp_path}/{name}", np.zeros((4, 32, 32, 3), np.uint8))
    code, page, error = _run(capsys, "explain", f"{tmp_path}/{name}")
    assert (code, error) == (0, "")
    assert "the picture is black" in page


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
        with pytest.raises(InputError, match=r"cannot be read: it is no file\. .*explain -$"):
            explain(path)


def test_a_message_longer_than_a_name_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """A message of 400 characters on one line is not looked for as a file."""
    code, page, _ = _run(capsys, "explain", f"{MESSAGES[1][0]}{'!' * 400}")
    assert (code, page.splitlines()[-1]) == (0, "Kind dtype-mismatch")


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


class _Failing(io.RawIOBase):
    """A stream that the system refuses to read."""

    def read(self, size: int = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_standard_input_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says why, and how else to give a log."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=_Failing(), isatty=lambda: False))
    code, _, error = _run(capsys, "explain", "-")
    assert (code, "Standard input cannot be read: Input/output error." in error) == (2, True)


def test_control_sequences_of_a_log_are_not_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Titles, colours, cursor movements and reversed text in a log do not reach the terminal."""
    hidden = "\x1b]0;owned\x07\x1b[2J\x1b[31m[red]\u202e\x9b2J\x08"
    code, page, _ = _run(capsys, "explain", f"{hidden}{CAST}\x1b[0m")
    assert code == 0
    assert CAST in page
    assert "[red]" in page
    assert "owned" not in page
    assert not set(page) & set("\x1b\x07\x08\x9b\u202e")


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    streams = capsys.readouterr()
    return int(left.value.code or 0), streams.out, streams.err


def test_the_command_answers_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """`stopdown explain TEXT` prints class, evidence and remedy; with --json the record."""
    code, page, _ = _run(capsys, "explain", MESSAGES[1][0])
    assert code == 0
    first, second, *_, last = page.splitlines()
    assert first == "Two operands of one operation have different dtypes: fp32 and fp16."
    assert second.startswith(
        "→ Run the model with Stopdown, which matches the dtypes for you: stopdown"
    )
    assert last == "Kind dtype-mismatch"
    code, text, _ = _run(capsys, "explain", MESSAGES[1][0], "--json")
    assert json.loads(text)["fault"] == "dtype-mismatch"


def test_the_command_reads_a_log_and_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file by name, and `-` for what is piped in."""
    log = tmp_path / "run.log"
    log.write_text(f"step 1\n{CAST}\n")
    assert _run(capsys, "explain", str(log))[0] == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MESSAGES[2][0].encode())))
    assert "dtype-mismatch" in _run(capsys, "explain", "-")[1]


def test_the_command_says_unknown_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not known is exit code 1, and a file that is not there is 2."""
    code, page, _ = _run(capsys, "explain", "KeyError: 'unet'")
    assert (code, page.splitlines()[-1]) == (1, "Kind unknown")
    code, page, error = _run(capsys, "explain", "missing.log")
    assert (code, page) == (2, "")
    assert "There is no file missing.log" in error
