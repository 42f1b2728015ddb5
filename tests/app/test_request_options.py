"""A field of a request is written once: commands, items, hashes and journals follow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import typer

from stopdown.app import (
    batch_command,
    compare_command,
    convert_command,
    fit_command,
    generate_command,
    plan_command,
)
from stopdown.app.flags import LEFT_OUT, make_options
from stopdown.app.registration import list_options
from stopdown.app.request_options import PAIRS, check_pairs
from stopdown.batch.jobs import sign_item
from stopdown.batch.prompts import Item, digest_request
from stopdown.errors import OptionError
from stopdown.pipelines.requests import FIELDS, MEDIA, Request, check_values

COMMANDS = (
    generate_command.GenerateOptions,
    batch_command.BatchOptions,
    compare_command.CompareOptions,
    plan_command.PlanOptions,
    fit_command.FitOptions,
    convert_command.ConvertOptions,
)
NAMES = [entry.name for entry in FIELDS]
OTHERS: dict[type, Any] = {str: "other", int: 3, float: 0.5, Path: "other.png"}


def test_every_field_is_described() -> None:
    """Whatever is asked of a pipeline has a kind and a help; only further arguments have none."""
    assert {x.name for x in dataclasses.fields(Request)} - {*NAMES} == {"arguments"}
    assert all(entry.metadata["help"].endswith(".") for entry in FIELDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_every_field_but_those_of_its_row(command: type) -> None:
    """A field is an option of each command, unless a row of the table leaves it out there."""
    name = command.__name__.removesuffix("Options").lower()
    taken = {entry.name for entry in list_options(command)}
    left_out = {*LEFT_OUT.get(name, LEFT_OUT["run"])} - {"prompt"}
    assert {*NAMES} - {"prompt"} - taken == left_out
    needed = [x.name for x in dataclasses.fields(command) if x.default is dataclasses.MISSING]
    options = command(**dict.fromkeys(needed, "shapes"))
    defaults = {x.name: x.default for x in FIELDS}
    assert all(getattr(options, x) == defaults[x] for x in left_out)


def test_a_new_field_becomes_an_option() -> None:
    """The class of options is made from the fields, with help, type and default."""

    @dataclasses.dataclass
    class Wider:
        shift: float | None = dataclasses.field(
            default=None, metadata={"kind": float, "help": "Shift of the timesteps."}
        )

    made = make_options("Made", dataclasses.fields(Wider))
    (entry,) = (x for x in dataclasses.fields(made) if x.name == "shift")
    assert (entry.default, made().shift) == (None, None)
    (option,) = entry.type.__metadata__
    assert isinstance(option, typer.models.OptionInfo)
    assert option.help == "Shift of the timesteps."


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
        ("strength", 1.5, "strength=1.5 is not above 0 and at most 1."),
        ("seed", -1, "seed=-1 is not a seed."),
        ("guidance", float("inf"), "guidance=inf is not a number."),
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
