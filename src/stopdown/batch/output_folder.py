"""The folder of a batch's outputs. An output is whole or not there: it is written beside and renamed."""

from __future__ import annotations

import contextlib
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

_STRAY_S = 3600.0
"""Age at which a temporary file of another machine is taken for one that is no longer written."""


class OutputFolder:
    """A folder, as a flat store of files.

    Args:
        given: its path; the folder is made when it is missing.

    Raises:
        InputError: it is a URL.
    """

    def __init__(self, given: str) -> None:
        if "://" in given:
            raise InputError(
                f"The output {given} is a URL.",
                expected="The outputs of a batch are written into a folder.",
                remedy="Mount the storage as a folder, or copy the finished folder there.",
            )
        self.path = Path(given).absolute()

    def check(self) -> None:
        """Make the folder, and refuse it when it cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_refusal(self.path, error) from error
        check_target(self.path / "batch.json", replaces=lambda path: "")

    def list_names(self) -> set[str]:
        return {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all."""
        with written_beside(self.path / name) as part:
            part.write_bytes(content)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The folder for this process alone, without what killed ones left; if new and empty, it is
        removed at the end: a refused batch leaves nothing behind.
        """
        busy = InputError(
            f"Another batch is writing to {self.path} just now.",
            remedy="Wait until it ends, or name another folder with -o.",
        )
        is_new = not self.path.exists()
        try:
            self.check()
            with held_folder(self.path, busy):
                self._sweep()
                yield
        finally:
            if is_new:
                with contextlib.suppress(OSError):
                    self.path.rmdir()

    def _sweep(self) -> None:
        """Remove old temporary files of other machines; this one's go at the first write."""
        for part in self.path.glob(".stopdown-*.part"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _STRAY_S:
                    discard(part)
