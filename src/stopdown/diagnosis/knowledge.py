"""What `explain` knows: causes, signs and generations of cards, read from `knowledge/explain`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stopdown.files.toml_files import read_folder

UNKNOWN = "unknown"
"""The fault of a text that holds no message that is known."""


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong, and how it shows.

    Attributes:
        name: short name: `operands-differ`.
        fault: the class that it belongs to: `dtype-mismatch`.
        points: how much its message alone says.
        title: one sentence; `{first}` and such are filled from the message.
        plain: the sentence for a message without these values; "" where the title has none.
        counts: a message counts only if its `invalid` is `all` of its `shape`, or `part` of it.
        messages: patterns, one of which must be found.
        needs: patterns, one of which must be found as well, when there are any.
        loose: patterns of how people describe it, which count in a short text that names something of a
            run (`beside`).
        next: commands that tell more.
        reports: `owner/repo#number` of the same failure.
    """

    name: str
    fault: str
    points: int
    title: str
    why: str
    messages: tuple[re.Pattern[str], ...]
    remedy: tuple[str, ...]
    next: tuple[str, ...]
    reports: tuple[str, ...]
    plain: str = ""
    counts: Literal["", "all", "part"] = ""
    needs: tuple[re.Pattern[str], ...] = ()
    loose: tuple[re.Pattern[str], ...] = ()


class Sign(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fact around a message: all of `match` and none of `unless` is found; `says` is what it means."""

    match: tuple[re.Pattern[str], ...]
    points: int
    favours: frozenset[str]
    says: str
    unless: tuple[re.Pattern[str], ...] = ()


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a log names of its run: `card`, by patterns with the group `value`."""

    what: str
    lines: tuple[re.Pattern[str], ...]


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cards for which the same remedies are right, and how remedies name them."""

    cards: re.Pattern[str]
    named: re.Pattern[str]


@dataclass(frozen=True)
class Knowledge:
    """All that is known: causes, signs, what each fault is, and lines that programs print in every run.

    Attributes:
        routine: lines that name what a run was, and say nothing of a fault.
        advice: lines that say what to try in some other case.
        beside: what a run has, and a prompt has not: formats, cards, options, models.
        facts: what a log names of its run.
        demands: what a message says that a card must be, which names no card of the run.
        generations: cards that need other remedies than others.
    """

    causes: tuple[Cause, ...]
    signs: tuple[Sign, ...]
    faults: dict[str, str]
    routine: tuple[re.Pattern[str], ...] = ()
    advice: tuple[re.Pattern[str], ...] = ()
    beside: tuple[re.Pattern[str], ...] = ()
    facts: tuple[Fact, ...] = ()
    demands: tuple[re.Pattern[str], ...] = ()
    generations: tuple[Generation, ...] = ()


LONGEST_DESCRIPTION = 1_500
"""Characters of a text that may be a person's description of what happened."""

FILES = ("dtypes.toml", "overflow.toml", "signs.toml", "external_causes.toml")
"""Of `knowledge/explain/`, in the order in which equal causes are answered: the likelier ones first."""


@functools.cache
def read_knowledge() -> Knowledge:
    """Read the knowledge that comes with the package; of causes with equal points the first wins."""
    files = read_folder("explain")
    return parse_knowledge(files[name] for name in sorted(files, key=FILES.index))


def parse_knowledge(files: Iterable[Mapping[str, Any]]) -> Knowledge:
    """Parse the tables of several files, joined by their names, into one `Knowledge`."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for kind, entries in file.items():
            tables.setdefault(kind, []).extend(entries)
    words = {f"<<{entry['name']}>>": entry["any"] for entry in tables.get("word", [])}
    tables = _fill_words(tables, words)
    symptoms = {entry["name"]: entry for entry in tables.get("symptom", [])}
    causes = [_expand_cause(entry, symptoms) for entry in tables.get("cause", [])]

    def compile_all(kind: str, key: str) -> tuple[re.Pattern[str], ...]:
        return tuple(_compile(str, x) for entry in tables.get(kind, []) for x in entry.get(key, []))

    return Knowledge(
        msgspec.convert(causes, tuple[Cause, ...], dec_hook=_compile),
        msgspec.convert(tables.get("sign", []), tuple[Sign, ...], dec_hook=_compile),
        {entry["name"]: entry["says"] for entry in tables.get("fault", [])},
        routine=compile_all("routine", "lines"),
        advice=compile_all("advice", "lines"),
        beside=compile_all("symptom", "beside"),
        demands=compile_all("demand", "lines"),
        facts=msgspec.convert(tables.get("fact", []), tuple[Fact, ...], dec_hook=_compile),
        generations=msgspec.convert(
            tables.get("generation", []), tuple[Generation, ...], dec_hook=_compile
        ),
    )


def _fill_words(known: Any, words: Mapping[str, str]) -> Any:
    """Replace each `<<name>>` in the patterns of nested tables by the pattern of that word."""
    if isinstance(known, str):
        return re.sub("<<[a-z]+>>", lambda found: words[found[0]], known)
    if isinstance(known, Mapping):
        return {key: _fill_words(value, words) for key, value in known.items()}
    return [_fill_words(value, words) for value in known] if isinstance(known, list) else known


def _expand_cause(entry: dict[str, Any], symptoms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    patterns: list[str] = []
    loose: list[str] = []
    for text in entry["messages"]:
        if text.startswith("@"):
            patterns += symptoms[text[1:]]["messages"]
            loose += symptoms[text[1:]].get("loose", [])
        else:
            patterns.append(text)
    return {**entry, "messages": patterns, "loose": loose, "why": entry["why"].strip()}


def _compile(kind: type, pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)
