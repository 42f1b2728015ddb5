"""Read-ahead of file ranges into the system's cache, so that disk reads and computation overlap.

A certificate reads each weight once and computes with it for longer than the read takes. Without
read-ahead, the CPU and the disk wait for each other at every weight.
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
"""Most bytes that are requested beyond those already used."""

CHUNK_BYTES = 1 << 20
"""Bytes per request; the system reads no more at a time."""


class ByteRange(NamedTuple):
    """Byte range of one tensor in a file."""

    path: Path
    start: int
    size_bytes: int


def list_byte_ranges(path: Path) -> dict[str, ByteRange]:
    """Return the byte range of each tensor's values in a safetensors file, by name."""
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
    return {
        name: ByteRange(path, begin + x.start, x.size_bytes)
        for name, x in read_header(path).items()
    }


class ReadAhead:
    """Context manager with a thread that requests parts of files from the system before they are used.

    Does nothing on systems without `posix_fadvise`.

    Args:
        parts: byte ranges in the order in which they will be used.
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
        """Record that this many more bytes were used, so that more may be requested."""
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
        """Wait until more may be requested; return False if the block has ended."""

        def may_go_on() -> bool:
            return self._has_ended or asked_bytes < self._used_bytes + AHEAD_BYTES

        with self._changed:
            self._changed.wait_for(may_go_on)
            return not self._has_ended
