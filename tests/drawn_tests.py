"""Draw a share of the slow suite: `pytest -m drawn --draw COMMIT` runs some of the tests marked `drawn`.

A test is marked once it was seen to pass, so a draw never meets one that nobody has run. The commit decides
which are drawn, so the same commit draws the same ones. After the time limit the rest is skipped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import pytest

COUNT = 40
"""Tests of one draw."""

_BEGUN = time.monotonic()


def choose_drawn(names: Iterable[str], commit: str, count: int) -> list[str]:
    """Return the names that a commit draws, in the order in which they are run."""
    listed = sorted(names)
    return random.Random(commit).sample(listed, min(count, len(listed)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a draw."""
    parser.addoption("--draw", default="", help="the commit that draws tests marked drawn")
    parser.addoption("--within", type=float, default=480.0, help="seconds for drawn tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the drawn tests, in the order of the draw."""
    if not (commit := config.getoption("draw")):
        return
    pool = {item.nodeid: item for item in items if item.get_closest_marker("drawn")}
    drawn = [pool[name] for name in choose_drawn(pool, commit, COUNT)]
    config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
    items[:] = drawn


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a drawn test once the time is over."""
    within = item.config.getoption("within")
    if item.config.getoption("draw") and time.monotonic() - _BEGUN > within:
        pytest.skip(f"The {within:.0f} seconds for drawn tests are over.")
