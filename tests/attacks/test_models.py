"""Broken and hostile models: what every command that reads a SOURCE says, and that it leaves nothing.

Rows are generated: each JSON file of a model, each kind of breakage, each command. The default run takes
every breakage and every command at least once; the whole product is slow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from attacks.runner import MIB, Attack, copy_tiny, run_attack
from stopdown.planning.plan_files import seal_plan, write_plan
from stopdown.records import Plan

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate", "MODEL", "a circle", "--steps", "1", "-o", "OUT.mp4"),
    "check": ("check", "MODEL"),
    "plan": ("plan", "MODEL", "--steps", "1", "-o", "OUT.json"),
    "convert": ("convert", "MODEL", "OUT", "--plan", "PLAN"),
    "compare": ("compare", "MODEL", "--prompt", "a circle", "--steps", "1", "-o", "OUT.html"),
}
"""A command that reads a SOURCE, with the words that make it read all of it."""

Damage = Callable[[Path], None]


def edit(path: Path, **entries: Any) -> None:
    """Other values for fields of a JSON file; `a__b` is a field of the table `a`."""
    content = json.loads(path.read_text())
    for name, value in entries.items():
        *outer, last = name.split("__") if not name.startswith("_") else [name]
        table = content
        for part in outer:
            table = table.setdefault(part, {})
        table[last] = value
    path.write_text(json.dumps(content))


def write(content: bytes) -> Damage:
    return lambda path: void(path.write_bytes(content))


def void(_: object) -> None:
    """Nothing, whatever a call gave."""


def put_in(text: str) -> Damage:
    """Put a field with this text as its value before the others."""
    return lambda path: void(path.write_text('{"added": ' + text + "," + path.read_text()[1:]))


def replace(make: Callable[[Path], object]) -> Damage:
    """Something else in the place of a file."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def enlarge(path: Path) -> None:
    os.truncate(path, 70 * MIB)


UNREADABLE: Mapping[str, tuple[Damage, str]] = {
    "empty": (write(b""), "it is not JSON at line 1, column 1"),
    "not JSON": (write(b"{"), "it is not JSON at line 1"),
    "a list": (write(b"[]"), "it holds a list and not a table"),
    "a word": (write(b'"table"'), "it holds a str and not a table"),
    "deep": (write(b'{"a":' * 100_000), "it is nested deeper than 64"),
    "deep and whole": (put_in("[" * 500 + "]" * 500), "it is nested deeper than 64"),
    "NaN": (put_in("NaN"), "it holds the number NaN"),
    "5000 digits": (put_in("9" * 5000), "it holds an integer of 5000 digits"),
    "UTF-16": (write('{"a": 1}'.encode("utf-16")), "it is not UTF-8 at byte 0"),
    "half a pair": (put_in('"\\ud83d"'), "it holds half of a surrogate pair"),
    "huge": (enlarge, "it has 73400320 bytes, and at most"),
    "pipe": (replace(os.mkfifo), "it is not a regular file"),
    "folder": (replace(Path.mkdir), "it cannot be opened: Is a directory"),
    "loop": (
        replace(lambda path: path.symlink_to(path.name)),
        "it cannot be opened: Too many levels of symbolic links",
    ),
    "link to nothing": (
        replace(lambda path: path.symlink_to("nothing")),
        "it cannot be opened: No such file or directory",
    ),
}
"""What a JSON file may be instead of one, and what is said of it."""

FILES = (
    "model_index.json",
    "transformer/config.json",
    "text_encoder/config.json",
    "vae/config.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/tokenizer.json",
)


def make_row(
    name: str, command: str, damage: Damage, message: str, *, model: str = "cogvideox", **more: Any
) -> Attack:
    """A row that damages a tiny model, gives it to a command, and wants exit code 2 and nothing left."""

    def build(folder: Path) -> list[str]:
        damage(copy_tiny(folder, model))
        if command == "convert":
            empty = Plan("model", "", "CogVideoXPipeline", "fp16", {}, (), (), 1, "cpu", 0.0)
            write_plan(seal_plan(empty), folder / "PLAN")
        return [place(word, folder) for word in COMMANDS[command]]

    return Attack(
        f"{command}: {name}", build, 2, message.replace("MODEL", "{folder}/model"), **more
    )


def place(word: str, folder: Path) -> str:
    """A word of a command with the row's folder before its paths."""
    is_path = word.startswith(("MODEL", "OUT", "PLAN"))
    return str(folder / word.replace("MODEL", "model").replace("OUT", "out")) if is_path else word


def damage_file(file: str, damage: Damage) -> Damage:
    return lambda model: damage(model / file)


PRODUCT = [
    make_row(
        f"{file} {kind}",
        command,
        damage_file(file, damage),
        f"MODEL/{file} cannot be read as a table in JSON: {said}",
    )
    for file in FILES
    for kind, (damage, said) in UNREADABLE.items()
    for command in COMMANDS
]
# 7 files, 15 kinds, 5 commands: a step without a common factor visits every file, kind and command.
SAMPLE = PRODUCT[::11]


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.name)
def test_a_json_file_that_cannot_be_read(row: Attack, tmp_path: Path) -> None:
    """It is named with what is wrong with it, by every command, and nothing is left."""
    run_attack(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", PRODUCT, ids=lambda row: row.name)
def test_a_json_file_that_cannot_be_read_by_any_command(row: Attack, tmp_path: Path) -> None:
    """The whole product."""
    run_attack(row, tmp_path)
