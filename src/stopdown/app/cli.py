"""The command line. Exit 0 clean, 1 findings or a failed run, 2 usage, 130 after Ctrl-C, 143 after
SIGTERM, 129 after SIGHUP, 141 when whoever read stdout has left.

Each command is one module `*_command`: the dataclass of its options, from which `registration` makes what
Typer needs, and `main`, which does the work and gives the exit code.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import textwrap
import traceback
from typing import Annotated, Any, NoReturn

import typer

import stopdown
from stopdown.app import (
    batch_command,
    bench_command,
    check_command,
    compare_command,
    convert_command,
    defaults_file,
    doctor_command,
    explain_command,
    export_command,
    generate_command,
    plan_command,
    report_command,
    run_command,
    signals,
    streams,
)
from stopdown.app.registration import add_command
from stopdown.errors import OptionError, StopdownError, make_printable

app = typer.Typer(
    name="stopdown",
    help="Half precision, whole picture: image and video diffusion models without black frames.",
    epilog="stopdown COMMAND -h shows the options of a command, with examples.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
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


add_command(app, "generate", generate_command.main)
add_command(app, "batch", batch_command.main)
add_command(app, "plan", plan_command.main)
add_command(app, "convert", convert_command.main)
add_command(app, "export", export_command.main)
add_command(
    app, "run", run_command.main, ignore_unknown_options=True, allow_interspersed_args=False
)
add_command(app, "check", check_command.main)
add_command(app, "explain", explain_command.main)
add_command(app, "doctor", doctor_command.main)
add_command(app, "bench", bench_command.main)
add_command(app, "compare", compare_command.main)
add_command(app, "report", report_command.main)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code; no traceback for a user's mistake."""
    words = sys.argv[1:] if arguments is None else arguments
    streams.fill_streams()
    code, wants_json = 0, "--json" in words
    try:
        with signals.raised_signals():
            code = _run(words, wants_json)
    except StopdownError as error:
        code = error.exit_code
        if {"-v", "--verbose"} & set(words):
            traceback.print_exception(error)
        parts = [error.what, error.expected, error.remedy]
        is_stdout = isinstance(error, streams.StdoutError)
        if not error.is_told_elsewhere:
            _report_error(type(error).__name__, parts, wants_json and not is_stdout)
    except signals.Stopped as stopped:
        code = int(stopped.code or 0)
        _report_error(stopped.name, describe_interrupt(words, stopped.name), wants_json)
    except KeyboardInterrupt:
        code = signals.INTERRUPTED
        _report_error("KeyboardInterrupt", describe_interrupt(words), wants_json)
    sys.exit(code)


def _run(words: list[str], wants_json: bool) -> int:
    """The exit code that a command ends with."""
    _refuse_bytes(words)
    is_script = _find_command(words) == "run"  # its standard output is its own
    checked = contextlib.nullcontext() if is_script else streams.checked_stdout(is_json=wants_json)
    with checked:
        try:
            app(args=words, prog_name="stopdown", default_map=_read_defaults(words))
        except SystemExit as left:
            if left.code == signals.INTERRUPTED:  # what Typer makes of Ctrl-C
                raise KeyboardInterrupt from left
            if isinstance(left, signals.Stopped | streams.ReaderGone):
                raise
            return int(left.code or 0)
    return 0


def _read_defaults(words: list[str]) -> dict[str, dict[str, Any]]:
    """Defaults of a file, by command; none for help, which a file that is refused must not hide."""
    if {"-h", "--help", "--version"} & set(words) or not _find_command(words):
        return {}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group
    options = {
        name: {entry.name for entry in command.params if entry.param_type_name == "option"}
        for name, command in commands.items()
    }
    path, defaults = defaults_file.read_defaults(options)
    if {"-v", "--verbose"} & set(words) and defaults.get(_find_command(words)):
        typer.echo(f"stopdown: {path} gives defaults.", err=True)
    return defaults


def _find_command(words: list[str]) -> str:
    return next((word for word in words if not word.startswith("-")), "")


def _refuse_bytes(words: list[str]) -> None:
    """Refuse what is no text: it would go into records and pages, which are UTF-8."""
    for word in words:
        if any("\udc80" <= character <= "\udcff" for character in word):
            shown = word.encode(errors="surrogateescape").decode(errors="backslashreplace")
            raise OptionError(
                f"The argument {shown} holds bytes that are not UTF-8.",
                expected="Names and prompts are written into records and pages, which are UTF-8.",
                remedy="Give the file another name, or the text in UTF-8.",
            )


def describe_interrupt(words: list[str], cause: str = "Ctrl-C") -> list[str]:
    """What Ctrl-C or another signal left, and how to go on, as whole sentences.

    Args:
        words: of the command line, after `stopdown`.
        cause: `Ctrl-C`, or the name of the signal.
    """
    command = _find_command(words)
    if command == "run":
        return [f"Stopped by {cause}, while the script ran."]
    given = {word.partition("=")[0] for word in words}
    said = [f"Stopped by {cause}; no output was finished."]
    if command == "batch":  # it has said how many are
        said = [f"Stopped by {cause}."]
    elif command == "generate" and "--num" in given:
        said = [f"Stopped by {cause}; the output that was being made was not finished."]
    if command in ("batch", "bench", "compare") or (command == "generate" and "--journal" in given):
        said.append("The same command continues where it stopped.")
    elif command == "generate":
        said.append("With --journal DIR it could continue where it stopped.")
    return said


def _report_error(kind: str, parts: list[str], wants_json: bool) -> None:
    """One line where a program reads; in a terminal each part on lines of its own, not cut in words.

    A stream that is gone (the terminal was closed) hears nothing, and the exit code stays.
    """
    parts = [make_printable(part) for part in parts if part]  # names come from files of others
    message = " ".join(parts)
    shown = message
    if sys.stderr.isatty():
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        shown = "\n".join(_wrap(part, width) for part in parts)
    with contextlib.suppress(OSError):
        typer.echo(f"stopdown: {shown}", err=True)
    if wants_json:
        with contextlib.suppress(OSError, SystemExit, streams.StdoutError):
            streams.CheckedStdout(sys.stdout).write(
                json.dumps({"error": kind, "message": message}) + "\n"
            )
            streams.CheckedStdout(sys.stdout).flush()


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
