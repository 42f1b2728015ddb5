"""A command is made from the dataclass of its options: names, order, defaults, help and exit code."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Annotated, Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from stopdown.app import commands
from stopdown.app.registration import add_command


@dataclass(frozen=True)
class PaintOptions:
    """Paint a wall."""

    wall: Annotated[str, typer.Argument(metavar="WALL", help="What to paint.")]
    coats: Annotated[int, typer.Option(help="How often.")] = 2
    colours: Annotated[tuple[str, ...], typer.Option("--colour", help="In what.")] = ("white",)
    rooms: Annotated[tuple[int, ...], typer.Option(help="Where.")] = ()


def run_paint(*words: str, code: int = 0) -> tuple[Any, list[PaintOptions]]:
    """The result of a small command line, and the options that reached the command."""
    heard: list[PaintOptions] = []

    def main(options: PaintOptions) -> int:
        heard.append(options)
        return code

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback()(lambda: None)
    add_command(app, "paint", main)
    return CliRunner().invoke(app, ["paint", *words]), heard


def test_defaults_are_those_of_the_fields() -> None:
    """What nobody gave is what the dataclass says, tuples too."""
    result, heard = run_paint("north")
    assert result.exit_code == 0
    assert heard == [PaintOptions("north")]


def test_what_was_given_arrives() -> None:
    """Values are converted; one that is given again is a tuple."""
    _, heard = run_paint(
        *("north", "--coats", "3", "--colour", "red", "--colour", "blue", "--rooms", "1")
    )
    assert heard == [PaintOptions("north", 3, ("red", "blue"), (1,))]


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_exit_code_is_what_main_gives(code: int) -> None:
    """`main` decides it."""
    assert run_paint("north", code=code)[0].exit_code == code


def test_a_field_without_default_is_required() -> None:
    """Typer refuses the command, and nothing is done."""
    result, heard = run_paint()
    assert (result.exit_code, heard) == (2, [])
    assert "Missing argument 'WALL'" in result.output


def test_help_is_that_of_the_dataclass() -> None:
    """The docstring, and each field in its order with its text and default."""
    shown = " ".join(run_paint("--help")[0].output.split())
    assert re.search(
        r"Paint a wall\. .*What to paint.*--coats.*How often.*2\].*--colour.*In what.*--rooms.*Where",
        shown,
    )
    assert "paint [OPTIONS] WALL " in shown
    assert "WALL What to paint." in shown


def test_every_command_takes_the_fields_of_its_record() -> None:
    """No command has a parameter that its dataclass lacks; its own come first, those of all last."""
    found = typer.main.get_command(commands.app).commands  # type: ignore[attr-defined]
    mains = [
        getattr(module, f"run_{name}")
        for name, module in vars(commands).items()
        if name.endswith("_command") and isinstance(module, ModuleType)
    ]
    records = [get_type_hints(main)["options"] for main in mains]
    shown = [
        [parameter.name for parameter in command.params if parameter.name != "help"]
        for command in found.values()
    ]
    taken = [{entry.name for entry in fields(record)} for record in records]
    assert len(shown) == len(taken)
    for names in shown:
        (record,) = [
            kind for kind, known in zip(records, taken, strict=True) if known == set(names)
        ]
        own = list(vars(record)["__annotations__"])
        assert names[: len(own)] == own
        assert names[-3:] == ["quiet", "verbose", "json"]
    assert len(found) == len(records) > 10


@dataclass(frozen=True)
class DrawOptions:
    """Draw one thing."""

    source: Annotated[str, typer.Argument(metavar="SOURCE", help="By whom.")]
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="What.")] = None
    steps: Annotated[int, typer.Option(help="How often.")] = 1


@dataclass(frozen=True)
class DrawSeveralOptions:
    """Draw several things."""

    source: Annotated[str, typer.Argument(metavar="SOURCE", help="By whom.")]
    prompt: Annotated[tuple[str, ...], typer.Option(help="What.")] = ()
    steps: Annotated[int, typer.Option(help="How often.")] = 1


@pytest.mark.parametrize("kind", [DrawOptions, DrawSeveralOptions])
@pytest.mark.parametrize(
    "words",
    [
        ("me", "a red ball", "--steps", "3"),
        ("me", "--prompt", "a red ball", "--steps", "3"),
        ("--prompt=a red ball", "me", "--steps", "3"),
    ],
)
def test_a_prompt_is_taken_in_both_forms(kind: Any, words: tuple[str, ...]) -> None:
    """A command that takes a prompt takes it as a word and as --prompt, in any order."""
    heard: list[Any] = []

    def main(options: Any) -> int:
        heard.append(options)
        return 0

    main.__annotations__["options"] = kind
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback()(lambda: None)
    add_command(app, "draw", main)
    result = CliRunner().invoke(app, ["draw", *words])
    assert result.exit_code == 0, result.output
    wanted = "a red ball" if kind is DrawOptions else ("a red ball",)
    assert (heard[0].source, heard[0].prompt, heard[0].steps) == ("me", wanted, 3)
