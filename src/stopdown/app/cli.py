"""The command line. Exit 0 clean, 1 findings or a failed run, 2 usage.

The commands stand in `making` and `looking`, what they share in `flags`; each is a thin function over one
of this package's `*_command` modules (`commands` for `generate`).
"""

from __future__ import annotations

import json
import sys
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

    wants_json = "--json" in (arguments if arguments is not None else sys.argv)
    try:
        app(args=arguments, standalone_mode=True)
    except StopdownError as error:
        _report_error(type(error).__name__, str(error), wants_json)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, SystemExit) as left:
        if isinstance(left, SystemExit) and left.code != _TYPER_INTERRUPTED:
            raise
        _report_error("KeyboardInterrupt", "Stopped by Ctrl-C; no output was finished.", wants_json)
        sys.exit(1)
    sys.exit(0)


_TYPER_INTERRUPTED = 130
"""With this code Typer leaves after Ctrl-C."""


def _report_error(kind: str, message: str, wants_json: bool) -> None:
    typer.echo(f"stopdown: {message}", err=True)
    if wants_json:
        typer.echo(json.dumps({"error": kind, "message": message}))


if __name__ == "__main__":
    main()
