"""Every exception and warning of Stopdown.

::

    StopdownError                  anything that Stopdown itself raises; exit code 1
    ├── InputError                 what was asked cannot be done as asked; exit code 2
    │   ├── OptionError            a precision, device, size or flag that is unknown or impossible
    │   ├── SourceError            a model that is missing, damaged or refused
    │   ├── OutputError            a file that cannot be written
    │   └── PlanError              a plan that does not belong to this checkpoint, or is damaged
    ├── NonFiniteError             a component returned NaN or Inf
    ├── CaptureError               a module cannot be captured as a graph
    └── ScalingError               no exponents keep a module in range
        └── TrialError             with its exponents in place a module does not run as it is to run

    StopdownWarning                something was decided or repaired that the user should know

A message has four parts: what was found, with values; where; what was expected, and where that
expectation comes from; what to type. Each part is one or more whole sentences; `StopdownError`
joins the parts that it is given.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

WARNINGS_IGNORED = threading.RLock()
"""Lock that is held while this process ignores warnings, for example during tracing."""


@contextlib.contextmanager
def ignoring_warnings(category: type[Warning], pattern: str = "") -> Iterator[None]:
    """Ignore warnings of a category while the block runs; blocks of several threads may overlap.

    `warnings.catch_warnings` restores the filters from when it began. If another thread's block ended
    meanwhile, that one's filter would be restored for ever.

    Args:
        category: class of the ignored warnings.
        pattern: regular expression that matches the beginning of their messages.
    """
    entry = ("ignore", re.compile(pattern, re.IGNORECASE), category, None, 0)
    with WARNINGS_IGNORED:
        filters: Any = warnings.filters
        filters.insert(0, entry)
    try:
        yield
    finally:
        with WARNINGS_IGNORED:
            now: Any = warnings.filters  # somebody's block may have made another list
            for known in (filters, now):
                known[:] = [x for x in known if x is not entry]


class StopdownError(Exception):
    """Root of all exceptions raised by Stopdown.

    Args:
        what: what was found, with values, and where. Whole sentences.
        expected: what was expected, and where that expectation comes from.
        remedy: what to type or do.

    Examples:
        >>> try:
        ...     stopdown.resolve_source("./missing")
        ... except stopdown.StopdownError as error:
        ...     print(error.what, error.remedy)
        There is no file or folder ./missing. Check the spelling and the current folder.
    """

    exit_code = 1

    def __init__(self, what: str, *, expected: str = "", remedy: str = "") -> None:
        parts = [make_printable(part) for part in (what, expected, remedy)]
        self.what, self.expected, self.remedy = parts
        super().__init__(str(self))

    @property
    def parts(self) -> list[str]:
        """The problem, the expectation and the remedy, without empty ones.

        If a part lacks its full stop, as other programs' messages may, one is added unless it is the last.
        """
        parts = [part for part in (self.what, self.expected, self.remedy) if part]
        return [*map(_end_sentence, parts[:-1]), *parts[-1:]]

    def __str__(self) -> str:
        return " ".join(self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return all parts and the exit code, so that the error survives pickling to another process."""
        return _remake, (type(self), self.what, self.expected, self.remedy, self.exit_code)


def _end_sentence(text: str) -> str:
    last = text.rstrip("`'\")]}")[-1:]
    return f"{text}." if last.isalnum() or last == "%" else text


def _remake(
    kind: type[StopdownError], what: str, expected: str, remedy: str, code: int
) -> StopdownError:
    error = kind(what, expected=expected, remedy=remedy)
    error.exit_code = code
    return error


class InputError(StopdownError):
    """Raised if a request cannot be carried out as given; the base of errors about input."""

    exit_code = 2


class OptionError(InputError):
    """Raised for a precision, device, size or flag that is unknown or impossible."""


class SourceError(InputError):
    """Raised for a model that is missing, damaged or refused."""


class OutputError(InputError):
    """Raised for a file that cannot be written.

    The exit code is 1 if the path was fine but the system failed (`by_system`), as with a full disk.
    """

    def __init__(
        self, what: str, *, expected: str = "", remedy: str = "", by_system: bool = False
    ) -> None:
        super().__init__(what, expected=expected, remedy=remedy)
        self.exit_code = 1 if by_system else type(self).exit_code


class NonFiniteError(StopdownError):
    """Raised if a component returned NaN or Inf."""


class CaptureError(StopdownError):
    """Raised if a module cannot be captured as a graph."""


class ScalingError(StopdownError):
    """Raised if no exponents keep a module's values in range."""


class TrialError(ScalingError):
    """Raised if a module with its exponents applied fails, or its results are wrong."""


class PlanError(InputError):
    """Raised for a plan that is damaged, or does not belong to the checkpoint."""


class StopdownWarning(UserWarning):
    """Warning about a decision or repair that the user should know of.

    Args:
        text: whole sentences.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", stopdown.StopdownWarning)
        ...     stopdown.errors.warn_user("The VAE runs in fp32.")
        >>> print(caught[0].category.__name__, caught[0].message)
        StopdownWarning The VAE runs in fp32.
    """

    def __init__(self, text: str) -> None:
        super().__init__(make_printable(text))


_PASSED = ("stopdown", "torch", "diffusers", "transformers", "accelerate", "peft", "contextlib")
"""Packages whose frames are skipped to find the user's line that a warning points to."""


def warn_user(text: str) -> None:
    """Issue a `StopdownWarning` at the user's line that called Stopdown or one of the libraries.

    Waits while another thread ignores the warnings of this process.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED:
        frame, level = frame.f_back, level + 1
    with WARNINGS_IGNORED:
        warnings.warn(text, StopdownWarning, stacklevel=level)


def take_first_line(error: Exception | str) -> str:
    """Return the first line of an exception's message, or the class name if it is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def take_one_line(error: BaseException, most: int | None = None) -> str:
    """Return an exception's message as one line, cut to `most` characters; the class name if it's empty."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def describe_error(error: Exception, most: int = 1000) -> str:
    """Return an error's message as one line of limited length, with the class unless it is Stopdown's."""
    text = take_one_line(error, most)
    return text if isinstance(error, StopdownError) else f"{type(error).__name__}: {text}"


_UNPRINTABLE = re.compile(
    r"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]"  # colours, cursor movements
    r"|\x1b[\]PX^_][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)"  # titles, links, device commands
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def make_printable(text: str) -> str:
    """Make an untrusted text safe to print on a terminal.

    Control sequences are removed. Other control characters, characters that change the direction of text,
    and bytes of file names that are not UTF-8 become U+FFFD. Line ends and tabs are kept.
    """
    if text.isprintable():
        return text
    return _UNPRINTABLE.sub(lambda found: "" if len(found[0]) > 1 else "\ufffd", text)
