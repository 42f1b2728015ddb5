"""A batch under fire: its workers and whoever gives out its items are killed at random.

What may be seen in its folder at any moment is compared with what an undisturbed batch made: an output that
is there has its bytes, and a record that is there stays as it is.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 300.0
"""Of one start of the command; nothing waits longer."""


_PATIENT = """
import sys
from stopdown.batch import dispatch
dispatch.TRIES = 50
from stopdown.app.cli import main
sys.exit(main())
"""


def start(log: Path, *words: object) -> subprocess.Popen[bytes]:
    """`stopdown batch` in a process group of its own, whose items survive any number of workers."""
    command = [sys.executable, "-c", _PATIENT, "batch", *map(str, words)]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


class Watched:
    """A batch's folder as it is seen from outside.

    Args:
        folder: of the outputs.
        expected: name of each output to its bytes.
    """

    def __init__(self, folder: Path, expected: dict[str, bytes]) -> None:
        self._folder, self._expected = folder, expected
        self._records: dict[str, int] = {}

    def look(self) -> int:
        """How many items are finished; fails when one is half-written, other, or made twice."""
        for path in self._folder.glob("*.mp4"):
            assert path.read_bytes() == self._expected[path.name], path
        for path in self._folder.glob("*.mp4.json"):
            stamp = path.stat().st_mtime_ns
            assert self._records.setdefault(path.name, stamp) == stamp, f"{path.name} made twice"
        return len(self._records)


def find_workers(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Processes that make items for a driver: children of its fork server."""
    found, servers = [], set[int]()
    for process in psutil.process_iter(["cmdline", "ppid"]):  # by their numbers: a parent first
        line = " ".join(process.info["cmdline"] or [])
        if process.info["ppid"] == driver.pid and "forkserver" in line:
            servers.add(process.pid)
        elif process.info["ppid"] in servers:
            found.append(process)
    return found


class Kills:
    """Kills at random moments, counted by kind.

    Args:
        count: how many there are to be.
        seed: of the moments and kinds.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.left, self.done = count, Counter[str]()
        self._random = random.Random(seed)

    def run(self, begin: Callable[[], subprocess.Popen[bytes]], watched: Watched) -> int:
        """One batch to its end, started again whenever its driver was killed; its last exit code."""
        while True:
            driver = begin()
            with ended(driver):
                if self._disturb(driver, watched):
                    return int(driver.wait(LIMIT_S))

    def _disturb(self, driver: subprocess.Popen[bytes], watched: Watched) -> bool:
        """Kill until the driver is gone; whether it came to its end by itself."""
        until = time.monotonic() + LIMIT_S
        due = self._choose_due(watched.look())
        while driver.poll() is None:
            assert time.monotonic() < until, "the batch did not end"
            finished = watched.look()
            time.sleep(0.05)
            if not self.left or finished < due or not (workers := find_workers(driver)):
                continue
            time.sleep(self._random.uniform(0, 2))
            due = self._choose_due(finished)
            kind = self._random.choice(["worker"] * 3 + ["driver"])
            self.left -= 1
            self.done[kind] += 1
            if kind == "driver":
                driver.send_signal(signal.SIGKILL)
                driver.wait(30)
                return False
            with contextlib.suppress(psutil.NoSuchProcess):
                self._random.choice(workers).kill()
        watched.look()
        return True

    def _choose_due(self, finished: int) -> int:
        """How many items are finished before the next kill; now and then it comes at the start."""
        return finished + self._random.choice((0, 1, 1, 1, 2))


@contextlib.contextmanager
def ended(driver: subprocess.Popen[Any]) -> Iterator[None]:
    """Whatever happens, the process is gone afterwards."""
    try:
        yield
    finally:
        if driver.poll() is None:
            driver.kill()
            driver.wait(30)
