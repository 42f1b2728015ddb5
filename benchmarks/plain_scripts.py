"""Ordinary scripts with plain Python and with `stopdown run`, each in a fresh interpreter: what differs.

    python benchmarks/run.py plain_scripts

The scripts and what counts as the same are those of `tests/pipelines/test_plain_scripts.py`: all that a
script writes to stdout, the values of its models and how often code was compiled among it, and its exit
code or the signal that ended it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stopdown.devices.environment import describe_machine
from stopdown.testing import save_pipeline

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pipelines.test_plain_scripts import ROWS, SCRIPTS, Ended, Row, judge, run_words

STORED = Path(__file__).parent / "results" / "plain_scripts.json"


def run_row(row: Row, folder: Path) -> dict[str, Any]:
    """A script both ways, and what differs."""
    model = save_pipeline("sd", folder / "sd") if "MODEL" in row.words else ""
    words = [str(model) if x == "MODEL" else x for x in row.words]
    script = [str(SCRIPTS / (row.script if "." in row.script else f"{row.script}.py")), *words]
    ended: list[Ended] = []
    seconds: list[float] = []
    for guarded in (False, True):
        begun = time.perf_counter()
        ended.append(run_words(script, guarded, True, folder, row.stdin, row.needs_torch))
        seconds.append(round(time.perf_counter() - begun, 1))
    difference = ""
    try:
        judge(row, *ended)
    except AssertionError as error:
        difference = str(error)[:1000]
    return {
        "script": str(row),
        "exit_code": [x.code for x in ended],
        "stdout_characters": [len(x.stdout) for x in ended],
        "same_stdout": ended[0].stdout == ended[1].stdout,
        "seconds": seconds,
        "difference": difference,
    }


def main() -> None:
    """Run the scripts, and store each row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a script's name")
    parser.add_argument("--print", action="store_true", help="store nothing")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        if options.only in str(row):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run_row(row, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
            if not options.print:
                store(rows)


def store(rows: list[dict[str, Any]]) -> None:
    """Write the rows with their counts."""
    different = [x["script"] for x in rows if x["difference"]]
    made = {
        "command": "python benchmarks/plain_scripts.py",
        "machine": describe_machine(),
        "scripts": len(rows),
        "the_same": len(rows) - len(different),
        "different": different,
        "rows": rows,
    }
    STORED.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
