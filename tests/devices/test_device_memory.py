"""Free memory of a container, and errors of a full device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from stopdown.devices import environment
from stopdown.devices.device_choice import Device
from stopdown.devices.device_memory import (
    describing_out_of_memory,
    find_device_bytes,
    find_host_bytes,
)
from stopdown.devices.environment import list_memory_limits, read_system_file
from stopdown.errors import StopdownError
from stopdown.records import MemoryPlan
from stopdown.runtime.memory_limits import count_limit


@pytest.mark.parametrize(
    ("names", "dropped"),
    [
        (("memory.max", "memory.current"), "inactive_file"),
        (
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
            "total_inactive_file",
        ),
    ],
)
def test_a_container_has_less_than_its_machine(
    tmp_path: Path, names: tuple[str, str], dropped: str
) -> None:
    """Files that can be dropped count as free; "max" is no limit."""
    most, used = (tmp_path / name for name in names)
    most.parent.mkdir(exist_ok=True)
    most.write_text("5000")
    used.write_text("3000")
    (most.parent / "memory.stat").write_text(f"anon 1000\n{dropped} 700\n")
    assert find_host_bytes(tmp_path) == 2700
    (most.parent / "memory.stat").write_text("anon 1000\n")  # a sandbox doesn't tell more
    assert find_host_bytes(tmp_path) == 2000
    most.write_text("max")
    assert find_host_bytes(tmp_path) > 2700


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/slurm/job_7/step_0", ".", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory:/slurm/job_7/step_0",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_a_job_of_a_cluster_has_less_than_its_machine(
    line: str,
    folder: str,
    names: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its limit is that of a control group around its own, of which only a container's root was read."""
    job = tmp_path / folder / "slurm" / "job_7"
    job.mkdir(parents=True)
    for name, text in zip(names[:2], ("5000", "3000"), strict=True):
        (job / name).write_text(text)
    (job / "memory.stat").write_text(f"anon 1000\n{names[2]} 700\n")
    (tmp_path / folder / "slurm" / names[0]).write_text("9223372036854771712")

    def read(path: str) -> str:
        return line if path == "/proc/self/cgroup" else read_system_file(path)

    monkeypatch.setattr(environment, "read_system_file", read)
    assert find_host_bytes(tmp_path) == 2700
    assert 5000 in [limit for _, limit in list_memory_limits(tmp_path)]


@pytest.mark.parametrize(
    ("free", "reserved", "usable"), [(9, 0, 9), (2, 7, 9), (16, 0, 16), (15, 4, 16)]
)
def test_what_other_programs_hold_is_not_usable(
    free: int, reserved: int, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI or a notebook beside it holds a part of the card; what this process holds it can use."""
    module = SimpleNamespace(
        mem_get_info=lambda index: (free, 16), memory_reserved=lambda index: reserved
    )
    monkeypatch.setattr("torch.get_device_module", lambda kind: module)
    card = Device("cuda", 1, "T4", (7, 5), 16)
    assert find_device_bytes(card) == count_limit(MemoryPlan("auto"), card) == usable
    assert count_limit(MemoryPlan("auto", 2), card) == 8
    assert count_limit(MemoryPlan("1GiB"), card) == usable
    assert count_limit(MemoryPlan("1GiB", 2), card) == 8
    del module.mem_get_info
    assert find_device_bytes(card) == 16


def test_a_full_device_is_explained_and_other_errors_are_left() -> None:
    """The error says what to make smaller."""
    full = pytest.raises(StopdownError, match="ran out of memory: CUDA out of memory")
    with full as caught, describing_out_of_memory():
        raise RuntimeError("CUDA out of memory. Tried to allocate")
    assert "`height` and `width`" in caught.value.remedy
    with pytest.raises(RuntimeError, match=r"^other$"), describing_out_of_memory():
        raise RuntimeError("other")
