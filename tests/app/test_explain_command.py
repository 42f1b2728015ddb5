"""stopdown explain: a message, a log, a picture or a clip on the command line."""

from __future__ import annotations

import errno
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from models.command_runs import run_line
from models.failure_messages import CAST, MESSAGES
from stopdown.frames.media import write_media

TITLE = "Two operands of one operation have different dtypes"


@pytest.mark.parametrize("name", ["one.png", "one.jpg", "one.webp", "one.bmp", "one.tif"])
def test_the_command_looks_at_a_picture(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A black picture of every kind is called black through the command line."""
    Image.new("RGB", (32, 32)).save(tmp_path / name)
    code, page, error = run_line(capsys, "explain", str(tmp_path / name))
    assert (code, error) == (0, "")
    assert page.startswith(f"{name}: the picture is black.\n→ Run it again with --precision")
    assert "unattributed" not in page  # a word for programs, in the JSON
    found = run_line(capsys, "explain", str(tmp_path / name), "--json")[1]
    assert json.loads(found)["fault"] == "unattributed"


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif", "frames/"])
def test_the_command_looks_at_a_clip(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A black video, gif or folder of frames is called black through the command line."""
    write_media(f"{tmp_path}/{name}", np.zeros((4, 32, 32, 3), np.uint8))
    code, page, error = run_line(capsys, "explain", f"{tmp_path}/{name}")
    assert (code, error) == (0, "")
    assert "the picture is black" in page


def test_a_message_longer_than_a_name_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """A message of 400 characters on one line is not looked for as a file."""
    code, page, _ = run_line(capsys, "explain", f"{MESSAGES[1][0]}{'!' * 400}")
    assert (code, page.splitlines()[0]) == (0, f"{TITLE}.")


class _Failing(io.RawIOBase):
    """A stream that the system refuses to read."""

    def read(self, size: int = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_standard_input_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says why, and how else to give a log."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=_Failing(), isatty=lambda: False))
    code, _, error = run_line(capsys, "explain", "-")
    assert (code, "Standard input can't be read: Input/output error." in error) == (2, True)


def test_control_sequences_of_a_log_are_not_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Titles, colours, cursor movements and reversed text in a log do not reach the terminal."""
    hidden = "\x1b]0;owned\x07\x1b[2J\x1b[31m[red]\u202e\x9b2J\x08"
    code, page, _ = run_line(capsys, "explain", f"{hidden}{CAST}\x1b[0m")
    assert code == 0
    assert CAST in page
    assert "[red]" in page
    assert "owned" not in page
    assert not set(page) & set("\x1b\x07\x08\x9b\u202e")


def test_the_command_answers_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """`stopdown explain TEXT` prints class, evidence and remedy; with --json the record."""
    code, page, _ = run_line(capsys, "explain", MESSAGES[1][0])
    assert code == 0
    first, second, *_ = page.splitlines()
    assert first == f"{TITLE}: fp32 and fp16."
    assert second.startswith(
        "→ Run the model with Stopdown, which matches the dtypes for you: stopdown"
    )
    code, text, _ = run_line(capsys, "explain", MESSAGES[1][0], "--json")
    assert json.loads(text)["fault"] == "dtype-mismatch"


def test_the_command_reads_a_log_and_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file by name, and `-` for what is piped in."""
    log = tmp_path / "run.log"
    log.write_text(f"step 1\n{CAST}\n")
    assert run_line(capsys, "explain", str(log))[0] == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MESSAGES[2][0].encode())))
    assert "different dtypes" in run_line(capsys, "explain", "-")[1]


def test_the_command_says_unknown_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not known is exit code 1, and a file that is not there is 2."""
    code, page, _ = run_line(capsys, "explain", "KeyError: 'unet'")
    assert (code, page.splitlines()[0]) == (
        1,
        "This text contains no known precision problem.",
    )
    code, page, error = run_line(capsys, "explain", "missing.log")
    assert (code, page) == (2, "")
    assert "There is no file missing.log" in error
