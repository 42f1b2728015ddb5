"""Defaults of a user's own: `stopdown.toml`, or the table `[tool.stopdown]` of `pyproject.toml`.

The nearest such file counts, in the folder of the command or above it. Its keys are options without their
dashes, for every command that has them; a table named after a command holds those for it alone:

    device = "cuda:1"

    [generate]
    steps = 30

What is typed wins over the file. An option that no command has is refused by its name.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from stopdown.errors import OptionError
from stopdown.files.json_files import UnreadableError, read_small_file

NAME = "stopdown.toml"
_MOST_BYTES = 2**16


def read_defaults(
    commands: Mapping[str, Collection[str]],
) -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """The file that gives defaults, and those of each command; None without such a file."""
    try:
        here = Path.cwd()
    except OSError as error:
        raise OptionError(
            f"The folder in which this command was started no longer exists: {error.strerror}.",
            expected="It was deleted or moved after the shell had entered it.",
            remedy="Go to a folder that exists: cd ~",
        ) from error
    for place in (here, *here.parents):
        for path in (place / NAME, place / "pyproject.toml"):
            table = _read_table(path) if path.is_file() else None
            if table is not None:
                return path, _sort(table, commands, path)
    return None, {}


def _read_table(path: Path) -> dict[str, Any] | None:
    """What a file sets; None for a project that says nothing of Stopdown."""
    try:
        content = tomllib.loads(read_small_file(path, most_bytes=_MOST_BYTES).decode("utf-8"))
    except (UnreadableError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        if path.name != NAME:
            return None  # it is another program's, which will say so
        raise OptionError(
            f"The file {path} cannot be read as TOML: {error}.",
            expected="It sets defaults of options.",
            remedy="Correct it, or remove it.",
        ) from error
    found = content if path.name == NAME else content.get("tool", {}).get("stopdown")
    return found if isinstance(found, dict) else None


def _sort(
    table: Mapping[str, Any], commands: Mapping[str, Collection[str]], path: Path
) -> dict[str, dict[str, Any]]:
    """The defaults of each command: those of all, and over them its own."""
    found: dict[str, dict[str, Any]] = {command: {} for command in commands}
    for key, value in table.items():
        if key in commands and isinstance(value, dict):
            continue
        takers = [command for command in commands if _name(key) in commands[command]]
        if not takers:
            raise _refuse(path, key, {name for names in commands.values() for name in names})
        for command in takers:
            found[command][_name(key)] = value
    for command in filter(lambda name: isinstance(table.get(name), dict), commands):
        for key, value in table[command].items():
            if _name(key) not in commands[command]:
                raise _refuse(path, key, commands[command], command)
            found[command][_name(key)] = value
    return found


def _name(key: str) -> str:
    return key.replace("-", "_")


def _refuse(path: Path, key: str, known: Collection[str], command: str = "") -> OptionError:
    near = difflib.get_close_matches(_name(key), sorted(known), n=1)
    taker = f"stopdown {command}" if command else "any command"
    return OptionError(
        f"{path} sets {key}, which is no option of {taker}.",
        expected="Its keys are the long options without the leading dashes.",
        remedy=f"Did you mean {near[0].replace('_', '-')}?" if near else "Delete that line.",
    )
