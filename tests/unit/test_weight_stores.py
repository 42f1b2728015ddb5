"""Weights that wait on disk: nothing of them outlives the process, and a full disk is a message."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stopdown.errors import OutputError
from stopdown.memory.weight_stores import WeightStore

posix = pytest.mark.skipif(os.name != "posix", reason="a file that is mapped stays where it is")


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file may grow over a size."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@posix
def test_waiting_weights_leave_no_file(tmp_path: Path) -> None:
    """What waits is mapped and has no name any more, so a kill leaves nothing of it; it comes back."""
    store = WeightStore("cpu", tmp_path)
    weights = [torch.randn(300), torch.zeros(0)]
    before = [weight.clone() for weight in weights]
    for weight in weights:
        store.store(weight)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert weights[0].untyped_storage().nbytes() == 0
    for weight, old in zip(weights, before, strict=True):
        store.load(weight)
        assert torch.equal(weight, old)
    store.close()
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_disk_without_room_for_weights_is_a_message(tmp_path: Path) -> None:
    """The room is taken before values are written into the mapping, which would end the process."""
    store, weight = WeightStore("cpu", tmp_path), torch.ones(1000)

    def keep() -> None:
        with limited_files(2000):
            store.store(weight)

    with pytest.raises(OutputError) as caught:
        keep()
    said = str(caught.value)
    assert said.startswith(f"Weights kept on disk need 4000 bytes in {tmp_path}")
    assert said.endswith(
        "File too large. On the CPU, weights that do not fit into `memory` are written to the "
        "folder for temporary files. So are weights that are large compared with the machine's "
        "memory. Free some space "
        "there, set TMPDIR to another disk, or give a larger `memory`."
    )
    assert caught.value.exit_code == 1
    store.close()
    assert torch.equal(weight, torch.ones(1000))
    assert list(tmp_path.iterdir()) == []
