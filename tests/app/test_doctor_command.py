"""stopdown doctor: its page, its record and profiles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stopdown.app import cli, doctor_command
from stopdown.app.doctor_command import word_ratio
from stopdown.errors import OptionError
from stopdown.records import MachineHealth, from_json


def test_a_profile_is_written_for_one_device() -> None:
    """Without a device there is nothing to write, and the message says what to type."""
    with pytest.raises(OptionError) as caught:
        doctor_command.write_profile(None)
    assert str(caught.value) == (
        "A profile is written for one device, and none was named. "
        "Use stopdown doctor --device v100 --toml, or --device cuda for this machine's card."
    )


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def model_cli(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(["doctor", *arguments])
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return model_cli


def test_the_page(run: Run) -> None:
    """Without options each device here is shown, with formats, attention, outlook and switches."""
    code, out, err = run()
    assert (code, err) == (0, "")
    for text in (
        "cpu (",
        "fp32  native",
        "attention kernels: flash",
        "What --precision auto would",
    ):
        assert text in out
    for text in (
        "CogVideoX-5B",
        "CogView3-Plus-3B",
        "SVD-XT",
        "torch 2",
    ):
        assert text in out
    assert "fp32 is native" not in out


def test_the_page_of_a_profile(run: Run) -> None:
    """A profile is marked as such, with its faults."""
    code, out, _ = run("--device", "T4")
    assert code == 0
    assert "NVIDIA T4, compute capability 7.5, 14.6 GiB" in out
    assert (
        "CogVideoX-5B, 49 frames of 720x480: fits in fp16 with a plan. 50 steps take 15 to 31 min."
        in out
    )
    assert re.search(
        r"of 14\.6 GiB, and 21\.5 GiB of host memory \(strategy block\+tiling\)\.",
        " ".join(out.split()),
    )
    assert "(from its profile; nothing was measured)" in out
    assert "stopdown fit MODEL --device T4\n" in out
    assert out.count("65.1 TFLOPS") == 1
    assert "Known problems with this device" in out
    assert "allow_fp16_reduced_precision_reduction" in out


def test_json(run: Run) -> None:
    """`--json` is the record, and nothing else."""
    code, out, err = run("--device", "a100", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["devices"][0]["attention"]["flash"] == ["fp16", "bf16"]
    assert from_json(out, MachineHealth).devices[0].device == "NVIDIA A100"


def test_toml(run: Run, tmp_path: Path) -> None:
    """What `--toml` prints is a device when it is given back."""
    _, out, _ = run("--device", "v100", "--toml")
    path = tmp_path / "mine.toml"
    path.write_text(out.replace('"NVIDIA Tesla V100"', '"My card"'))
    code, out, _ = run("--device", str(path))
    assert code == 0
    assert out.lstrip().startswith("My card, compute capability 7.0")


@pytest.mark.parametrize("arguments", [["--device", "cuda:9"], ["--device", "tpu"]])
def test_a_device_that_is_not_here(run: Run, arguments: list[Any]) -> None:
    """One message on stderr, exit code 2, no traceback."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("stopdown: ")
    assert "--device" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (None, ""),
        (0.12, "8.3× faster than fp32"),
        (24.0, "takes 24 times as long as fp32"),
        (121.0, "takes 120 times as long as fp32"),
        (1.02, "as fast as fp32"),
    ],
)
def test_a_ratio_of_times_is_words(ratio: float | None, said: str) -> None:
    """Nobody has to find out whether 0.12 of the time is fast."""
    assert word_ratio(ratio) == said
