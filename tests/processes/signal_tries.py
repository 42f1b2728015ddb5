"""A command that is stopped at many moments of one run: `signal_tries.py COUNT MEAN_S SEED -- COMMAND`.

The command runs once. At random moments the process forks: the child gets Ctrl-C or SIGTERM, right there
between two bytecodes, and ends; the parent waits for it and goes on. So a try costs what it takes to stop,
and not another import of PyTorch. What the child changed in the working folder is put back.

Each try is a line of JSON. `count_tries` starts it and counts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

CHILD_S = 900
"""After which a child that does not end is killed: on a busy machine one that ends takes minutes."""

CODES = {"SIGINT": 130, "SIGTERM": 143}


def count_tries(
    command: list[str],
    folder: Path,
    *,
    count: int,
    mean_s: float,
    makes: tuple[str, ...] = (),
    seed: int = 0,
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """How tries of a command ended, and those that ended wrong.

    Args:
        command: words after `stopdown`.
        folder: that it runs in.
        count: tries at most.
        mean_s: between two of them.
        makes: its results, files or folders: the signal may come when they are whole. Files are all there
            or none, a folder is one that the same command goes on with.
        seed: of the moments.
    """
    given = [sys.executable, __file__, str(count), str(mean_s), str(seed), "--", *command]
    done = subprocess.run(given, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]  # 1: what was explained is unknown
    tries = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"signal"')]
    wrong = [one for one in tries if not is_right(one, makes)]
    return Counter(tries=len(tries), right=len(tries) - len(wrong), wrong=len(wrong)), wrong


def is_right(one: dict[str, Any], makes: tuple[str, ...] = ()) -> bool:
    """Whether a try ended with its code and one message, and left nothing but whole results."""
    messages = [line for line in one["text"].splitlines() if line.startswith("stopdown: ")]
    left = set(one["left"])
    if "What is done is kept in " in one["text"]:  # something is, and not only folders for it
        left = {name for name in left if ".cells" not in name} if _has_cells(left) else left
    return (
        one["status"] == CODES[one["signal"]]
        and len(messages) == 1
        and messages[0].startswith("stopdown: Stopped by ")
        and "Traceback" not in one["text"]
        and _is_whole(left, makes)
    )


def _has_cells(left: set[str]) -> bool:
    return any(".cells/" in name and Path(name).suffix in (".msgpack", ".json") for name in left)


def _is_whole(left: set[str], makes: tuple[str, ...]) -> bool:
    files = {name for name in makes if Path(name).suffix}
    folders = set(makes) - files
    others = [x for x in left - files if Path(x).parts[0] not in folders]
    is_temporary = any(x.endswith((".part", ".lock")) for x in left)
    return not others and not is_temporary and left & files in (set(), files)


class _Tries:
    """Children that are stopped while their parent runs a command."""

    def __init__(self, count: int, mean_s: float, seed: int) -> None:
        self._left, self._mean_s, self._random = count, mean_s, random.Random(seed)
        self._owner, self._is_child, self._out = os.getpid(), False, os.dup(1)
        self._log = Path(tempfile.mkdtemp(prefix="signal-tries-"))

    def begin(self) -> None:
        signal.signal(signal.SIGALRM, self._try)
        self._wait()

    def end(self) -> None:
        if not self._is_child:
            signal.setitimer(signal.ITIMER_REAL, 0)
            shutil.rmtree(self._log)

    def _wait(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._random.expovariate(1 / self._mean_s))

    def _try(self, number: int, frame: Any) -> None:
        is_heard = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        if not self._left or self._is_child or os.getpid() != self._owner:
            return
        if not is_heard:  # the program has not begun, or is over
            self._wait()
            return
        self._left -= 1
        sent, here, kept = self._random.choice(tuple(CODES)), Path.cwd(), self._log / "kept"
        shutil.copytree(here, kept, copy_function=os.link, symlinks=True)
        before = _list(here)
        child = os.fork()
        if child == 0:
            self._is_child = True
            said = os.open(self._log / "said", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(said, 1)
            os.dup2(said, 2)
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.getpid = lambda: self._owner  # as if it were the command itself
            signal.raise_signal(getattr(signal, sent))
            return
        status = _reap(child)
        left = sorted(_list(here) - before)
        for path in here.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path in kept.iterdir():
            path.rename(here / path.name)
        kept.rmdir()
        text = (self._log / "said").read_text(errors="replace")
        at = [f"{x.f_code.co_filename}:{x.f_lineno}" for x in (frame, frame.f_back) if x]
        found = {"signal": sent, "status": status, "left": left, "at": at, "text": text}
        os.write(self._out, (json.dumps(found) + "\n").encode())
        self._wait()


def _reap(child: int) -> int:
    """How a child ended: its exit code, or the negative number of a signal; -1000 when it did not."""
    until = time.monotonic() + CHILD_S
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1000


def _list(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


if __name__ == "__main__":
    tries = _Tries(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tries.begin()
    from stopdown.app.cli import main
    from stopdown.frames.media import _CODECS

    _CODECS["mp4"][1]["threads"] = (
        "1"  # a child has none of the encoder's threads, and waits for them
    )
    try:
        main(sys.argv[5:])
    finally:
        tries.end()
