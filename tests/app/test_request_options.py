"""A field of a request is written once: commands, items, hashes and journals follow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from stopdown.app import generate_command
from stopdown.app.request_options import PAIRS, check_pairs
from stopdown.batch.jobs import sign_item
from stopdown.batch.prompts import Item, digest_request
from stopdown.errors import OptionError
from stopdown.pipelines.requests import FIELDS, MEDIA, check_values

NAMES = [entry.name for entry in FIELDS]
OTHERS: dict[type, Any] = {str: "other", int: 3, float: 0.5, Path: "other.png"}


@pytest.mark.parametrize("entry", FIELDS, ids=NAMES)
def test_a_field_tells_items_apart(entry: dataclasses.Field[Any]) -> None:
    """It is a field of an item; another value is another batch, another item and another journal."""
    value = OTHERS[entry.metadata["kind"]]
    plain, other = Item(1, prompt="a"), Item(1, **{"prompt": "a", entry.name: value})
    digests = {digest_request([x], {"source": "shapes"}, built_in=True) for x in (plain, other)}
    assert len(digests) == 2
    signed = {sign_item({}, x.make_request(), str(x.media)) for x in (plain, other)}
    assert len(signed) == 2
    assert entry.name in generate_command._RUN_IDENTITY
    assert (entry.name in other.media) == (entry.name in MEDIA)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("frames", 0, "frames=0 is less than 1."),
        ("strength", 1.5, "strength=1.5 isn't above 0 and at most 1."),
        ("seed", -1, "seed=-1 isn't a seed."),
        ("guidance", float("inf"), "guidance=inf isn't a number."),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: float, said: str) -> None:
    """The check stands beside the field, for the command line and for Python alike."""
    check_values({name: None})
    with pytest.raises(OptionError) as caught:
        check_values({name: value})
    assert caught.value.what == said


@dataclasses.dataclass(frozen=True)
class _Options:
    image: Path | None = None
    video: Path | None = None
    output: Path | None = None
    fix: bool = False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (_Options(image=Path("a"), video=Path("b")), "--image was given with --video."),
        (_Options(output=Path("a")), "-o was given without --fix."),
    ],
)
def test_a_pair_of_options_is_refused(options: _Options, said: str) -> None:
    """Rows of one table: what excludes each other, and what needs the other."""
    with pytest.raises(OptionError) as caught:
        check_pairs(options)
    assert caught.value.what == said


def test_pairs_that_fit_are_taken() -> None:
    """One of two is enough, and a needed one with what it needs."""
    check_pairs(_Options(image=Path("a")))
    check_pairs(_Options(output=Path("a"), fix=True))
    assert len({(x.option, x.other) for x in PAIRS}) == len(PAIRS)
