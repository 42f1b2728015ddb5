"""Something proves the tests: with a detector off, those that are named for it fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes.switching_off import DETECTORS

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", DETECTORS)
def test_without_a_detector_its_tests_fail(name: str) -> None:
    """In a process of its own, every named test fails; none of them is only missing."""
    named = DETECTORS[name][1]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "processes.switching_off",
        "--switch-off",
        name,
        "-q",
    ]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *(str(TESTS / test) for test in named)],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for test in named:
        assert f"FAILED tests/{test}" in done.stdout
