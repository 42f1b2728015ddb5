"""Every command on every kind of pipeline, as `tests/pipelines/test_command_matrix.py` runs them.

    python benchmarks/command_matrix.py                 # all kinds, one after the other
    python benchmarks/command_matrix.py svd wan --missing

Each cell is stored in `results/command_matrix.json` with its outcome, the commit of the code, and the
seconds of processor time that it took in the process of the tests, as soon as its kind is done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "command_matrix.json"
TESTS = "tests/pipelines/test_command_matrix.py"
sys.path[:0] = [str(ROOT / "tests" / "pipelines"), str(ROOT / "tests")]

from revision import describe_code  # noqa: E402
from test_command_matrix import COMMANDS  # noqa: E402

from stopdown.devices.environment import describe_machine  # noqa: E402 (the path is set above)
from stopdown.testing import PIPELINE_NAMES  # noqa: E402


def run_kind(name: str, commands: list[str]) -> dict[str, dict[str, Any]]:
    """Run cells of a kind: command to its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.xml"
        cells = [f"{TESTS}::test_every_command_on_every_kind[{name}-{x}]" for x in commands]
        words = ["-m", "slow or not slow", "-q", "-p", "no:cacheprovider", "--tb=line"]
        made = ["-o", "junit_family=xunit1", f"--junitxml={path}"]
        run = [sys.executable, "-m", "pytest", *cells, *words, *made]
        subprocess.run(run, cwd=ROOT, check=False)
        return dict(read_cell(x, name) for x in ElementTree.parse(path).iter("testcase"))


def read_cell(case: ElementTree.Element, name: str) -> tuple[str, dict[str, Any]]:
    """A command, and how it ended."""
    command = case.get("name", "").partition(f"[{name}-")[2].removesuffix("]")
    said = {x.get("name"): x.get("value") for x in case.iter("property")}
    failed = next((x.get("message", "") for x in case if x.tag in ("failure", "error")), None)
    cell: dict[str, Any] = {"cpu_s": float(said.get("cpu_s") or 0.0), "is_right": failed is None}
    return command, cell if failed is None else {**cell, "said": failed[:300]}


def main() -> None:
    """Run the kinds that are named, and store their cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help="all without any")
    parser.add_argument("--command", action="append", choices=COMMANDS, help="all without any")
    parser.add_argument("--missing", action="store_true", help="leave out cells that are stored")
    given = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}
    for name in given.kinds or PIPELINE_NAMES:
        known = stored["cells"].setdefault(name, {})
        wanted = [x for x in given.command or COMMANDS if not (given.missing and x in known)]
        if not wanted:
            continue
        code = describe_code()
        known.update({x: {**cell, "code": code} for x, cell in run_kind(name, wanted).items()})
        stored["command"] = "python benchmarks/command_matrix.py"
        stored["machine"] = describe_machine()
        RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
