"""Reading of untrusted JSON and other small files, with limits on size, depth and digits.

Every JSON file that Stopdown did not just write itself is read here. Other decoders get their bytes from
`read_small_file`. The message of an `UnreadableError` is a short fact that the caller puts into a sentence,
as it knows what the file should contain.

**Catches** named pipes, devices, folders and circular links, files above a size, text that is not JSON, NaN
(and Infinity, also as 1e999, unless it is allowed), integers of more than 40 digits, nesting over 64, and
halves of surrogate pairs.
**Does not catch** a file that another process changes while it is read.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

MOST_BYTES = 64 * 2**20
"""Default size limit in bytes; the largest JSON file of a model is a tokenizer of 35 MB (Gemma)."""

MOST_DEPTH = 64
"""Deepest nesting of JSON; configurations of models stay below 10."""

MOST_DIGITS = 40
"""Most digits of an integer; tokenizers write 31 for "no limit", and parsing takes quadratic time."""


class UnreadableError(ValueError):
    """Raised for a file that cannot be read; the message is a clause that begins with `it`."""


def read_json_table(
    path: Path, *, most_bytes: int = MOST_BYTES, allows_infinity: bool = False
) -> dict[str, Any]:
    content = parse_json(
        read_small_file(path, most_bytes=most_bytes), allows_infinity=allows_infinity
    )
    if not isinstance(content, dict):
        raise UnreadableError(f"it holds a {type(content).__name__} and not a table")
    return content


def read_small_file(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Read the bytes of a regular file; raise `UnreadableError` for pipes, devices and large files."""
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise UnreadableError(f"it has {size} bytes, and at most {most_bytes} are read")
        return file.read(min(most_bytes, max(size, 2**16)))  # the buffer is made at once


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes, without blocking on named pipes.

    Raises:
        UnreadableError: the path cannot be opened, or is not a regular file.
    """
    try:
        # Without O_NONBLOCK opening a named pipe waits for somebody who writes into it.
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115  # the caller closes it
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableError(reason[:1].lower() + reason[1:]) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnreadableError("it isn't a regular file")
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def parse_json(content: bytes, *, allows_infinity: bool = False) -> Any:
    """Parse JSON; refuse deep nesting, long integers and text that can't be encoded.

    Args:
        content: JSON text in UTF-8.
        allows_infinity: also accept `Infinity`, which Diffusers writes into scheduler configurations.

    Raises:
        UnreadableError: the text is not JSON, or exceeds a limit.
    """

    def refuse_constant(text: str) -> float:
        if allows_infinity and text != "NaN":
            return float(text)
        raise UnreadableError(f"it holds the number {text}")

    def parse_real(text: str) -> float:
        number = float(text)
        return number if math.isfinite(number) else refuse_constant(text[:MOST_DIGITS])

    try:
        found = json.loads(
            content.decode(),
            parse_constant=refuse_constant,
            parse_int=_parse_integer,
            parse_float=parse_real,
        )
    except RecursionError:
        _refuse_depth()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it isn't UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UnreadableError(f"it isn't JSON at {where}: {error.msg}") from error
    _check_depth(found)
    _check_characters(content, found)
    return found


def _parse_integer(text: str) -> int:
    if len(text) > MOST_DIGITS + 1:
        raise UnreadableError(f"it holds an integer of {len(text)} digits")
    return int(text)


def _check_depth(content: Any) -> None:
    layer = [content] if isinstance(content, (dict, list)) else []
    for _ in range(MOST_DEPTH):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    if layer:
        _refuse_depth()


def _check_characters(content: bytes, found: Any) -> None:
    """Refuse text with half of a surrogate pair, which cannot be encoded.

    Args:
        content: the JSON text.
        found: its parsed value.
    """
    if _SURROGATE.search(content):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UnreadableError("it holds half of a surrogate pair") from error


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _refuse_depth() -> NoReturn:
    raise UnreadableError(f"it is nested deeper than {MOST_DEPTH}")
