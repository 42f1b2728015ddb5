"""A file of prompts, one a line; a line that cannot be a prompt is reported in its place.

Empty lines are passed over.
"""

from __future__ import annotations

from pathlib import Path

from stopdown.batch.prompts import LONGEST, find_text_fault
from stopdown.comparison.records import BadLine
from stopdown.errors import InputError
from stopdown.files.json_files import UnreadableError, read_small_file

MOST_LINES = 10_000
_MOST_BYTES = 4 * LONGEST * 1_000


def read_prompts(path: Path) -> tuple[list[tuple[int, str]], list[BadLine]]:
    """Line numbers with their prompts, and the lines that are none."""
    try:
        content = read_small_file(path, most_bytes=_MOST_BYTES)
    except UnreadableError as error:
        raise InputError(
            f"The prompt file {path} cannot be read: {error}.",
            expected="Prompts are a text file with one prompt on each line.",
            remedy="Name a file that exists.",
        ) from error
    lines = content.removeprefix(b"\xef\xbb\xbf").splitlines()
    if len(lines) > MOST_LINES:
        raise InputError(
            f"The prompt file {path} has {len(lines)} lines.",
            expected=f"At most {MOST_LINES} prompts are compared at a time.",
            remedy=f"Take the first of them: head -n {MOST_LINES} {path} > fewer.txt",
        )
    good: list[tuple[int, str]] = []
    bad: list[BadLine] = []
    for number, line in enumerate(lines, 1):
        read = _read_line(number, line)
        if isinstance(read, BadLine):
            bad.append(read)
        elif read:
            good.append((number, read))
    if not good:
        said = "; ".join(f"line {x.line}: {x.reason.rstrip('.').lower()}" for x in bad[:3])
        raise InputError(
            f"The prompt file {path} holds no prompt: {said or 'it is empty'}.",
            expected="Prompts are read from a text file in UTF-8 with one prompt on each line.",
            remedy=f'Write one: echo "a red circle moving left" > {path}',
        )
    return good, bad


def _read_line(number: int, line: bytes) -> str | BadLine:
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        shown = line.decode("utf-8", errors="replace")[:60]
        return BadLine(number, shown, f"Byte {error.start + 1} is not UTF-8.")
    if text and (reason := find_text_fault(text)):  # of lines, so no line break is in it
        return BadLine(number, (text if text.isprintable() else ascii(text))[:60], reason)
    return text
