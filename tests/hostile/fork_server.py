"""The process that imports everything once and forks a child for each row.

Orders and answers are lines of JSON on stdin and stdout. It has one thread when it forks: a child of a
process with threads may wait for ever for a lock that one of them held.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

_TESTS = str(Path(__file__).parents[1])
_HEAVY = (
    "transformers.models.t5.modeling_t5",
    "transformers.models.t5.tokenization_t5",
    "transformers.models.clip.modeling_clip",
    "transformers.models.auto.modeling_auto",
    "diffusers.pipelines.cogvideo.pipeline_cogvideox",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.loaders.single_file",
    "torch._dynamo",
    "torch._export",
    "torch.fx.experimental.symbolic_shapes",
)


def main() -> None:
    """Answer orders until stdin ends."""
    _import_all()
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    _redirect(0, os.devnull, os.O_RDONLY)
    os.dup2(2, 1)  # nothing but answers on the pipe
    for line in orders:
        order = json.loads(line)
        assert len(os.listdir("/proc/self/task")) == 1, "a thread was started before the fork"
        pid = os.fork()
        if pid == 0:
            _run_child(order)
        print(json.dumps(wait_for(pid, order["wall_s"])), file=answers, flush=True)


def _import_all() -> None:
    gc.disable()  # all of it stays
    import torch

    import stopdown

    torch.set_num_threads(1)
    for found in pkgutil.walk_packages(stopdown.__path__, "stopdown."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    for name in _HEAVY:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy every page
    gc.enable()


def _redirect(number: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, number)
    os.close(opened)


def _run_child(order: dict[str, Any]) -> NoReturn:
    """Call the command as a process of its own would, and leave with its exit code."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores it
    os.environ.clear()
    os.environ.update(order["environment"])
    for name in ("stdout", "stderr"):
        number = 1 if name == "stdout" else 2
        _redirect(number, order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        setattr(sys, name, os.fdopen(number, "w", errors="backslashreplace", closefd=False))
    _redirect(0, order.get("stdin", os.devnull), os.O_RDONLY)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # as long as the process
    os.chdir(order["folder"])
    sys.argv = ["stopdown", *order["words"]]
    module, _, function = order["command"].partition(":")
    limit_process(order)
    if order["is_fresh"]:
        os.environ["PYTHONPATH"] = _TESTS
        script = f"import {module} as entry; entry.{function}()"
        start = ["-m", module] if module == "stopdown.app.cli" else ["-c", script]
        if module == "python":  # the words alone
            start = []
        os.execve(sys.executable, [sys.executable, *start, *order["words"]], os.environ)
    code = _call(getattr(importlib.import_module(module), function))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def limit_process(order: Mapping[str, Any]) -> None:
    """Put the limits of a row on this process, which has imported everything, and on what it becomes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + order["growth_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (order["cpu_s"], order["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def wait_for(pid: int, wall_s: float) -> dict[str, Any]:
    """Wait for a child, and end it and its group when its time is over."""
    until = time.monotonic() + wall_s
    pause = 0.001
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"exit_code": None, "ended_by": "wall time"}
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    if os.WIFSIGNALED(status):
        return {"exit_code": None, "ended_by": signal.Signals(os.WTERMSIG(status)).name}
    return {"exit_code": os.WEXITSTATUS(status), "ended_by": ""}


def _call(entry: Any) -> int:
    """The exit code that the interpreter would leave with."""
    try:
        entry()
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        sys.stderr.write(f"{left.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
