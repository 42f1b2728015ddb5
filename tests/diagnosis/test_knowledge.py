"""What `explain` knows: whole, and searched in linear time."""

from __future__ import annotations

import re
import re._constants as parts  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import shlex
from typing import Any

import pytest

from models.failure_messages import MESSAGES
from stopdown import errors
from stopdown.app import commands
from stopdown.diagnosis import texts
from stopdown.diagnosis.knowledge import UNKNOWN, parse_knowledge, read_knowledge
from stopdown.diagnosis.texts import explain_text


def test_without_knowledge_everything_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the data that answers: with none, the surest message is unknown."""
    monkeypatch.setattr(texts, "read_knowledge", lambda: parse_knowledge([]))
    assert explain_text(MESSAGES[1][0]).fault == UNKNOWN


def test_the_knowledge_is_whole() -> None:
    """Every cause has a known fault, every sign favours known ones, and commands are those there are."""
    known = read_knowledge()
    assert {cause.fault for cause in known.causes} <= set(known.faults)
    assert {fault for sign in known.signs for fault in sign.favours} <= set(known.faults)
    lines = [line for cause in known.causes for line in cause.next]
    typed = [shlex.split(line)[1] for line in lines if line.startswith("stopdown")]
    names = {
        command.name or command.callback.__name__ for command in commands.app.registered_commands
    }
    assert set(typed) <= names


MOST_STEPS = 2_000


def count_paths(items: Any) -> tuple[int, int]:
    """In how many ways a pattern can match from one place, and of its atomic parts the largest such number.

    The engine tries no more than these before it goes on to the next place; "without limit" is 10**9.
    """
    paths, most = 1, 1
    for operation, argument in items:
        these, inner = _count_one(operation, argument)
        paths, most = min(paths * these, 10**9), max(most, inner)
    return paths, max(paths, most)


def _count_one(operation: Any, argument: Any) -> tuple[int, int]:
    if operation in (parts.MAX_REPEAT, parts.MIN_REPEAT, parts.POSSESSIVE_REPEAT):
        least, largest, body = argument
        paths, most = count_paths(body)
        largest = 10**9 if largest is parts.MAXREPEAT else int(largest)
        if operation is parts.POSSESSIVE_REPEAT:
            return 1, max(most, largest)
        if paths > 1 and largest > 1:
            return 10**9, 10**9
        return (largest - least) * paths + 1, most
    if operation is parts.BRANCH:
        counted = [count_paths(branch) for branch in argument[1]]
        return sum(paths for paths, _ in counted), max(most for _, most in counted)
    if operation in (parts.SUBPATTERN, parts.ATOMIC_GROUP, parts.ASSERT, parts.ASSERT_NOT):
        body = argument if operation is parts.ATOMIC_GROUP else argument[-1]
        paths, most = count_paths(body)
        return (paths if operation is parts.SUBPATTERN else 1), most
    return 1, 1


def count_steps(pattern: str) -> int:
    return count_paths(parser.parse(pattern, re.MULTILINE))[1]


@pytest.mark.parametrize(
    "pattern", [r"a[^\n]*b", r"\w+ b", r"(?:a{1,9}){1,9}", r"a{0,90}b{0,90}", r"\s*$"]
)
def test_the_count_of_steps_sees_what_backtracks(pattern: str) -> None:
    """Repeats without limit, within each other and side by side are above the limit."""
    assert count_steps(pattern) > MOST_STEPS


def test_every_pattern_is_linear() -> None:
    """From each place of a text a pattern tries a bounded number of ways, however long the text is."""
    known = read_knowledge()
    patterns = [p for cause in known.causes for p in (*cause.messages, *cause.needs)]
    patterns += [p for sign in known.signs for p in (*sign.match, *sign.unless)]
    patterns += [p for cause in known.causes for p in cause.loose]
    patterns += (*known.routine, *known.advice, *known.beside, *known.demands)
    patterns += [p for fact in known.facts for p in fact.lines]
    patterns += [p for x in known.generations for p in (x.cards, x.named)]
    patterns += [errors._UNPRINTABLE, texts._FRAME, texts._MODEL_FILE]
    assert [p.pattern for p in patterns if count_steps(p.pattern) > MOST_STEPS] == []
