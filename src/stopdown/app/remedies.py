"""What an error of the package says, in the words of the command that met it.

The package names arguments as Python does, `precision="fp16"`, and writes SOURCE where it does not know
the model's name. On the command line the one is a flag, and the other was typed.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Any

from stopdown.errors import StopdownError

_VALUE = r'("[^"]*"|-?\w(?:[\w.]*\w)?)'
_ALIASES = {"precisions": ("precision",)}
"""Further names of an option in the package."""


def reword(error: StopdownError, options: Any) -> None:
    """Put an error into the words of a command, in place.

    Args:
        options: the dataclass of the command's options.
    """
    names = [entry.name for entry in dataclasses.fields(options)]
    names += [alias for name in names for alias in _ALIASES.get(name, ())]
    pattern = re.compile(rf"(?<![\w.(])({'|'.join(names)})={_VALUE}")
    source = getattr(options, "source", None)

    error.what, error.expected, remedy = (
        pattern.sub(_write_flag, part) for part in (error.what, error.expected, error.remedy)
    )
    error.remedy = name_source(remedy, source or "SOURCE")


def name_source(text: str, source: str) -> str:
    """A text in which the name of the model stands for SOURCE, as it is typed in a shell."""
    return re.sub(r"\bSOURCE\b", lambda _: shlex.quote(source), text)


def _write_flag(found: re.Match[str]) -> str:
    flag, value = f"--{found[1].replace('_', '-')}", found[2].strip('"')
    return flag if value == "True" else f"{flag} {shlex.quote(value)}"
