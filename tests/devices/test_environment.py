"""Devices, formats, settings and memory: judged as tables, then tried on this machine."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from pathlib import Path

import hypothesis
import pytest
import torch

from models.devices import CPU, T4
from stopdown.devices import device_memory, environment
from stopdown.devices.device_choice import choose_device
from stopdown.devices.device_memory import peak_memory
from stopdown.devices.environment import cache_folder, describe_machine, read_numeric_variables
from stopdown.errors import OptionError

pytestmark = pytest.mark.usefixtures("processor", "nothing_is_kept")


def test_no_property_has_a_deadline() -> None:
    """An example may take any time: what is slow on a busy machine is no fault."""
    assert hypothesis.settings().deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings().suppress_health_check


# Settings


def test_the_cache_has_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """STOPDOWN_CACHE names the folder; without it the system's cache holds one of ours."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    assert not (tmp_path / "here").exists()
    monkeypatch.setenv("STOPDOWN_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "stopdown"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path.home() / "Library" / "Caches" / "stopdown"


def test_a_cache_that_is_a_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """STOPDOWN_CACHE that names a file is an error with the variable's name and a way on."""
    path = tmp_path / "file"
    path.write_text("")
    monkeypatch.setenv("STOPDOWN_CACHE", str(path))
    with pytest.raises(OptionError) as caught:
        cache_folder()
    assert str(caught.value) == (
        f"The environment variable STOPDOWN_CACHE is {path}, which is a file. "
        "It names the folder in which Stopdown keeps its files. "
        "Set it to a folder, or remove it: unset STOPDOWN_CACHE"
    )


def test_variables_that_change_numbers_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of PyTorch's libraries that change numbers are kept, others are not."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE", raising=False)
    numerics = read_numeric_variables()
    assert numerics["NVIDIA_TF32_OVERRIDE"] == "0"
    assert not {"HF_TOKEN", "ONEDNN_DEFAULT_FPMATH_MODE"} & set(numerics)


# The machine


def test_the_machine_is_described_for_json() -> None:
    """Versions, platform, CPU and threads are facts that survive JSON."""
    machine = describe_machine()
    assert json.loads(json.dumps(machine)) == machine
    assert machine["versions"]["torch"] == torch.__version__
    assert machine["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert machine["cpu"]
    assert machine["threads"] >= 1
    assert machine["memory_bytes"] > 2**28


INSTALLED = {
    "": None,
    "0123456789ab": {"vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}},
    "a hash": {"dir_info": {}},
    "a time": {"dir_info": {"editable": True}},
}


@pytest.mark.parametrize("kind", INSTALLED)
def test_code_that_a_version_does_not_tell_has_a_mark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """A plan that was made with the code of one commit was taken for that of the next."""
    name = f"imagined{len(kind)}"
    (meta := tmp_path / f"{name}-1.0.dist-info").mkdir()
    (tmp_path / name).mkdir()
    (code := tmp_path / name / "__init__.py").write_text("")
    (meta / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (meta / "RECORD").write_text("imagined/__init__.py,sha256=1,2\n")
    if INSTALLED[kind] is not None:
        (meta / "direct_url.json").write_text(json.dumps(INSTALLED[kind]))
    monkeypatch.syspath_prepend(tmp_path)

    def read() -> str:
        environment.mark_code.cache_clear()
        return environment.mark_code(name)

    before = read()
    (meta / "RECORD").write_text("imagined/__init__.py,sha256=3,2\n")
    os.utime(code, ns=(1, 5))
    if kind.startswith("a "):
        assert before not in ("", read())
    else:
        assert before == read() == kind


def test_a_missing_package_has_no_version() -> None:
    """A package that is not installed is None, not an error."""
    assert environment.read_version("a-package-that-is-not-there") is None


@pytest.mark.usefixtures("two_cards")
def test_the_peak_of_cuda_is_that_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On cuda the counter of the right device is reset at the start and read at the end."""
    calls = []
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda index: calls.append(("reset", index))
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: 1000 + index)
    with peak_memory(T4) as peak:
        assert calls == [("reset", 1)]
    assert peak.peak_bytes == 1001


# Memory


def test_the_peak_of_a_block_is_measured() -> None:
    """Memory that lives only inside the block is seen, and the method is said."""
    with peak_memory(choose_device("cpu")) as peak:
        pages = mmap.mmap(-1, 2**27)  # an allocator may have as much that was freed before
        block = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
        while peak.peak_bytes <= 2**26:  # until the other thread has looked
            time.sleep(device_memory._SAMPLE_S)
        del block
    assert 2**26 < peak.peak_bytes < 2**30
    assert peak.method == "increase in RSS, sampled every 20 ms"


def test_the_peak_is_there_after_an_error() -> None:
    """An error passes through, and the sampling thread has ended."""
    import threading

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), peak_memory(CPU) as peak:
        _ = 1 / 0
    assert peak.peak_bytes >= 0
    assert threading.active_count() == before
