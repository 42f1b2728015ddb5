"""Implementation of `stopdown explain`: diagnose an error message, a log, a picture or a video."""

from __future__ import annotations

import functools
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from stopdown.app.flags import CommandOptions
from stopdown.diagnosis.explained import EXPLAINED, explain_file, explain_stream
from stopdown.diagnosis.knowledge import UNKNOWN
from stopdown.diagnosis.texts import explain_text
from stopdown.errors import InputError, OptionError
from stopdown.records import Diagnosis

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class ExplainOptions(CommandOptions):
    """Explain an error message, a log or a black picture.

    Shows the cause, the line of the log that points to it, and the fix.

    Examples:
      stopdown explain "expected scalar type Half but found Float"
      stopdown explain run.log
      stopdown explain video.mp4
    """

    subject: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="FILE|-|TEXT",
            help="The message itself, or a log, picture, video, sound, folder of frames, or a record that "
            "Stopdown wrote; - for standard input.",
        ),
    ] = ()


def run_explain_command(options: ExplainOptions) -> int:
    """Run the command and print the diagnosis; return 1 if the text matches no known fault."""
    from stopdown.app.progress import print_result

    diagnosis = diagnose(_join(options.subject))
    draw = functools.partial(print_diagnosis, diagnosis)
    print_result(options, diagnosis, draw, highlight=False)
    return int(diagnosis.fault == UNKNOWN)


def _join(words: tuple[str, ...]) -> str | None:
    """Join the words of a message that was given without quotes; None if there are no words.

    Raises:
        OptionError: several words were given, and one of them is a file.
    """
    files = [word for word in words if len(words) > 1 and _find_path(word)]
    if files:
        raise OptionError(
            f"{len(words)} subjects were given, and {files[0]} is a file.",
            expected="One file is explained at a time.",
            remedy=f"Write stopdown explain {shlex.quote(files[0])}",
        )
    return " ".join(words) if words else None


def diagnose(subject: str | None) -> Diagnosis:
    """Return the diagnosis of a file, of standard input (`-` or None), or of a message."""
    if subject == "-" or (subject is None and not sys.stdin.isatty()):
        return _explain_input(sys.stdin.buffer)
    if subject is None or not subject.strip():
        raise OptionError(
            "There is nothing to explain.",
            expected="It takes a message, a log, a picture or a video.",
            remedy='Write stopdown explain "the message", stopdown explain run.log, or pipe a log '
            "into stopdown explain -",
        )
    path = _find_path(subject)
    return explain_file(path) if path else explain_text(subject)


def _explain_input(stream: BinaryIO) -> Diagnosis:
    try:
        return explain_stream(stream)
    except OSError as error:
        raise InputError(
            f"Standard input can't be read: {error.strerror}.",
            remedy="Name the log instead: stopdown explain run.log",
        ) from error


def _find_path(subject: str) -> Path | None:
    """Return the path of the file to explain; None if the subject is a message."""
    if "\n" in subject or len(subject) > 1000:
        return None
    path = Path(subject)
    try:
        if path.exists():
            return path
    except OSError:  # longer than a name can be, or in a folder that may not be entered
        return None
    if path.suffix.lower() in (*EXPLAINED, ".json") and " " not in subject:
        raise InputError(
            f"There is no file {subject}.",
            remedy="Name a file that exists, or give the message itself in quotes.",
        )
    return None


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the verdict and its fix, then the other remedies and the evidence."""
    from stopdown.app.progress import print_parts

    show = functools.partial(print_parts, console)

    def show_list(heading: str, lines: Iterable[tuple[Any, ...]]) -> None:
        for number, line in enumerate(lines):
            if number == 0:
                show((f"\n{heading}", "bold"))
            show("  ", *line)

    show((diagnosis.title, "bold"))
    for remedy in diagnosis.remedy[:1]:
        show(f"→ {remedy}")
    show_list("What else to do", [(f"- {x}",) for x in diagnosis.remedy[1:]])
    show(f"\n{diagnosis.why}")
    if diagnosis.run:
        show(("\nDetected: ", "bold"), ", ".join(diagnosis.run))
    clues = [
        (f"line {x.line}, " if x.line else "", f"{x.meaning}: ", (x.text, "italic"))
        for x in diagnosis.evidence
    ]
    show_list("Evidence", [*clues, *([(f"in {diagnosis.frame}",)] if diagnosis.frame else [])])
    said = "\n".join(diagnosis.remedy)
    new = [x for x in diagnosis.run_next if not re.search(rf"{re.escape(x)}(?! --)", said)]
    show_list("To find out more", [(f"$ {x}",) for x in new])
    others = [(f"{x.meaning}: {x.run_next}",) for x in diagnosis.alternatives]
    is_open = diagnosis.fault == "unattributed"  # then these are places of one cause
    show_list("Where it may come from" if is_open else "Other possible causes", others)
    if diagnosis.reports:
        show(("\nReported in ", "bold"), ", ".join(diagnosis.reports))
