"""Problems of a source: each is named, the worst first, in one error."""

from __future__ import annotations

import pytest

from stopdown.errors import SourceError
from stopdown.sources.source_problems import SourceProblem, refuse_problems


def test_all_problems_are_in_one_error_worst_first() -> None:
    """What is expected and what to do are not repeated."""
    found = [
        SourceProblem("a", 3, "A is missing.", "It is whole.", "Download it."),
        SourceProblem("b", 1, "B is damaged.", "It is whole.", "Download it."),
    ]
    with pytest.raises(SourceError) as caught:
        refuse_problems("m", found)
    assert caught.value.what == "The model m has 2 problems. (1) B is damaged. (2) A is missing."
    assert (caught.value.expected, caught.value.remedy) == ("It is whole.", "Download it.")


def test_one_problem_keeps_its_own_words_and_none_is_no_error() -> None:
    """Nothing is added to a single sentence."""
    refuse_problems("m", [])
    with pytest.raises(SourceError) as caught:
        refuse_problems("m", [SourceProblem("a", 3, "A is missing.", "E.", "R.")])
    assert caught.value.what == "A is missing."
