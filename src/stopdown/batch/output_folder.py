"""Creation, locking and cleaning of a batch's output folder.

Files appear there only when complete: each is written under a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stopdown.errors import InputError
from stopdown.files.outputs import (
    check_target,
    discard,
    explain_refusal,
    held_folder,
    written_beside,
)

PLAN_NAME = re.compile(r"plan-([0-9a-f]{12})-(\d+)\.json")
"""Name of the file of a version of a batch's plan: seal of the first version, and number of this one."""

_STRAY_S = 3600.0
"""Seconds after which a temporary file of another machine counts as abandoned."""


def find_batch_folder(given: str) -> Path:
    """Return the absolute path of a batch's folder, which need not exist yet.

    Raises:
        InputError: a URL was given.
    """
    if "://" in given:
        raise InputError(
            f"The output {given} is a URL.",
            expected="The outputs of a batch are written into a folder.",
            remedy="Mount the storage as a folder, or copy the finished folder there.",
        )
    return Path(given).absolute()


def make_folder(folder: Path) -> None:
    """Make the folder if needed; raise `InputError` if it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_refusal(folder, error) from error
    check_target(folder / "batch.json", replaces=lambda path: "")


def list_item_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with written_beside(path) as part:
        part.write_bytes(content)


@contextmanager
def held_for_batch(folder: Path) -> Iterator[None]:
    """Make and lock the folder while the block runs, after removing leftovers of killed processes.

    A new folder that is still empty at the end is removed, so that a refused batch leaves nothing behind.
    """
    busy = InputError(
        f"Another batch is writing to {folder} just now.",
        remedy="Wait until it ends, or name another folder with -o.",
    )
    is_new = not folder.exists()
    try:
        make_folder(folder)
        with held_folder(folder, busy):
            _sweep(folder)
            yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _sweep(folder: Path) -> None:
    """Remove abandoned temporary files of other machines. This machine's are removed at the first write."""
    for part in folder.glob(".stopdown-*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _STRAY_S:
                discard(part)
