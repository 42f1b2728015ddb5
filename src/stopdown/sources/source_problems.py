"""Errors for models that are refused, missing or damaged, from `knowledge/rules/source_problems.toml`."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from stopdown.errors import SourceError
from stopdown.files.toml_files import read_rows

PICKLED, MISSING = 2, 3
"""Ranks of problems with pickled weights and with missing files."""


class SourceProblem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A problem with a source; the lowest rank is the worst."""

    name: str
    rank: int
    what: str
    expected: str
    remedy: str

    def as_error(self) -> SourceError:
        return SourceError(self.what, expected=self.expected, remedy=self.remedy)


@functools.cache
def _read_problems() -> dict[str, SourceProblem]:
    return {row.name: row for row in read_rows("source_problems", "problem", SourceProblem)}


def make_problem(name: str, /, **values: Any) -> SourceProblem:
    row = _read_problems()[name]
    texts = (text.format(**values) for text in (row.what, row.expected, row.remedy))
    return SourceProblem(name, row.rank, *texts)


def make_source_error(name: str, /, **values: Any) -> SourceError:
    return make_problem(name, **values).as_error()


def refuse_problems(name: str, problems: list[SourceProblem]) -> None:
    """Raise one SourceError for all problems of a source, worst first; do nothing without any."""
    if not problems:
        return
    problems = sorted(problems, key=lambda problem: problem.rank)
    if len(problems) == 1:
        raise problems[0].as_error()
    listed = [f"({number}) {problem.what}" for number, problem in enumerate(problems, start=1)]
    expected = dict.fromkeys(problem.expected for problem in problems)
    remedies = dict.fromkeys(problem.remedy for problem in problems)
    raise SourceError(
        f"The model {name} has {len(problems)} problems. {' '.join(listed)}",
        expected=" ".join(expected),
        remedy=" ".join(remedies),
    )
