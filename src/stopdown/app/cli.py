"""The command line. Exit 0 clean, 1 findings or a failed run, 2 usage, 130 after Ctrl-C.

The commands stand in `making` and `looking`, what they share in `flags`; each is a thin function over one
of this package's `*_command` modules (`commands` for `generate`).
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import Annotated, NoReturn

import typer

import stopdown
from stopdown.app import looking, making

app = typer.Typer(
    name="stopdown",
    help="Half precision, whole picture: image and video diffusion models without black frames.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stopdown {stopdown.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Half precision, whole picture: image and video diffusion models without black frames."""


app.command()(making.generate)
app.command()(making.plan)
app.command()(making.convert)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    making.run
)
app.command()(looking.check)
app.command()(looking.explain)
app.command()(looking.doctor)
app.command()(looking.compare)
app.command()(looking.report)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code; no traceback for a user's mistake."""
    from stopdown.errors import StopdownError

    words = sys.argv[1:] if arguments is None else arguments
    try:
        app(args=arguments, standalone_mode=True)
    except StopdownError as error:
        parts = [error.what, error.expected, error.remedy]
        _report_error(type(error).__name__, parts, "--json" in words)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, SystemExit) as left:
        if isinstance(left, SystemExit) and left.code != INTERRUPTED:
            raise
        _report_error("KeyboardInterrupt", describe_interrupt(words), "--json" in words)
        sys.exit(INTERRUPTED)
    sys.exit(0)


INTERRUPTED = 130
"""The code of a program that Ctrl-C ended: 128 and the number of the signal. Typer leaves with it, too."""


def describe_interrupt(words: list[str]) -> list[str]:
    """What Ctrl-C left, and how to go on, as whole sentences.

    Args:
        words: of the command line, after `stopdown`.
    """
    command = next((word for word in words if not word.startswith("-")), "")
    if command == "run":
        return ["Stopped by Ctrl-C, while the script ran."]
    said = ["Stopped by Ctrl-C; no output was finished."]
    has_journal = any(word.partition("=")[0] == "--journal" for word in words)
    if command == "compare" or (command == "generate" and has_journal):
        said.append("The same command goes on where it stopped.")
    elif command == "generate":
        said.append("With --journal DIR it could go on where it stopped.")
    return said


def _report_error(kind: str, parts: list[str], wants_json: bool) -> None:
    """One line where a program reads; in a terminal each part on lines of its own, not cut in words."""
    parts = [part for part in parts if part]
    message = " ".join(parts)
    if sys.stderr.isatty():
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        shown = "\n".join(_wrap(part, width) for part in parts)
        typer.echo(f"stopdown: {shown}", err=True)
    else:
        typer.echo(f"stopdown: {message}", err=True)
    if wants_json:
        typer.echo(json.dumps({"error": kind, "message": message}))


_WIDEST = 100
"""Columns that a sentence takes at most, however wide the terminal is."""


def _wrap(text: str, width: int) -> str:
    """A text in lines; paths and options stay whole."""
    return textwrap.fill(
        text,
        width - len("stopdown: "),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    main()
