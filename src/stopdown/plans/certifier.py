"""Plan components of a model in a second process, while the main one downloads or plans others.

The process caches each plan that it makes, so that `certify_plan` finds it. If it fails or is late,
only time is lost. If both processes compute, each has half of the threads until one of them ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stopdown.devices.device_memory import find_host_bytes
from stopdown.devices.environment import copy_variables
from stopdown.sources.hub import Progress
from stopdown.sources.source import Source

PROGRAM = "stopdown.plans.certifier_process"

WORTH_BYTES = 1 << 27
"""Least bytes of weights that are worth a second process; fewer are planned before it has started."""

ROOM_BYTES = 4 << 30
"""Free host memory that a second process needs: for weights in both, and for its libraries."""


class Certifier:
    """A context manager that plans components in a second process, which ends with the `with` block.

    Args:
        source: a folder or Hub id, with its pipeline class.
        components: names in the order in which they are planned; if empty, no process is started.
        residual: as for `certify_plan`.
        shares: whether this process computes as well, so that each gets half of the threads. Else it
            downloads the weights.
    """

    def __init__(
        self, source: Source, components: Sequence[str], residual: str, *, shares: bool = False
    ) -> None:
        self._threads = torch.get_num_threads()
        self._given = self._threads // 2 if shares else self._threads
        is_on_hub = source.kind == "hub"
        self._task = {
            "source": source.name if is_on_hub else str(source.path.absolute()),
            "revision": source.revision if is_on_hub else None,
            "variant": source.variant or None,
            "cache_dir": str(source.path.parents[2]) if is_on_hub else None,
            "pipeline_class": source.pipeline_class,
            "scheduler": source.scheduler,
            "components": list(components),
            "residual": residual,
            "threads": self._given,
            "downloads": not shares,
        }
        self._process: subprocess.Popen[str] | None = None
        self._told: tuple[Any, ...] = ()

    def __enter__(self) -> Certifier:
        is_frozen = getattr(sys, "frozen", False)  # its executable is the whole program
        if not self._task["components"] or not sys.executable or is_frozen:
            return self
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM],
                env={**copy_variables(), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,  # the process ends when it is closed
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                text=True,
            )
        except OSError:  # there is no interpreter to begin: this process plans everything
            return self
        self._tell(json.dumps(self._task))
        self._reader = threading.Thread(target=self._follow, args=(self._process,), daemon=True)
        self._reader.start()
        torch.set_num_threads(self._threads - self._given or self._threads)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with self._process:  # closes its pipes
                self._process.kill()
                self._reader.join()
            self._take_threads()

    def _tell(self, line: str) -> None:
        """Write a line to the second process unbuffered, so that closing the pipe flushes nothing more."""
        assert self._process is not None
        assert self._process.stdin is not None
        left = f"{line}\n".encode()
        with contextlib.suppress(BrokenPipeError):
            while left:
                left = left[os.write(self._process.stdin.fileno(), left) :]

    def _follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # a library printed something
                found = json.loads(line)
                self._told = tuple(found) if isinstance(found, list) else self._told

    def _take_threads(self) -> None:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def beside(self, load: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
        """Wrap a tensor loader so that this process uses all threads as soon as the second one has
        ended.
        """

        def load_beside(name: str) -> torch.Tensor:
            if self._process is not None and self._process.poll() is not None:
                self._take_threads()
            return load(name)

        return load_beside

    def wait(self, progress: Progress | None) -> None:
        """Let the second process use all threads, and wait until it has planned its components."""
        if self._process is None:
            return
        self._tell(str(self._threads))
        while self._process.poll() is None:
            if progress is not None and self._told:
                progress(*self._told)
            time.sleep(0.1)
        self._take_threads()


def choose_others(sizes_bytes: dict[str, int]) -> list[str]:
    """Return the components that a second process should plan: all but the largest.

    The list is empty if they are small, or if the machine has only one thread or little memory.

    Args:
        sizes_bytes: component → bytes of its weights, for each component to be planned.
    """
    others = sorted(sizes_bytes, key=lambda name: -sizes_bytes[name])[1:]
    is_worth = sum(sizes_bytes[name] for name in others) >= WORTH_BYTES
    if not is_worth or torch.get_num_threads() < 2 or find_host_bytes() < ROOM_BYTES:
        return []
    return others
