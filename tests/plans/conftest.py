"""A plan from the weights alone that several tests read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stopdown.plans.certified import certify_plan
from stopdown.records import Plan


@pytest.fixture(scope="module")
def certified(save_tiny: Callable[..., Path]) -> tuple[Path, Plan, list[tuple[str, str, int, int]]]:
    """The folder of a pipeline whose transformer overflows, its plan, and the progress told."""
    folder, told = save_tiny("cogvideox", overflow="transformer"), []
    return folder, certify_plan(folder, progress=lambda *said: told.append(said)), told
