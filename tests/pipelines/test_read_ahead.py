"""Files are read ahead in the order given, and never further than is allowed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stopdown.pipelines import read_ahead
from stopdown.pipelines.read_ahead import ByteRange, ReadAhead, list_byte_ranges


class Asked:
    """Stands in for the system: notes what it is asked to read, and can be waited for."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def advise(self, file: int, start: int, size: int, advice: int) -> None:
        with self._changed:
            self.ranges.append((start, size))
            self._changed.notify()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ranges) >= count, timeout=60)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    made = Asked()
    monkeypatch.setattr(os, "posix_fadvise", made.advise, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    monkeypatch.setattr(read_ahead, "CHUNK_BYTES", 10)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 30)
    return made


def test_parts_are_read_in_their_order_and_not_too_far(asked: Asked, tmp_path: Path) -> None:
    """Three requests of ten bytes fill what is allowed; the next comes when bytes were used."""
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    parts = [ByteRange(path, 50, 15), ByteRange(path, 0, 40)]
    with ReadAhead(parts) as ahead:
        asked.wait_for(4)  # 10 + 5 + 10 are below the limit, so one more begins
        assert asked.ranges == [(50, 10), (60, 5), (0, 10), (10, 10)]
        ahead.note_used(15)
        asked.wait_for(5)
        ahead.note_used(40)
        asked.wait_for(6)
    assert asked.ranges[4:] == [(20, 10), (30, 10)]


def test_a_reader_that_ends_early_ends_the_thread(asked: Asked, tmp_path: Path) -> None:
    """Nothing waits for bytes that nobody uses, and a file that is gone is no error."""
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    before = threading.active_count()
    with ReadAhead([ByteRange(path, 0, 100)]):
        asked.wait_for(3)
    with ReadAhead([ByteRange(tmp_path / "gone", 0, 100)]):
        pass
    assert threading.active_count() == before
    assert len(asked.ranges) == 3


def test_a_tensor_lies_where_its_part_says(tmp_path: Path) -> None:
    """The bytes of a part are those of the tensor."""
    tensor = torch.arange(12, dtype=torch.float32)
    save_file({"a": torch.zeros(7), "b": tensor}, tmp_path / "w.safetensors")
    part = list_byte_ranges(tmp_path / "w.safetensors")["b"]
    content = part.path.read_bytes()[part.start : part.start + part.size_bytes]
    assert content == tensor.numpy().tobytes()
