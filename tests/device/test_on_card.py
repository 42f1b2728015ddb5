"""The table of a real card: facts are stored one by one, and a run that was killed goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "on_card.py"


def start(output: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--rehearse", "--output", str(output), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def read_rows(output: Path) -> Any:
    return json.loads(output.read_text())["rows"]


@pytest.mark.thorough
@pytest.mark.usefixtures("simulated")
def test_a_killed_run_keeps_its_facts_and_goes_on(tmp_path: Path) -> None:
    """A run that is killed behind its first fact has stored it; the next one ends the row and no more."""
    output = tmp_path / "card.json"
    killed = start(output, "--rows", "sums")
    assert killed.stdout is not None
    next(x for x in killed.stdout if x.startswith("sums |"))
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    first = read_rows(output)["sums"]
    assert len(first) > 1
    assert "ended" not in first
    said = start(output, "--rows", "sums").communicate()[0]
    assert read_rows(output)["sums"]["ended"], said
    said = start(output, "--rows", "sums").communicate()[0]
    assert "sums |" not in said
    assert said.splitlines()[-1].startswith("missing: tiny pipelines, CogVideoX-5B,")


@pytest.mark.thorough
def test_a_row_ends_with_whoever_started_it() -> None:
    """Its standard input closes when the table is killed: it does not hold the card for minutes more."""
    command = [sys.executable, str(SCRIPT), "--rehearse", "--inside", "certificate on the host"]
    row = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    row.communicate()
    assert row.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_a_run_that_is_killed_again_and_again_ends(tmp_path: Path) -> None:
    """Killed behind every third fact, a row still ends, and no fact is lost on the way."""
    output = tmp_path / "card.json"
    kills = 0
    known: set[str] = set()
    while not (output.exists() and read_rows(output)["sums"].get("ended")):
        run = start(output, "--rows", "sums")
        assert run.stdout is not None
        facts = (x for x in run.stdout if x.startswith("sums |"))
        last = [x for x, _ in zip(facts, range(3 + kills), strict=False)][-1:]
        if not last or last[0].startswith("sums | seconds"):
            run.communicate()
            break
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        kills += 1
        now = set(read_rows(output)["sums"])
        assert known <= now
        known = now
    row = read_rows(output)["sums"]
    assert row["ended"]
    assert "failure" not in row
    assert kills > 2


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_every_row_ends_on_the_simulated_device(tmp_path: Path) -> None:
    """The rehearsal ends every row, with the same bits under the guard and fp16 closer than bf16."""
    output = tmp_path / "card.json"
    said = start(output, "--minutes", "60").communicate()[0]
    assert said.splitlines()[-1] == "missing: nothing", said[-3000:]
    for name, row in read_rows(output).items():
        if "bf16" in row:
            assert row["fp16 by its certificate"]["error"] < row["bf16"]["error"], name
        guards = [value for fact, value in row.items() if fact.endswith(": guard")]
        assert all(x["same_bits"] and not x["repairs"] for x in guards), name
