"""Execution of a script or module as `__main__` of this process.

It has the module, arguments, search path, exceptions and exit code that Python would give it.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from stopdown.app.signals import Stopped
from stopdown.errors import InputError, StopdownError

Start = Callable[[], Any]
"""Function that runs a program to its end, in `sys.modules["__main__"]`."""


def find_start(target: str, *, is_module: bool) -> Start:
    """Return a function that runs a file, a folder or a module, after a check that it exists."""
    if is_module:
        spec = _find_module(target)
        return lambda: _run_module(spec)
    if target.startswith("-"):
        raise InputError(
            f"stopdown run has no option {target}.",
            remedy="Run stopdown run -h, which lists its options. Options of the script go after its name.",
        )
    if not Path(target).exists():
        raise InputError(
            f"There is no script {target}.",
            remedy="Name a Python file, or a module: stopdown run -m MODULE",
        )
    return lambda: _run_file(target)


def _find_module(name: str) -> ModuleSpec:
    """Return the spec of a module; for a package, the spec of its `__main__`."""
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        found = None
    if found is None or found.loader is None:
        raise InputError(
            f"There is no module {name}.",
            remedy="Name a module that `python -m` finds, or a file: stopdown run SCRIPT",
        )
    return found


def _run_module(spec: ModuleSpec) -> None:
    code = getattr(spec.loader, "get_code")(spec.name)  # noqa: B009  # not every loader has it
    sys.argv[0] = spec.origin or sys.argv[0]
    _run(
        code,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )


def _run_file(target: str) -> None:
    path = str(Path(target).absolute())  # a script that changes the folder still finds itself
    code = _compile(path)
    if code is None:  # a folder, an archive or compiled code
        runpy.run_path(target, run_name="__main__")
        return
    _run(code, __file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))


def _compile(path: str) -> CodeType | None:
    """Compile a source file; return None for a folder, an archive or a `.pyc` file."""
    if Path(path).is_dir() or path.endswith(".pyc"):
        return None
    text = Path(path).read_bytes()
    if text.startswith(b"PK\x03\x04"):  # an archive
        return None
    return compile(text, path, "exec", dont_inherit=True)


def _run(code: CodeType, **more: Any) -> None:
    main = sys.modules["__main__"]
    vars(main).update(more, __builtins__=builtins)
    exec(code, vars(main))


@contextlib.contextmanager
def as_main(target: str, words: tuple[str, ...], *, is_module: bool) -> Iterator[None]:
    """Replace `__main__`, `sys.argv` and `sys.path` by those of a program while the block runs.

    Args:
        target: file, folder or module.
        words: arguments of the program.
    """
    from stopdown.interception.patches import Patches

    main = ModuleType("__main__")
    if sys.version_info < (3, 14):  # which makes them where they are asked for
        vars(main)["__annotations__"] = {}
    with Patches() as patches:
        patches.set_attribute(sys, "argv", [target, *words])
        first = "" if is_module else str(Path(target).resolve().parent)
        patches.set_attribute(sys, "path", [first, *sys.path])
        patches.set_item(sys.modules, "__main__", main)
        yield


def execute(start: Start) -> tuple[int, BaseException | None]:
    """Run a program; return its exit code, and its exception or None.

    The exception is printed as Python would. Signals, Ctrl-C and `StopdownError` are raised instead.
    """
    try:
        start()
    except Stopped:  # a signal, and not the script
        raise
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0, None
        sys.stderr.write(f"{left.code}\n")
        return 1, None
    except (KeyboardInterrupt, StopdownError):
        raise
    except BaseException as error:
        own = error.__traceback__  # the script's own frames: from its first line on
        while own is not None and own.tb_frame.f_globals.get("__name__") != "__main__":
            own = own.tb_next
        if own is None and not isinstance(error, SyntaxError):  # which has no frame in it
            own = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(own), own)
        return 1, error
    return 0, None


def wait_for_threads() -> None:
    """Wait until the threads of a program that has ended have nothing left to do.

    Python joins all threads that aren't daemons. It ends those of executors first, which wait for work.
    Here they are left idle instead, since a process can't use an executor again once Python has ended it.
    """
    times_idle = 0
    while times_idle < 2:  # a thread that has taken work may not have begun it yet
        others = [
            x for x in threading.enumerate() if not (x.daemon or x is threading.main_thread())
        ]
        busy = [thread for thread in others if not _waits_for_work(thread)]
        times_idle = 0 if busy else times_idle + 1
        for thread in busy:
            thread.join(_POLL_S)
        if not busy and others:
            time.sleep(_POLL_S)


_POLL_S = 0.02


def _waits_for_work(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to an executor that has nothing to do."""
    executors = sys.modules.get("concurrent.futures.process")  # loaded if a program has used any
    if executors is not None and isinstance(thread, executors._ExecutorManagerThread):
        return not thread.pending_work_items
    executors = sys.modules.get("concurrent.futures.thread")
    frame = sys._current_frames().get(thread.ident or 0)
    if executors is None or frame is None or frame.f_code is not executors._worker.__code__:
        return False
    queue: Any = frame.f_locals["work_queue"]
    return bool(queue.empty())
