"""A command as `kill -9` would leave it at random moments, and what the same command makes of that.

SIGKILL leaves the files as they are at that moment, and nothing else. So one run is stopped at many
random moments, its folder is copied at each, and the run goes on; the same command then runs again in each
copy that differs from the others. The process that made the copy has ended by then, as one that was killed.

**Catches** files under final names that are half-written, what a rerun trips over, and what it leaves.
**Does not catch** what a machine without power leaves: everything that was written is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 3600


@dataclass(frozen=True)
class Killed:
    """A command, and what it makes.

    Attributes:
        words: after `stopdown`.
        makes: its results, files or folders, relative to its folder.
    """

    words: str
    makes: tuple[str, ...]


def start(words: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """A command in a folder, its messages added to a log."""
    command = [sys.executable, "-m", "stopdown", *words.split(), "-q"]
    with log.open("ab") as file:
        return subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=file, start_new_session=True
        )


def take_copies(
    words: str, folder: Path, copies: Path, *, mean_s: float, seed: int
) -> tuple[int, list[Path]]:
    """Run a command to its end: how often it was stopped, and copies of its folder that differ."""
    chance, seen, moments, known = random.Random(seed), dict[str, Path](), 0, None
    process = start(words, folder, copies / "log")
    until = time.monotonic() + LIMIT_S
    while process.poll() is None:
        assert time.monotonic() < until, (copies / "log").read_text()
        time.sleep(chance.expovariate(1 / mean_s))
        os.killpg(process.pid, signal.SIGSTOP)
        try:
            moments += 1
            listed = list_files(folder)
            if listed != known and (state := describe(folder)) not in seen:
                seen[state] = copies / str(len(seen))
                shutil.copytree(folder, seen[state], symlinks=True)
            known = listed
        finally:
            os.killpg(process.pid, signal.SIGCONT)
    assert process.returncode == 0, (copies / "log").read_text()
    return moments, list(seen.values())


def list_files(folder: Path) -> list[tuple[str, int, int]]:
    """Every path below a folder, with size and time."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            told = path.stat()
            found.append((str(path), told.st_size, told.st_mtime_ns))
    return found


def describe(folder: Path) -> str:
    """Every file below a folder, with its bytes."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path.relative_to(folder)).encode() + b"\0")
        if path.is_file():
            found.update(path.read_bytes() + b"\0")
    return found.hexdigest()


def list_strays(folder: Path) -> set[str]:
    """Temporary files and locks below a folder."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in names if name.endswith((".part", ".lock", ".old", ".cells"))}


def read_results(folder: Path, makes: tuple[str, ...]) -> dict[str, str]:
    """Results that are there: path to digest; of JSON its keys, because times are in it.

    Raises:
        ValueError: a JSON file is cut off.
    """
    roots = [folder / name for name in makes]
    files = [
        path for root in roots for path in (sorted(root.rglob("*")) if root.is_dir() else [root])
    ]
    found = {}
    for path in files:
        name = str(path.relative_to(folder))
        if not path.is_file() or any(part.startswith(".") for part in Path(name).parts):
            continue
        content = path.read_bytes()
        if path.suffix == ".json":
            content = json.dumps(sorted(json.loads(content))).encode()
        found[name] = "page" if path.suffix == ".html" else hashlib.sha256(content).hexdigest()
    return found


def count_kills(
    one: Killed, folder: Path, *, mean_s: float, most: int = 300, seed: int = 0
) -> tuple[Counter[str], list[str]]:
    """How a command and its reruns ended for kills at many moments, and what was wrong.

    Args:
        one: the command.
        folder: with what the command reads; it is copied.
        mean_s: between two of them.
        most: states that the command is run again from, drawn at random.
        seed: of the moments.
    """
    place = Path(f"{folder}-kills")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place / "run")
    (place / "copies").mkdir()
    moments, copies = take_copies(
        one.words, place / "run", place / "copies", mean_s=mean_s, seed=seed
    )
    expected, wrong = read_results(place / "run", one.makes), []
    known = list_strays(place / "run")
    assert expected, "nothing was made"
    counts = Counter(moments=moments, states=len(copies), half_written=0, reruns=0, wrong=0)
    drawn = random.Random(seed).sample(copies, min(most, len(copies)))
    for copy in sorted(drawn):
        left = read_results(copy, one.makes)
        half = [name for name in left if left[name] != expected.get(name)]
        if half and not any(name.endswith("batch.json") for name in half):
            counts["half_written"] += 1
            wrong.append(f"{copy.name}: {half}")
        log = place / f"log-{copy.name}"
        code = start(one.words, copy, log).wait(LIMIT_S)
        counts["reruns"] += 1
        stray = sorted(list_strays(copy) - known)
        if code or stray or read_results(copy, one.makes) != expected:
            counts["wrong"] += 1
            wrong.append(f"{copy.name}: {code}, {stray}, {log.read_text()[-500:]}")
    return counts, wrong


def count_pairs(
    one: Killed, folder: Path, *, count: int, most_s: float, known: Mapping[str, int]
) -> Iterator[tuple[Counter[str], list[str]]]:
    """Two processes that run one command in one folder at once: how both ended, and what was wrong.

    Args:
        one: the command.
        folder: with what the command reads; it is copied.
        count: pairs in all.
        most_s: seconds between their starts at most.
        known: counts of earlier pairs, to which these are added.

    Yields:
        Counts so far after each pair, and what was wrong with it.
    """
    counts = Counter({name: known.get(name, 0) for name in ("pairs", "both", "refused", "wrong")})
    chance = random.Random(counts["pairs"])
    alone = Path(f"{folder}-alone")
    shutil.rmtree(alone, ignore_errors=True)
    shutil.copytree(folder, alone)
    assert start(one.words, alone, Path(f"{alone}-log")).wait(LIMIT_S) == 0
    expected, known = read_results(alone, one.makes), list_strays(alone)
    for number in range(counts["pairs"], count):
        wrong = []
        place = Path(f"{folder}-pair-{number}")
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        logs = [Path(f"{place}-log-{name}") for name in "ab"]
        first = start(one.words, place, logs[0])
        time.sleep(chance.uniform(0, most_s))
        second = start(one.words, place, logs[1])
        codes = sorted(process.wait(LIMIT_S) for process in (first, second))
        counts["pairs"] += 1
        counts["both" if codes == [0, 0] else "refused"] += 1
        told = [log.read_text() for log in logs]
        stray = sorted(list_strays(place) - known)
        if (
            codes[0] != 0
            or codes[1] not in (0, 1, 2)
            or "Traceback" in "".join(told)
            or stray
            or read_results(place, one.makes) != expected
        ):
            counts["wrong"] += 1
            wrong.append(f"{number}: {codes}, {stray}, {[x[-400:] for x in told]}")
        yield counts, wrong
