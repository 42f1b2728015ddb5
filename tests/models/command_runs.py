"""A command line run in the test's own process."""

from __future__ import annotations

import pytest

from stopdown.app import cli


def run_line(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command line; return its exit code and what it wrote to both streams."""
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    streams = capsys.readouterr()
    return int(left.value.code or 0), streams.out, streams.err
