"""Attacks on running programs, as counts: threads, with faults in the middle; signals; kills; pairs.

    python benchmarks/attacks.py            # all of them
    python benchmarks/attacks.py threads
    python benchmarks/attacks.py signals --count 300 --command generate
    python benchmarks/attacks.py kills --mean 0.01
    python benchmarks/attacks.py pairs --count 5

Each attack is a row of `ATTACKS`: a name, and a function that returns its counts. What it found replaces
the entry of that name in `results/attacks.json`; the other entries stay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "attacks.json"
sys.path.insert(0, str(ROOT / "tests"))

from guarded_threads import call_from_threads  # noqa: E402 (the path is set above)
from kill_tries import Killed, count_kills, count_pairs  # noqa: E402
from signal_tries import count_tries  # noqa: E402
from stopdown.environment import describe_machine  # noqa: E402


def attack_threads(given: argparse.Namespace) -> Mapping[str, int]:
    """Call a guarded module 10,000 times from 8 threads; inputs overflow more and more."""
    return call_from_threads(10_000, 8)


COMMANDS = {
    "generate": Killed("generate shapes circle --steps 1 -o a.mp4", ("a.mp4", "a.mp4.json")),
    "plan": Killed(
        "plan shapes --steps 1 --frames 9 --height 32 --width 32 -o b.json", ("b.json",)
    ),
    "convert": Killed(
        "convert shapes converted --plan plan.json --frames 9 --height 32 --width 32",
        ("converted",),
    ),
    "batch": Killed("batch shapes --prompts prompts.txt -o out --steps 1", ("out",)),
    "compare": Killed("compare shapes --precision fp16,bf16 --steps 1 -o c.html", ("c.html",)),
    "check": Killed("check shapes --device v100", ()),
    "export": Killed("export plan.json scales.txt --scales --force", ("scales.txt",)),
    "report": Killed("report made.mp4.json -o d.html", ("d.html",)),
    "explain": Killed("explain black", ()),
    "doctor": Killed("doctor", ()),
    "run": Killed("run script.py", ()),
}
"""Commands that are stopped, by their names, and what they make."""


def attack_signals(given: argparse.Namespace) -> Mapping[str, Any]:
    """Stop each command at random moments by Ctrl-C or SIGTERM: right is one message, 130 or 143, and
    nothing left behind."""
    counts = {}
    with prepared_folder() as here:
        for name, one in COMMANDS.items():
            if given.command in (None, name):
                found, wrong = count_tries(
                    one.words.split(), here, count=given.count, mean_s=given.mean, makes=one.makes
                )
                counts[name] = dict(found)
                print(name, dict(found), *map(json.dumps, wrong[:5]), sep="\n  ", flush=True)
    return counts


@contextlib.contextmanager
def prepared_folder() -> Iterator[Path]:
    """A folder with what the commands read."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "files"
        here.mkdir()
        (here / "prompts.txt").write_text("a red circle\na blue square\n")
        (here / "script.py").write_text("import torch, diffusers\nprint(torch.ones(2).sum())\n")
        for words in (
            f"plan shapes --steps 1 {SMALL} -o plan.json",
            "generate shapes a --steps 1 -o made.mp4",
        ):
            command = [sys.executable, "-m", "stopdown", *words.split(), "-q"]
            subprocess.run(command, cwd=here, check=True, stdout=subprocess.DEVNULL)
        yield here


SMALL = "--frames 9 --height 32 --width 32"
KILLED = {
    "generate": Killed(
        "generate shapes circle --steps 2 --frames 9 --journal journal -o a.mp4 --force",
        ("a.mp4", "a.mp4.json"),
    ),
    "batch": Killed("batch shapes --prompts prompts.txt -o out --steps 1 --frames 9", ("out",)),
    "plan": Killed(f"plan shapes --steps 1 {SMALL} -o b.json --force", ("b.json",)),
    "convert": Killed(f"convert shapes converted --plan plan.json {SMALL} --force", ("converted",)),
    "export": Killed("export plan.json scales.txt --scales --force", ("scales.txt",)),
}
"""Commands that are killed, and what they make."""


def attack_kills(given: argparse.Namespace) -> Mapping[str, Any]:
    """Leave each command as `kill -9` does, at random moments, and run it again: nothing half-written, and
    the results of a run that nobody disturbed."""
    return _attack_each(given, lambda one, here: count_kills(one, here, mean_s=given.mean))


def attack_pairs(given: argparse.Namespace) -> Mapping[str, Any]:
    """Run each command twice at once in one folder: one output, one journal, one batch."""
    return _attack_each(
        given, lambda one, here: count_pairs(one, here, count=given.count, most_s=2.0)
    )


def _attack_each(
    given: argparse.Namespace, attack: Callable[[Killed, Path], tuple[Mapping[str, int], list[str]]]
) -> Mapping[str, Any]:
    counts = {}
    with prepared_folder() as here:
        for name, one in KILLED.items():
            if given.command in (None, name):
                found, wrong = attack(one, here)
                counts[name] = dict(found)
                print(name, dict(found), *wrong[:5], sep="\n  ", flush=True)
    return counts


ATTACKS: dict[str, Callable[[argparse.Namespace], Mapping[str, Any]]] = {
    "threads": attack_threads,
    "signals": attack_signals,
    "kills": attack_kills,
    "pairs": attack_pairs,
}


def main() -> None:
    """Run the attacks that are named, and store what each of them found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attacks", nargs="*", help=f"of {', '.join(ATTACKS)}; all without any")
    parser.add_argument("--command", choices=COMMANDS, help="the only one to attack")
    parser.add_argument("--count", type=int, default=300, help="signals or pairs of each command")
    parser.add_argument("--mean", type=float, default=0.02, help="seconds between two moments")
    given = parser.parse_args()
    wanted = given.attacks or list(ATTACKS)
    for name in wanted:
        if name not in ATTACKS:
            parser.error(f"there is no attack {name!r}; there are {', '.join(ATTACKS)}")
    for name in wanted:
        attack = ATTACKS[name]
        counts = dict(sorted(attack(given).items()))
        stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        if given.command:  # the other commands' counts stay
            counts = {**stored.get(name, {}).get("counts", {}), **counts}
        stored[name] = {
            "command": f"python benchmarks/attacks.py {name} --count {given.count} --mean {given.mean:g}",
            "what": " ".join((attack.__doc__ or "").split()),
            "machine": describe_machine(),
            "counts": counts,
        }
        RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {json.dumps(counts)}", flush=True)


if __name__ == "__main__":
    main()
