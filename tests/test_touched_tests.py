"""The tests of what a change touches, which `make test` adds, and those that CI draws of the slow suite."""

from __future__ import annotations

import random

import pytest

from drawn_tests import choose_drawn
from touched_tests import list_tests

MODULES = (
    "src/stopdown/scaling/folding/folds.py",
    "src/stopdown/scaling/exponents/solver.py",
    "src/stopdown/errors.py",
)
TESTS = {
    "tests/scaling/folding/test_folds.py": "",
    "tests/scaling/folding/test_exact.py": "",
    "tests/pipelines/test_exact.py": "from stopdown.scaling.exponents.problem import Problem",
    "tests/frames/test_media.py": "from stopdown.frames.media import read_video",
    "tests/test_words.py": "import stopdown",
}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ("src/stopdown/scaling/exponents/solver.py", ["tests/pipelines/test_exact.py"]),
        (
            "src/stopdown/scaling/folding/folds.py",
            ["tests/scaling/folding/test_exact.py", "tests/scaling/folding/test_folds.py"],
        ),
        ("src/stopdown/frames/media.py", ["tests/frames/test_media.py"]),
        ("tests/test_words.py", ["tests/test_words.py"]),
        ("docs/index.md", []),
        ("src/stopdown/__init__.py", []),
    ],
)
def test_tests_of_touched_packages_are_listed(changed: str, found: list[str]) -> None:
    """A file's package decides: by what tests import, where they lie, and the names of its modules."""
    assert list_tests([changed], TESTS, MODULES) == found


def test_one_commit_draws_one_order() -> None:
    """The same commit draws the same tests, another one others, and no more than asked for."""
    names = [f"test_{number}" for number in range(100)]
    assert choose_drawn(names, "abc", 10) == choose_drawn(reversed(names), "abc", 10)
    assert choose_drawn(names, "abc", 10) != choose_drawn(names, "abd", 10)
    assert len(set(choose_drawn(names, "abc", 10))) == 10
    assert set(choose_drawn(names[:3], "abc", 10)) == set(names[:3])
    state = random.getstate()
    choose_drawn(names, "abc", 10)
    assert random.getstate() == state
