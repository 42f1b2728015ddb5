"""Observations as findings: one for each cause, worst first."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

import stopdown
import stopdown.testing
from stopdown.dtype_rules.findings import (
    SEVERITIES,
    generalise,
    make_finding,
    read_kinds,
    sort_findings,
    word_for_program,
)


def test_blanks_of_a_remedy_are_filled_in() -> None:
    """The component is that of the call, without its method."""
    finding = make_finding("force-upcast-unread", "vae.decode", "seen")
    assert "vae" in finding.remedy
    assert "{component}" not in finding.remedy
    assert finding.evidence == "seen"
    assert finding.severity == read_kinds()["force-upcast-unread"].severity


def test_findings_are_sorted_and_said_once() -> None:
    """The worst come first, in the order in which they were found; one of two alike stays, and both of
    two faults in one place."""
    worst = next(kind for kind, x in read_kinds().items() if x.severity == "error")
    least = next(kind for kind, x in read_kinds().items() if x.severity == "note")
    found = [
        make_finding(least, "a", "1"),
        make_finding(worst, "a", "2"),
        make_finding(worst, "a", "2"),
        make_finding(worst, "a", "3"),
    ]
    assert [x.evidence for x in sort_findings(found)] == ["2", "3", "1"]
    assert {x.severity for x in read_kinds().values()} <= set(SEVERITIES)


def test_repeated_blocks_share_a_path() -> None:
    """Numbers are one place."""
    assert generalise("blocks.12.attn1.to_q") == "blocks.*.attn*.to_q"


def test_a_program_gets_no_words_of_a_pipeline() -> None:
    """Its remedies name functions, and no option of the command line."""
    for kind in read_kinds():
        finding = word_for_program(make_finding(kind, "vae", ""))
        assert "pipe." not in finding.remedy, kind
        assert "--precision" not in finding.remedy, kind


@pytest.mark.parametrize("folder", ["rules", "explain"])
def test_functions_that_texts_name_exist(folder: str) -> None:
    """A remedy named a function that had moved out of the package."""
    files = (Path(stopdown.__file__).parent / "knowledge" / folder).glob("*.toml")
    texts = "".join(file.read_text("utf-8") for file in files)
    named = set(re.findall(r"\bstopdown\.([a-z0-9_.]+)\(", texts))
    assert named
    for name in named:
        functools.reduce(getattr, name.split("."), stopdown)
