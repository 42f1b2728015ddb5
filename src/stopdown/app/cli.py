"""The command line. Exit 0 clean, 1 findings or a failed run, 2 usage, 130 after Ctrl-C, 143 after
SIGTERM, 129 after SIGHUP, 141 if the reader of stdout has closed it.

Signals are heard before anything else is imported.
"""

from __future__ import annotations

import functools
import sys
from typing import NoReturn

from stopdown.app.signals import SignalTrap


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code; no traceback for a user's mistake.

    Args:
        arguments: words after `stopdown`; None takes those of the process, which ends with the command.
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
    """Report a signal that nothing is unwound for."""
    from stopdown.app.messages import report_interrupt

    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")  # a bar has hidden the cursor
    report_interrupt(words, name)
    if outputs := sys.modules.get("stopdown.files.outputs"):  # it may be half imported
        getattr(outputs, "drop_locks", bool)()


if __name__ == "__main__":
    main()
