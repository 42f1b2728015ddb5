"""Options of commands, made from the fields of a request."""

from __future__ import annotations

import dataclasses

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
from stopdown.pipelines.requests import FIELDS, Request

COMMANDS = (
    generate_command.GenerateOptions,
    batch_command.BatchOptions,
    compare_command.CompareOptions,
    plan_command.PlanOptions,
    fit_command.FitOptions,
    convert_command.ConvertOptions,
)


NAMES = [entry.name for entry in FIELDS]


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
