"""Runs a row of the attack table under limits, and says what is wrong with how it ended.

A process of its own (`fork_server`) imports the command line, torch and Diffusers once and forks a child
for each row, because a fresh process takes seconds to import them. A row with `is_fresh` is a fresh
process all the same: the answers of both are the same, which `test_runner` shows.

**Catches** another exit code, another message, tracebacks, signals, hangs, memory that grows over a
limit, control characters, files that are left behind, changed or removed.
**Does not catch** files outside of the row's folder: home, cache and temporary files are inside it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

MIB = 2**20
PLAIN_COMMAND = "stopdown.app.cli:main"


@dataclass(frozen=True)
class Attack:
    """One row: an input, and how the command has to end on it.

    Attributes:
        name: of the test.
        build: makes the input in an empty folder and returns the words after `stopdown`.
        exit_code: that the process must end with; negative: the signal that must end it.
        message: the first words of the last line on stderr that begins with `stopdown: ` or `Error: `, or
            of stdout when there is none; `{folder}` in it is the row's folder.
        left: patterns of the paths, relative to the folder, that may be new or changed afterwards.
        growth_bytes: of address space, on top of the imported libraries.
        cpu_s, wall_s: seconds after which it is killed.
        environment: variables on top of an environment without HF_*, whose Hub is offline; for a Hub
            that answers the row must be fresh, because its client reads them when it is imported.
        is_fresh: run as a process of its own and not as a fork.
        command: `module:function` to call.
    """

    name: str
    build: Callable[[Path], list[str]]
    exit_code: int
    message: str
    left: tuple[str, ...] = ()
    growth_bytes: int = 1024 * MIB
    cpu_s: int = 60
    wall_s: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
    is_fresh: bool = False
    command: str = PLAIN_COMMAND


@dataclass(frozen=True)
class Outcome:
    """How a row ended.

    Attributes:
        exit_code: None when a signal or the limit on the wall time ended it.
        ended_by: name of that signal, or `wall time`; empty otherwise.
        stdout, stderr: what it wrote.
        changed: paths that are new, changed or gone, relative to the folder.
    """

    exit_code: int | None
    ended_by: str
    stdout: str
    stderr: str
    changed: tuple[str, ...]


def run_attack(attack: Attack, tmp_path: Path) -> Outcome:
    """Build a row's input, run its command and raise an AssertionError for all that is wrong."""
    folder = tmp_path / "row"
    folder.mkdir()
    words = attack.build(folder)
    before = take_snapshot(folder)
    outcome = _run(attack, folder, words, tmp_path, before)
    faults = list(find_faults(attack, outcome, folder))
    assert not faults, "\n".join(
        [f"{attack.name}: stopdown {' '.join(words)}", *faults, outcome.stdout, outcome.stderr]
    )
    return outcome


def find_faults(attack: Attack, outcome: Outcome, folder: Path) -> Iterator[str]:
    """What is wrong with how a row ended."""
    if attack.exit_code < 0:
        if outcome.ended_by != signal.Signals(-attack.exit_code).name:
            yield f"not ended by {signal.Signals(-attack.exit_code).name}"
    elif outcome.ended_by:
        yield f"ended by {outcome.ended_by}"
    elif outcome.exit_code != attack.exit_code:
        yield f"exit code {outcome.exit_code}, not {attack.exit_code}"
    if "Traceback" in outcome.stderr:
        yield "a traceback"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", outcome.stdout + outcome.stderr):
        yield "a control character"
    wanted = attack.message.replace("{folder}", str(folder))
    if not find_message(outcome).startswith(wanted):
        yield f"the message doesn't begin with {wanted!r}"
    for path in outcome.changed:
        if not any(fnmatchcase(path, pattern) for pattern in (*attack.left, *_KEPT)):
            yield f"{path} was left, changed or removed"


_KEPT = (".cache", ".cache/timings", ".cache/timings/*", ".cache/plans", ".cache/plans/*.json")
"""What a run may leave: how long the formats of this machine take, where it has more than one."""


def find_message(outcome: Outcome) -> str:
    """The last line of stderr that is ours, without its first word, or else stdout."""
    lines = [line for line in outcome.stderr.splitlines() if line.startswith(_OURS)]
    return lines[-1].partition(": ")[2] if lines else outcome.stdout


_OURS = ("stopdown: ", "Error: ")
"""How a message begins: by us, and by the parser of the command line."""


def _run(
    attack: Attack, folder: Path, words: list[str], tmp_path: Path, before: dict[str, str]
) -> Outcome:
    order = {
        "command": attack.command,
        "is_fresh": attack.is_fresh,
        "words": words,
        "folder": str(folder),
        "environment": _make_environment(attack, folder),
        "stdout": str(tmp_path / "stdout"),
        "stderr": str(tmp_path / "stderr"),
        "growth_bytes": attack.growth_bytes,
        "cpu_s": attack.cpu_s,
        "wall_s": attack.wall_s,
    }
    ended = ask_server(order)
    after = take_snapshot(folder)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return Outcome(
        ended["exit_code"],
        ended["ended_by"],
        *((tmp_path / name).read_text(errors="replace") for name in ("stdout", "stderr")),
        tuple(sorted(changed)),
    )


def _make_environment(attack: Attack, folder: Path) -> dict[str, str]:
    inside = {"HOME": ".home", "TMPDIR": ".tmp", "HF_HOME": ".hf", "STOPDOWN_CACHE": ".cache"}
    plain = {name: text for name, text in os.environ.items() if not name.startswith("HF_")}
    paths = {name: str(folder / path) for name, path in inside.items()}
    return {**plain, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", **paths, **attack.environment}


def take_snapshot(folder: Path) -> dict[str, str]:
    """Everything below a folder by its relative path: what it is, and for a file what is in it."""
    return {
        str(path.relative_to(folder)): _describe(path)
        for root, folders, files in os.walk(folder)
        for path in (Path(root, name) for name in (*folders, *files))
    }


def _describe(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link to {os.readlink(path)}"
    if not stat.S_ISREG(mode) or not mode & 0o400:
        return oct(mode)
    return f"{mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"


_TESTS = Path(__file__).parents[1]


@functools.cache
def _start_server() -> subprocess.Popen[str]:
    """The process that forks, one in each process that runs tests."""
    server = subprocess.Popen(
        [sys.executable, "-m", "hostile.fork_server"],
        cwd=_TESTS,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_ARENA_MAX": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_stop_server, server)
    return server


def _stop_server(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    server.stdout.close()
    server.wait(timeout=10)


def ask_server(order: dict[str, Any]) -> dict[str, Any]:
    """Have a process made by the one that forks, and wait for it: its exit code, or what ended it."""
    server = _start_server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the server of the attacks has ended"
    ended: dict[str, Any] = json.loads(answer)
    return ended


def copy_tiny(folder: Path, name: str = "cogvideox") -> Path:
    """A copy of a tiny pipeline of `stopdown.testing` as `folder/model`, to damage."""
    return Path(shutil.copytree(_save_tiny(name), folder / "model"))


@functools.cache
def _save_tiny(name: str) -> Path:
    from stopdown import testing

    root = tempfile.mkdtemp(prefix="attacks-")
    atexit.register(shutil.rmtree, root)
    return testing.save_pipeline(name, Path(root) / name)
