"""The folder of a batch's outputs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stopdown.batch.output_folder import find_batch_folder, held_for_batch, write_whole
from stopdown.errors import InputError


def test_a_url_is_no_folder() -> None:
    """Another path is made absolute; it need not exist."""
    assert find_batch_folder("out").is_absolute()
    with pytest.raises(InputError, match="s3://bucket is a URL"):
        find_batch_folder("s3://bucket")


def test_a_refused_batch_leaves_no_folder(tmp_path: Path) -> None:
    """A new folder goes if nothing was written, and stays with a file in it."""
    folder = tmp_path / "new"
    with pytest.raises(ZeroDivisionError), held_for_batch(folder):
        raise ZeroDivisionError
    assert not folder.exists()
    with held_for_batch(folder):
        write_whole(folder / "a.json", b"{}")
    assert (folder / "a.json").read_bytes() == b"{}"


def test_leftovers_of_killed_processes_go(tmp_path: Path) -> None:
    """A temporary file of another machine is left for an hour, since it may be written just now."""
    old, new = tmp_path / ".stopdown-1.part", tmp_path / ".stopdown-2.part"
    for path in (old, new):
        path.write_bytes(b"")
    past = time.time() - 4000
    os.utime(old, (past, past))
    with held_for_batch(tmp_path):
        assert (old.exists(), new.exists()) == (False, True)
