"""Classes of other programs, from checkouts that environment variables name; skipped without them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from models.foreign_models import EXAMPLES, find_missing

CHECKS = Path(__file__).parents[1] / "readers" / "foreign_checks.py"
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "programs.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_class_of_another_program_is_brought_to_fp16(name: str) -> None:
    """Its residual stream or feature maps beyond fp16: exact in fp32, nearer to it in fp16 than bf16."""
    if missing := find_missing(EXAMPLES[name].program):
        pytest.skip(f"needs a checkout of {EXAMPLES[name].program}: {', '.join(missing)} not set")
    command = [sys.executable, str(BENCHMARK), "--row", name, EXAMPLES[name].ways[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["exact"]
    assert row["rescaled fp16"]["l2"] < row["bf16"]["l2"]
    assert row["folds"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_class_of_another_program_is_checked_and_mended(name: str) -> None:
    """Cast to fp16 by hand it stops where `check` says so, and nowhere else; mended it runs."""
    if missing := find_missing(EXAMPLES[name].program):
        pytest.skip(f"needs a checkout of {EXAMPLES[name].program}: {', '.join(missing)} not set")
    command = [sys.executable, str(CHECKS), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    refused = [place for severity, _, place in told["found"] if severity == "error"]
    assert bool(told["plain"]) == bool(refused)
    assert told["mended"] == ""
    assert not [place for severity, _, place in told["left"] if severity == "error"]
    if name == "imaginAIry VideoUNet":
        assert "VideoUNet:time_embed.0" in refused
