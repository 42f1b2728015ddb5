"""Stress tests of running programs, as counts: threads with faults, signals, kills and pairs.

    python benchmarks/attacks.py            # all of them
    python benchmarks/attacks.py threads
    python benchmarks/attacks.py signals --count 300 --command generate
    python benchmarks/attacks.py kills --mean 0.01
    python benchmarks/attacks.py pairs --count 5 --missing

Each attack is a row of `ATTACKS`: a name, and a function that yields counts by command. They are stored in
`results/attacks.json` as they come, so that a run that was stopped goes on with `--missing`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "attacks.json"
sys.path.insert(0, str(ROOT / "tests"))

from kill_tries import Killed, count_kills, count_pairs, start  # noqa: E402
from revision import describe_code  # noqa: E402

from processes.guarded_threads import call_from_threads  # noqa: E402 (the path is set above)
from processes.signal_tries import count_tries  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402

Counts = Iterator[tuple[str, Mapping[str, int]]]


def attack_threads(given: argparse.Namespace) -> Counts:
    """Call a guarded module 10,000 times from 8 threads; inputs overflow more and more."""
    counted = ("command", "code")
    found = Counter({k: x for k, x in given.known.get(_MODULE, {}).items() if k not in counted})
    while found["calls"] < _CALLS:
        found += call_from_threads(_CALLS // 10, 8, first=found["calls"])
        print(_MODULE, dict(found), flush=True)
        yield _MODULE, found


_MODULE, _CALLS = "guarded module", 10_000


SMALL = "--frames 9 --height 32 --width 32"
COMMANDS = {
    "generate": Killed("generate shapes circle --steps 1 -o a.mp4", ("a.mp4", "a.mp4.json")),
    "plan": Killed("plan shapes -o b.json", ("b.json",)),
    "convert": Killed(
        "convert shapes converted --plan plan.json",
        ("converted",),
    ),
    "batch": Killed("batch shapes --prompts prompts.txt -o out --steps 1", ("out",)),
    "compare": Killed(
        f"compare shapes --prompt circle --precisions fp16,bf16 --steps 1 {SMALL} -o c.html",
        ("c.html",),
    ),
    "check": Killed("check shapes --device v100", ()),
    "report": Killed("report made.mp4.json -o d.html", ("d.html",)),
    "explain": Killed("explain black", ()),
    "doctor": Killed("doctor", ()),
    "run": Killed("run script.py", ()),
}
"""Commands that are stopped, by their names, and what they make."""


def attack_signals(given: argparse.Namespace) -> Counts:
    """Stop each command at random moments by Ctrl-C or SIGTERM: right is one message, 130 or 143, and
    nothing left behind but whole results."""

    def attack(name: str, one: Killed, here: Path) -> Attacked:
        known = given.known.get(name, {})
        found = Counter({x: known.get(x, 0) for x in ("tries", "right", "wrong", "rounds")})
        run_s = _measure(one, here)
        for _ in range(given.rounds):  # a round may be over before all of its tries
            count = min(_ROUND, given.count - found["tries"])
            if count <= 0:
                break
            with tempfile.TemporaryDirectory() as place:
                words, copy = one.words.split(), shutil.copytree(here, Path(place) / "files")
                mean_s, seed = given.mean or run_s / count, found["rounds"]
                more, bad = count_tries(
                    words, copy, count=count, mean_s=mean_s, makes=one.makes, seed=seed
                )
            found.update(more)
            found["rounds"] += 1
            yield found, list(map(json.dumps, bad))

    yield from _attack_each(given, COMMANDS, attack)


_ROUND = 60
"""Tries of one run of a command; each run draws its moments anew."""


def _measure(one: Killed, folder: Path) -> float:
    """Seconds that a command takes if nobody disturbs it."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        begun = time.monotonic()
        start(one.words, Path(place), Path(place) / "log").wait()
        return time.monotonic() - begun


@contextlib.contextmanager
def prepared_folder() -> Iterator[Path]:
    """A folder with what the commands read."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "files"
        here.mkdir()
        (here / "prompts.txt").write_text("a red circle\na blue square\n")
        (here / "script.py").write_text("import torch, diffusers\nprint(torch.ones(2).sum())\n")
        for words in (
            "plan shapes -o plan.json",
            "generate shapes a --steps 1 -o made.mp4",
        ):
            command = [sys.executable, "-m", "stopdown", *words.split(), "-q"]
            subprocess.run(command, cwd=here, check=True, stdout=subprocess.DEVNULL)
        yield here


KILLED = {
    "generate": Killed(
        "generate shapes circle --steps 2 --frames 9 --journal journal -o a.mp4 --force",
        ("a.mp4", "a.mp4.json"),
    ),
    "batch": Killed("batch shapes --prompts prompts.txt -o out --steps 1 --frames 9", ("out",)),
    "plan": Killed("plan shapes -o b.json --force", ("b.json",)),
    "convert": Killed("convert shapes converted --plan plan.json --force", ("converted",)),
}
"""Commands that are killed, and what they make."""


def attack_kills(given: argparse.Namespace) -> Counts:
    """Leave each command as `kill -9` does, at random moments, and run it again: nothing half-written, and
    the results of a run that nobody disturbed."""

    def attack(name: str, one: Killed, here: Path) -> Attacked:
        yield count_kills(one, here, mean_s=given.mean or 0.02, most=given.count)

    yield from _attack_each(given, KILLED, attack)


def attack_pairs(given: argparse.Namespace) -> Counts:
    """Run each command twice at once in one folder: one output, one journal, one batch."""

    def attack(name: str, one: Killed, here: Path) -> Attacked:
        known = given.known.get(name, {})
        yield from count_pairs(one, here, count=given.count, most_s=2.0, known=known)

    yield from _attack_each(given, KILLED, attack)


Attacked = Iterator[tuple[Mapping[str, int], list[str]]]
"""Counts as they grow, each time with what went wrong since the last."""


def _attack_each(
    given: argparse.Namespace,
    commands: Mapping[str, Killed],
    attack: Callable[[str, Killed, Path], Attacked],
) -> Counts:
    wanted = [x for x in given.command or commands if x in commands and not _is_done(given, x)]
    if not wanted:
        return
    with prepared_folder() as here:
        for name in wanted:
            for found, wrong in attack(name, commands[name], here):
                print(name, dict(found), *wrong[:5], sep="\n  ", flush=True)
                yield name, dict(found)


def _is_done(given: argparse.Namespace, name: str) -> bool:
    """Whether the count of a command is stored, with all its tries or pairs if it has any."""
    known = given.known.get(name)
    return known is not None and known.get("tries", known.get("pairs", given.count)) >= given.count


ATTACKS: dict[str, Callable[[argparse.Namespace], Counts]] = {
    "threads": attack_threads,
    "signals": attack_signals,
    "kills": attack_kills,
    "pairs": attack_pairs,
}


def main() -> None:
    """Run the attacks that are named, and store what each of them found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attacks", nargs="*", help=f"of {', '.join(ATTACKS)}; all without any")
    parser.add_argument(
        "--command", choices=COMMANDS, action="append", help="to attack; each without"
    )
    parser.add_argument(
        "--count", type=int, default=300, help="signals, reruns or pairs of each command"
    )
    parser.add_argument(
        "--mean", type=float, help="seconds between two moments; without it, over a whole run"
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="go on from what is stored, and leave out what is done",
    )
    parser.add_argument(
        "--rounds", type=int, default=100, help=f"of {_ROUND} signals, for each command, at most"
    )
    given = parser.parse_args()
    wanted = given.attacks or list(ATTACKS)
    for name in wanted:
        if name not in ATTACKS:
            parser.error(f"there is no attack {name!r}; there are {', '.join(ATTACKS)}")
    for name in wanted:
        given.known = read_stored().get(name, {}).get("counts", {}) if given.missing else {}
        for command, counts in ATTACKS[name](given):
            store(name, command, counts, given)


def read_stored() -> dict[str, Any]:
    """What attacks found so far."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def store(name: str, command: str, counts: Mapping[str, int], given: argparse.Namespace) -> None:
    """Put what one attack on one command found in the place of what was found before."""
    stored = read_stored()
    entry = stored.setdefault(name, {"counts": {}})
    entry["counts"][command] = {
        **dict(sorted(counts.items())),
        "command": f"python benchmarks/attacks.py {name} --command {command} --count {given.count}"
        f"{f' --mean {given.mean:g}' if given.mean else ''}"
        if name != "threads"
        else "python benchmarks/attacks.py threads",
        "code": describe_code(),
    }
    entry["command"] = f"python benchmarks/attacks.py {name}"
    entry["what"] = " ".join((ATTACKS[name].__doc__ or "").split())
    entry["machine"] = describe_machine()
    RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
