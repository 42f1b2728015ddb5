"""Parts of files read into the system's cache before they are asked for: disk and processor overlap.

A certificate reads each weight once and computes on it for longer than the disk takes. Without this the
processor waits for the disk at each weight, and the disk for the processor.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from stopdown.sources.headers import read_header

AHEAD_BYTES = 1 << 29
"""No more than this is read beyond what was used."""

CHUNK_BYTES = 1 << 20
"""The system reads at most so much for one request."""


class ByteRange(NamedTuple):
    """Bytes of a file that are read together: one tensor."""

    path: Path
    start: int
    size_bytes: int


def list_byte_ranges(path: Path) -> dict[str, ByteRange]:
    """Return where the values of each tensor lie in a safetensors file."""
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
    return {
        name: ByteRange(path, begin + x.start, x.size_bytes)
        for name, x in read_header(path).items()
    }


class ReadAhead:
    """Asks the system for parts of files in a thread of its own, as long as it is entered.

    On systems without `posix_fadvise` nothing is asked for.

    Args:
        parts: in the order in which they will be used.
    """

    def __init__(self, parts: Iterable[ByteRange]) -> None:
        self._parts, self._used_bytes, self._has_ended = list(parts), 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._go, daemon=True)

    def __enter__(self) -> ReadAhead:
        if self._parts and hasattr(os, "posix_fadvise"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def note_used(self, size_bytes: int) -> None:
        """Note that this many more bytes were used."""
        with self._changed:
            self._used_bytes += size_bytes
            self._changed.notify()

    def _go(self) -> None:
        asked_bytes, opened = 0, dict[Path, int]()
        with (
            contextlib.ExitStack() as stack,
            contextlib.suppress(OSError),
        ):  # it is only sooner or later
            for part in self._parts:
                if part.path not in opened:
                    opened[part.path] = os.open(part.path, os.O_RDONLY)
                    stack.callback(os.close, opened[part.path])
                for start in range(0, part.size_bytes, CHUNK_BYTES):
                    if not self._wait(asked_bytes):
                        return
                    size = min(CHUNK_BYTES, part.size_bytes - start)
                    where = opened[part.path], part.start + start, size
                    os.posix_fadvise(*where, os.POSIX_FADV_WILLNEED)
                    asked_bytes += size

    def _wait(self, asked_bytes: int) -> bool:
        """Wait until more may be requested; return False if this has ended."""

        def may_go_on() -> bool:
            return self._has_ended or asked_bytes < self._used_bytes + AHEAD_BYTES

        with self._changed:
            self._changed.wait_for(may_go_on)
            return not self._has_ended
