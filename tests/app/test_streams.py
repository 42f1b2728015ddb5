"""Errors of standard output are told apart from those of other files."""

from __future__ import annotations

import errno
import io

import pytest

from stopdown.app.streams import CheckedStdout, ReaderGone, StdoutError


class Failing(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, "failed")

    def fileno(self) -> int:
        raise OSError


def test_a_reader_that_is_gone_ends_the_command_quietly() -> None:
    """The exit code is that of SIGPIPE."""
    with pytest.raises(ReaderGone) as caught:
        CheckedStdout(Failing(errno.EPIPE)).write("x")
    assert caught.value.code == 141


def test_a_full_disk_is_an_error_of_standard_output() -> None:
    """The first failure is raised again at each later write."""
    stream = CheckedStdout(Failing(errno.ENOSPC))
    for _ in range(2):
        with pytest.raises(StdoutError, match="Standard output couldn't be written"):
            stream.write("x")


def test_other_attributes_are_the_streams() -> None:
    """What was written is there, and its count is returned."""
    inner = io.StringIO()
    stream = CheckedStdout(inner)
    assert stream.write("abc") == 3
    assert stream.getvalue() == "abc"
