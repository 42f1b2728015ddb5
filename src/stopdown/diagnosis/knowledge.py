"""Knowledge of `explain`: causes, signs and card generations, read from `knowledge/explain`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stopdown.files.toml_files import read_folder

UNKNOWN = "unknown"
"""`Diagnosis.fault` of a text without a known message."""


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cause of failures, with the patterns by which it is recognised.

    Attributes:
        name: short name: `operands-differ`.
        fault: class of faults to which it belongs: `dtype-mismatch`.
        points: weight of its message as evidence.
        title: one sentence; placeholders such as `{first}` are filled from the message.
        why: explanation.
        messages: patterns, one of which must match.
        remedy: remedies, best first.
        next: commands that give more information.
        reports: public reports of the same failure, as `owner/repo#number`.
        plain: title for a message without the values; "" if the title has no placeholders.
        counts: the message only counts if the group `invalid` is `all` or `part` of the group `shape`.
        needs: patterns, one of which must match as well, if there are any.
        loose: patterns of people's own descriptions, which count in a short text that mentions part of a
            run (`Knowledge.beside`).
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
    """Additional evidence in a text: it applies if all of `match` and none of `unless` match.

    Attributes:
        points: weight that it adds to each cause of a favoured fault.
        favours: faults that it makes more likely.
        says: meaning of the sign.
    """

    match: tuple[re.Pattern[str], ...]
    points: int
    favours: frozenset[str]
    says: str
    unless: tuple[re.Pattern[str], ...] = ()


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fact about a run that a log may contain, such as `card`; its patterns have the group `value`."""

    what: str
    lines: tuple[re.Pattern[str], ...]


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Graphics cards that need the same remedies: patterns of their names, and of those in remedies."""

    cards: re.Pattern[str]
    named: re.Pattern[str]


@dataclass(frozen=True)
class Knowledge:
    """All knowledge of `explain`.

    Attributes:
        causes: causes; of equally likely ones the first is chosen.
        signs: additional evidence.
        faults: description by fault.
        routine: patterns of lines that describe a run and are no evidence of a fault.
        advice: patterns of lines with advice for other cases.
        beside: patterns of formats, cards, options and models, which a text about a run mentions and a
            prompt does not.
        facts: facts about a run that a log may contain.
        demands: patterns of requirements on a card in messages, which do not name the card in use.
        generations: groups of cards that need different remedies.
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
"""Length in characters up to which a text may be a person's description of what happened."""

FILES = ("dtypes.toml", "overflow.toml", "signs.toml", "external_causes.toml")
"""Files of `knowledge/explain/`, most likely causes first, as the first of equal causes is chosen."""


@functools.cache
def read_knowledge() -> Knowledge:
    """Read the package's knowledge from `knowledge/explain`; cached."""
    files = read_folder("explain")
    return parse_knowledge(files[name] for name in sorted(files, key=FILES.index))


def parse_knowledge(files: Iterable[Mapping[str, Any]]) -> Knowledge:
    """Parse the tables of several files into one `Knowledge`; tables of the same name are joined."""
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
    """Replace each `<<name>>` in nested tables of patterns by the pattern in `words`."""
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
