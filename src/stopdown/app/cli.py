"""Entry point of the command line.

Exit codes: 0 clean, 1 findings or a failed run, 2 wrong usage, 130 after Ctrl-C, 143 after SIGTERM, 129
after SIGHUP, 141 if the reader of stdout has closed it. Signal handlers are installed before anything else
is imported.
"""

from __future__ import annotations

import functools
import sys
from typing import NoReturn

from stopdown.app.signals import SignalTrap


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code; a user's mistake shows no traceback.

    Args:
        arguments: words after `stopdown`; None for those of the process, which ends after the command.
    """
    words = sys.argv[1:] if arguments is None else arguments
    trap = SignalTrap()
    try:
        with trap:
            from stopdown.app.messages import find_command

            if find_command(words) != "run":  # a script may run for hours inside of an import
                trap.leave = functools.partial(_leave, words)
            from stopdown.devices.environment import require_package

            for package in ("typer", "rich"):
                require_package(package, "cli", "The command stopdown")
            from stopdown.app import commands

            code = commands.run(words)
    except BaseException as error:
        from stopdown.app.messages import report_failure

        code = report_failure(error, words, trap.number)
    if arguments is None:
        trap.end_by_default()
    sys.exit(code)


def _leave(words: list[str], name: str) -> None:
    """Report a signal that ends the process without unwinding the stack, and drop its file locks."""
    from stopdown.app.messages import report_interrupt

    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")  # a bar has hidden the cursor
    report_interrupt(words, name)
    if outputs := sys.modules.get("stopdown.files.outputs"):  # it may be half imported
        getattr(outputs, "drop_locks", bool)()


if __name__ == "__main__":
    main()
