"""Processes that a script starts with `multiprocessing`: they are counted, and new ones guarded as well.

A forked process has the guard of its parent. A process that is spawned, or that a server forks, begins
anew: the guard is put on there by what it is told before it imports the script.

Not covered: processes that are started otherwise (`subprocess`, `torchrun`), and interpreters that have no
Stopdown.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.process import BaseProcess
from typing import Any

from stopdown.interception.patches import Patches


class Children:
    """The processes that were started while it listens; `guard` is called in those that begin anew."""

    def __init__(self, guard: Callable[[], object]) -> None:
        """Take the function that guards a child process.

        Args:
            guard: function without arguments that can be pickled.
        """
        self.started = 0
        self._guard = guard

    def listen(self, patches: Patches) -> None:
        """Count new processes and guard those that are spawned, until `patches` is undone."""
        start, prepare = BaseProcess.start, spawn.get_preparation_data

        @functools.wraps(start)
        def start_counted(process: BaseProcess) -> None:
            start(process)
            self.started += 1

        @functools.wraps(prepare)
        def prepare_guarded(name: str) -> dict[str, Any]:
            return {**prepare(name), _KEY: _Begin(self._guard)}

        patches.set_class_attribute(BaseProcess, "start", start_counted)
        patches.set_attribute(spawn, "get_preparation_data", prepare_guarded)


_KEY = "stopdown"

_BEGIN = """
try:
    import pickle
    pickle.loads(guard)()
except Exception as error:
    import sys
    sys.stderr.write(f"stopdown: a process that the script started is not guarded: {error}\\n")
"""
"""What a process does when it reads what it is told; nothing here ends a process of the script."""


class _Begin:
    """Puts the guard on where it is unpickled, with nothing but Python's own names."""

    def __init__(self, guard: Callable[[], object]) -> None:
        self._guard = pickle.dumps(guard)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_BEGIN, {"guard": self._guard})
