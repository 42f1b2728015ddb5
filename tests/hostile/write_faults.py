"""The command line with a fault in its writing: a signal, a full disk, a closed standard output.

What takes long and writes nothing (runs, measurements) is replaced by a result that already exists; all
that checks, writes and prints is as it is. `WRITE_FAULT` in the environment says which fault.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stopdown.app import cli, run_command
from stopdown.files import outputs

NEW_USER, NEW_MOUNTS = 0x10000000, 0x20000
READ_ONLY, BIND, PRIVATE, REMOUNT = 1, 4096, 0x44000, 32


def main() -> None:
    """Arrange the fault and run the command."""
    fault, _, what = os.environ["WRITE_FAULT"].partition(" ")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _replace_work()
    {
        "none": lambda what: None,
        "signal": _send_signal,
        "limit": _limit_files,
        "mount": mount,
        "stdout": _break_stdout,
    }[fault](what)
    cli.main()


def _replace_work() -> None:
    """Results that are there already, for what would be computed."""
    from models.comparisons import make_comparison
    from stopdown.comparison import matrix
    from stopdown.dtype_rules import check
    from stopdown.dtype_rules import mend as fixes
    from stopdown.plans import certified
    from stopdown.records import Finding, GuardRecord
    from stopdown.runtime import runs
    from stopdown.runtime.runs import RunResult
    from stopdown.runtime.scripts import ScriptGuard

    def run(*_: Any, **named: Any) -> Any:
        import numpy as np

        noise = np.random.default_rng(0).integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)
        return RunResult(noise, GuardRecord("Tiny", (), (), 0, (), 0.0), None, 0.0)

    runs.make_frames = run
    certified.certify_plan = lambda *_, **named: make_plan()
    matrix.compare = lambda *_, **named: make_comparison()
    put_on, execute, guards = ScriptGuard.put_on, run_command.execute, list[ScriptGuard]()

    def put_on_noted(self: ScriptGuard, patches: Any) -> None:
        put_on(self, patches)
        guards.append(self)

    def execute_and_repair(start: Any) -> Any:
        found = execute(start)
        guards[-1].plan = make_plan("repaired")
        return found

    ScriptGuard.put_on = put_on_noted  # type: ignore[method-assign]
    run_command.execute = execute_and_repair
    finding = Finding("range", "vae", "large", "mend it")
    seen = SimpleNamespace(name="v100", title="V100")
    checked = SimpleNamespace(findings=(finding,), seen=None, profile=seen, precisions={})
    check.inspect_pipeline = lambda *_, **named: checked
    fixes.mend = lambda *_, **named: SimpleNamespace(done=("mended",), remaining=())


def make_plan(source: str = "shapes") -> Any:
    """A sealed plan for nothing."""
    from stopdown.plans.plan_files import seal_plan
    from stopdown.records import Plan

    return seal_plan(Plan(source, "", "Tiny", "fp16", {}, (), "cpu", 0.0))


def _send_signal(name: str) -> None:
    """A signal when the first result is whole under its temporary name."""
    number = getattr(signal, name)

    def end(*_: Any) -> None:
        os.kill(os.getpid(), number)

    outputs._settle = outputs._rename_numbered = end  # type: ignore[assignment]


def _limit_files(size: str) -> None:
    """Files of our own cannot grow over a size; the check before the run does not notice."""
    made_beside = outputs._made_beside

    @contextmanager
    def make_small(target: Path) -> Iterator[Path]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), before[1]))
        try:
            with made_beside(target) as part:
                yield part
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    outputs._made_beside = make_small
    outputs._PROBE_BYTES = 0


def mount(kind: str) -> None:
    """`disk` is a disk of 128 KiB, or one that is read-only, for this process alone.

    Raises:
        OSError: this machine does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _demand(libc.unshare(NEW_MOUNTS | (NEW_USER if os.getuid() else 0)))
    _demand(libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None))
    if kind == "full":
        outputs._PROBE_BYTES = 0
        _demand(libc.mount(b"tmpfs", b"disk", b"tmpfs", 0, b"size=4k"))
        Path("disk/filler").write_bytes(bytes(4096))
    else:
        _demand(libc.mount(b"disk", b"disk", None, BIND, None))
        _demand(libc.mount(b"disk", b"disk", None, BIND | REMOUNT | READ_ONLY, None))


def _demand(answer: int) -> None:
    if answer:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _break_stdout(how: str) -> None:
    sys.stdout.flush()
    if how == "closed":
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]  # as Python does at its start
        return
    if how == "full":
        opened = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, opened = os.pipe()
        os.close(reader)
    os.dup2(opened, 1)
    os.close(opened)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


if __name__ == "__main__":  # whether this machine allows disks of our own
    os.mkdir("disk")
    mount(json.loads(sys.argv[1]))
