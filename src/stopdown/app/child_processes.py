"""Counting and guarding of the processes that a script starts with `multiprocessing`.

A forked process inherits the guard of its parent. A process that is spawned, or forked by a server, starts
with a fresh interpreter. It installs the guard while it unpickles its preparation data, before it imports
the script.

Not covered: processes started in other ways (`subprocess`, `torchrun`), and interpreters in which Stopdown
is not installed.
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
    """Counter of the processes that a script starts with `multiprocessing`; it also has them guarded.

    A forked process inherits Stopdown's guard on model calls. In a spawned one, `guard` is called.
    """

    def __init__(self, guard: Callable[[], object]) -> None:
        """Store the function that guards the model calls of a spawned process.

        Args:
            guard: picklable function without arguments.
        """
        self.started = 0
        self._guard = guard

    def listen(self, patches: Patches) -> None:
        """Count new processes, and have the spawned ones guarded, until `patches` is undone."""
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
    sys.stderr.write(f"stopdown: a process that the script started isn't guarded: {error}\\n")
"""
"""Code that a child process runs while it unpickles its preparation data. It never ends the process."""


class _Begin:
    """Object whose unpickling in a spawned process calls the function that guards the process.

    Its pickle refers to built-ins only, so that it loads where Stopdown is not installed.
    """

    def __init__(self, guard: Callable[[], object]) -> None:
        self._guard = pickle.dumps(guard)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_BEGIN, {"guard": self._guard})
