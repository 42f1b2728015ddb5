"""Lists of precisions to compare."""

from __future__ import annotations

import pytest

from stopdown.comparison.precision_lists import parse_precisions
from stopdown.errors import OptionError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fp32, bf16,fp16-plain", ("fp32", "bf16", "fp16-plain")),
        (("fp32,autocast", "clamp"), ("fp32", "autocast", "clamp")),
        (("fp32", "transformer=bf16,vae=fp32"), ("fp32", "transformer=bf16+vae=fp32")),
        ("fp32,transformer=bf16+vae=fp32", ("fp32", "transformer=bf16+vae=fp32")),
    ],
)
def test_lists_are_split_at_commas(given: str, expected: tuple[str, ...]) -> None:
    """A precision by component is one entry, with a plus inside of a list."""
    assert parse_precisions(given) == expected


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("fp32", "it has 1"),
        ("fp32,bf16,fp32", "fp32 is listed twice"),
        ("fp32,a=bf16,b=fp32", "can be read in two ways"),
    ],
)
def test_lists_that_say_nothing_are_refused(given: str, found: str) -> None:
    """A comparison has two precisions, each of them once."""
    with pytest.raises(OptionError, match=found):
        parse_precisions(given)
