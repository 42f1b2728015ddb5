"""`torchrun … -m stopdown generate`: several processes, one video, one voice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stopdown import extensions, testing
from stopdown.app.generate_command import GenerateOptions, generate
from stopdown.devices.environment import RankSettings, read_rank
from stopdown.errors import OptionError
from stopdown.frames.media import read_image
from stopdown.ranks.ranks import name_device
from stopdown.records import RunRecord, read_record

TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SIZES = ("--steps", "2", "--frames", "9", "--height", "32", "--width", "32", "--precision", "fp32")


def start_two(words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [*TWO, "-m", "stopdown", "generate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_two_processes_make_the_video_of_one(tmp_path: Path) -> None:
    """The frames of one process, within a level of rounding; one card, one record, nothing left over."""
    source = testing.save_pipeline("cogvideox", tmp_path / "model")
    one, two = tmp_path / "one", tmp_path / "two"
    sizes: dict[str, Any] = {"steps": 2, "frames": 9, "height": 32, "width": 32}
    generate(GenerateOptions(str(source), "a red ball", str(one), precision="fp32", **sizes))
    words = (str(source), "a red ball", *SIZES, "--device", "cpu", "-o", str(two))
    done = start_two(words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written:") == 1
    assert "FutureWarning" not in done.stderr
    record = read_record(tmp_path / "two.json", RunRecord)
    assert record.parallel == "context parallel over 2 processes"
    frames = sorted(path.name for path in one.iterdir())
    assert sorted(path.name for path in two.iterdir()) == frames
    for name in frames:
        first, second = (np.asarray(read_image(folder / name), int) for folder in (one, two))
        assert np.abs(first - second).max() <= 1


@pytest.mark.slow
def test_what_cannot_be_is_said_once(tmp_path: Path) -> None:
    """An output in a folder that is not there is refused by one process, and all of them end."""
    source = testing.save_pipeline("cogvideox", tmp_path / "model")
    done = start_two((str(source), "a", *SIZES, "-o", str(tmp_path / "none" / "a.mp4")))
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("cannot be written") == 1


@pytest.mark.parametrize("option", ["--memory", "--journal"])
def test_what_is_for_one_process_is_refused(
    option: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloading and a journal are refused before the processes are joined or anything is loaded."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, said = run("generate", "shapes", "a", option, "8GiB")
    assert code == 2
    assert f"{option} 8GiB was given to 2 processes." in said
    assert f"Leave {option} out, or start one process." in said


def test_without_the_package_several_processes_are_refused(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core runs without `ranks`; what needs it is refused before anything is loaded."""
    monkeypatch.setattr(extensions, "PACKAGES", ())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, said = run("generate", "shapes", "a")
    assert code == 2
    assert "A run of 2 processes: the package for this is missing in this installation." in said


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun sets is read, one process is none of several, and words are refused."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert read_rank() is None
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_rank() == RankSettings(3, 4, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert read_rank() is None
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(OptionError, match="RANK=first"):
        read_rank()


def test_each_process_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA devices are numbered by process; one too few is refused, and a CPU is shared."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert name_device("auto", RankSettings(5, 8, 1)) == "cuda:1"
    assert name_device("cpu", RankSettings(5, 8, 1)) == "cpu"
    with pytest.raises(
        OptionError, match="This machine has 2 CUDA devices, and at least 3 processes"
    ):
        name_device("cuda", RankSettings(6, 8, 2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert name_device("auto", RankSettings(5, 8, 1)) == "auto"
