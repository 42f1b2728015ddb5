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


def test_a_list_of_precisions_is_read() -> None:
    """Names, plans' files and lists by component are told apart; other spellings are known."""
    text = "fp32, float16,autocast,clamp,my/plan.json,transformer=bf16+vae=fp32"
    found = parse_precisions(text)
    assert found == ("fp32", "fp16", "autocast", "clamp", "my/plan.json", text.split(",")[-1])
    again = parse_precisions(["fp32,float16", "transformer=bf16,vae.decode=full", "vae=fp16"])
    assert again == ("fp32", "fp16", "transformer=bf16+vae.decode=fp32", "vae=fp16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp32", "it has 1"),
        ("", "it has 0"),
        ("fp16,half", "fp16 is listed twice"),
        (
            "fp32,fp17",
            "'fp17' is unknown. Known values are fp32, bf16, fp16, fp16-plain, autocast, clamp, auto",
        ),
        ("fp32,vae=fp16+vae=fp32", "asks for vae=fp16 and for vae=fp32"),
        ("fp32,transformer=bf16,vae=fp32", r"two ways.* For one write transformer=bf16\+vae=fp32"),
    ],
)
def test_other_lists_are_refused(text: str, message: str) -> None:
    """A list with fewer than two, with one twice, or with an unknown one is refused."""
    with pytest.raises(OptionError, match=message):
        parse_precisions(text)
