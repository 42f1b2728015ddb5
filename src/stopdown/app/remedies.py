"""What an error of the package says, in the words of the command that met it.

The package names arguments as Python does, precision="fp16" or `precision`, and writes SOURCE where it does
not know the model's name. On the command line the one is a flag, and the other was typed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo

from stopdown.errors import StopdownError

_VALUE = r'("[^"]*"|-?\w(?:[\w.]*\w)?)'
_ALIASES = {"precisions": ("precision",)}
"""Further names of an option in the package."""

_FLAGS = {'allow="overwrite"': "--force", 'allow="eps"': "--allow-eps"}
"""What is one argument in the package, and a flag of its own on the command line."""


def reword(error: StopdownError, options: Any) -> None:
    """Put an error into the words of a command, in place."""
    error.what, error.expected, remedy = (
        reword_text(part, options) for part in (error.what, error.expected, error.remedy)
    )
    error.remedy = name_source(remedy, getattr(options, "source", None) or "SOURCE")


def reword_text(text: str, options: Any) -> str:
    """A text in which `frames` and frames=9 are flags, or PROMPT where the command takes an argument."""
    for said, flag in _FLAGS.items():
        text = text.replace(said, flag)
    pattern, arguments = _read_options(options.__class__)

    def write(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name in arguments:
            return name.upper()
        value = "True" if found[1] else found[3].strip('"')
        flag = f"--{name.replace('_', '-')}"
        return flag if value == "True" else f"{flag} {shlex.quote(value)}"

    return pattern.sub(write, text)


@functools.cache
def _read_options(command: type) -> tuple[re.Pattern[str], frozenset[str]]:
    """How messages name the options of a command, and those of them that are arguments."""
    names = [entry.name for entry in dataclasses.fields(command)]
    names += [alias for name in names for alias in _ALIASES.get(name, ())]
    either = "|".join(names)
    hints = get_type_hints(command, include_extras=True)
    return re.compile(rf"(?<![\w.(])(?:(?<!field )`({either})`|({either})={_VALUE})"), frozenset(
        name
        for name, hint in hints.items()
        if any(isinstance(x, ArgumentInfo) for x in get_args(hint))
    )


def name_source(text: str, source: str) -> str:
    """A text in which the name of the model stands for SOURCE, as it is typed in a shell."""
    return re.sub(r"\bSOURCE\b", lambda _: shlex.quote(source), text)
