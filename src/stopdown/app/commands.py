"""All commands of `stopdown`, in the order of its help, registered with Typer.

Each command is one module `*_command`. It defines a dataclass of options, which `registration` translates
for Typer, and `run_NAME_command`, which does the work and returns the exit code.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

import stopdown
from stopdown.app import (
    batch_command,
    bench_command,
    check_command,
    compare_command,
    convert_command,
    doctor_command,
    explain_command,
    fit_command,
    generate_command,
    plan_command,
    report_command,
    run_command,
    streams,
)
from stopdown.app.messages import find_command
from stopdown.app.registration import add_command
from stopdown.app.signals import Stopped
from stopdown.errors import OptionError

app = typer.Typer(
    name="stopdown",
    help="Run image and video diffusion models in fp16, without black frames or NaN.",
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
    """Run image and video diffusion models in fp16, without black frames or NaN."""


add_command(app, "generate", generate_command.run_generate_command)
add_command(app, "batch", batch_command.run_batch_command)
add_command(app, "fit", fit_command.run_fit_command)
add_command(app, "plan", plan_command.run_plan_command)
add_command(app, "convert", convert_command.run_convert_command)
add_command(
    app,
    "run",
    run_command.run_run_command,
    ignore_unknown_options=True,
    allow_interspersed_args=False,
)
add_command(app, "check", check_command.run_check_command)
add_command(app, "explain", explain_command.run_explain_command)
add_command(app, "doctor", doctor_command.run_doctor_command)
add_command(app, "compare", compare_command.run_compare_command)
add_command(app, "report", report_command.run_report_command)
add_command(app, "bench", bench_command.run_bench_command)


def run(words: list[str]) -> int:
    """Run the command that a command line names, and return its exit code."""
    streams.fill_streams()
    _refuse_bytes(words)
    if find_command(words) and not {"-h", "--help", "--version"} & set(words):
        _refuse_lost_folder()
    is_script = find_command(words) == "run"  # its standard output is its own
    is_json = "--json" in words
    checked = contextlib.nullcontext() if is_script else streams.checked_stdout(is_json=is_json)
    with checked:
        try:
            app(args=words, prog_name="stopdown")
        except SystemExit as left:
            if left.code == _INTERRUPTED:  # what Typer makes of Ctrl-C
                raise KeyboardInterrupt from left
            if isinstance(left, Stopped | streams.ReaderGone):
                raise
            return int(left.code or 0)
    return 0


_INTERRUPTED = 130
"""Typer's exit code after Ctrl-C."""


def _refuse_lost_folder() -> None:
    """Refuse a working folder that was deleted or moved."""
    try:
        Path.cwd()
    except OSError as error:
        raise OptionError(
            f"The folder in which this command was started no longer exists: {error.strerror}.",
            expected="It was deleted or moved after the shell had entered it.",
            remedy="Go to a folder that exists: cd ~",
        ) from error


def _refuse_bytes(words: list[str]) -> None:
    """Refuse arguments that are not valid text, since records and pages are UTF-8."""
    for word in words:
        if any("\udc80" <= character <= "\udcff" for character in word):
            given = word.encode(errors="surrogateescape")
            shown = given.decode(errors="backslashreplace")
            if shown.encode() == given:  # the bytes are right, and read as another encoding
                raise OptionError(
                    f"The argument {shown} is UTF-8, and the locale of this terminal isn't.",
                    expected="Names and prompts are written into records and pages, which are UTF-8.",
                    remedy="Set a UTF-8 locale: export LC_ALL=C.UTF-8",
                )
            raise OptionError(
                f"The argument {shown} holds bytes that aren't UTF-8.",
                expected="Names and prompts are written into records and pages, which are UTF-8.",
                remedy="Give the file another name, or the text in UTF-8.",
            )
