"""Diagnosis of the text of a message, traceback or log: cause, evidence and remedy."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stopdown.diagnosis.knowledge import (
    LONGEST_DESCRIPTION,
    UNKNOWN,
    Cause,
    Knowledge,
    Sign,
    read_knowledge,
)
from stopdown.errors import make_printable
from stopdown.records import (
    Alternative,
    Clue,
    Diagnosis,
)

MOST_CHARACTERS = 200_000
"""Characters of a condensed text that are searched; of a longer one, half from each end."""

LONGEST_LINE = 1_000
"""Characters of a line that are searched, from its beginning."""

MOST_BYTES = 8_000_000
"""Bytes of a text, file or stream that are read; of a longer one, half from each end."""

ALTERNATIVES = 8


def explain_text(text: str) -> Diagnosis:
    """Return the diagnosis of the text of a message, a traceback or a log."""
    half = MOST_BYTES // 2
    ends = [text] if len(text) <= MOST_BYTES else [text[:half], text[-half:]]
    return explain_ends(ends)


REFUSALS = (RuntimeError, TypeError, ValueError)
"""Exceptions that torch, or a kernel used in its place, raises for operands of different dtypes."""


def is_refusal(error: Exception) -> bool:
    """Return whether an error's message is about operands of different dtypes in one operation."""
    said = f"{type(error).__name__}: {error}"
    return isinstance(error, REFUSALS) and explain_text(said).fault == "dtype-mismatch"


def decode_log(head: bytes, tail: bytes) -> list[str]:
    """Decode the beginning and the end of a text; return one part if nothing between them was skipped."""
    is_whole = len(tail) < MOST_BYTES // 2
    parts = [head + tail] if is_whole else [head, tail]
    coding = find_coding(head)
    return [part.decode(coding, errors="replace") for part in parts]


def find_coding(head: bytes) -> str:
    """Return the encoding of a text by its beginning: UTF-8, or UTF-16 as in PowerShell's logs."""
    if b"\0" not in head:
        return "utf-8"
    return {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(
        head[:2], "utf-8"
    )


def explain_ends(ends: Iterable[str]) -> Diagnosis:
    known = read_knowledge()
    text, numbers = condense(*ends)
    found = _explain_condensed(known, text, numbers)
    if found is None:
        found = _explain_condensed(known, *_join_wrapped(text, numbers))
    return found or _describe_unknown(text, numbers)


def _explain_condensed(known: Knowledge, text: str, numbers: list[int]) -> Diagnosis | None:
    """Return the diagnosis of a condensed text; None if no cause is known."""
    text = _blank(known.advice, text)
    telling = _blank(known.routine, text)
    signs = [
        (sign, hits)
        for sign in known.signs
        if (hits := _find_all(sign.match, telling)) and not _find_first(sign.unless, telling)
    ]
    is_told = len(text) <= LONGEST_DESCRIPTION and bool(_find_first(known.beside, telling))
    weighed = [
        found
        for cause in known.causes
        if (found := _weigh(cause, text, telling, signs, is_told=is_told))
    ]
    weighed.sort(key=lambda found: -found.points)
    return _describe_known(text, numbers, weighed, signs, known) if weighed else None


@dataclass(frozen=True)
class _Candidate:
    cause: Cause
    points: int
    match: re.Match[str]
    need: re.Match[str] | None


_Signs = list[tuple[Sign, list[re.Match[str]]]]


def _blank(patterns: Iterable[re.Pattern[str]], text: str) -> str:
    """Replace all matches of patterns by spaces, so that other characters keep their position."""
    for pattern in patterns:
        text = pattern.sub(lambda found: " " * len(found[0]), text)
    return text


def _weigh(
    cause: Cause, text: str, telling: str, signs: _Signs, *, is_told: bool
) -> _Candidate | None:
    """Weigh the evidence for a cause; return None if its message, or a pattern it needs, is missing.

    Args:
        text: text in which messages are searched.
        telling: text with routine lines blanked, in which `loose` and `needs` are searched.
        signs: signs in the text, with their matches.
        is_told: whether the text may be a person's description, in which `Cause.loose` counts.
    """
    match = _find_first(cause.messages, text) or _find_first(
        cause.loose if is_told else (), telling
    )
    need = _find_first(cause.needs, telling)
    if match is None or (cause.needs and need is None) or not _counts(cause, match):
        return None
    favoured = sum(sign.points for sign, _ in signs if cause.fault in sign.favours)
    return _Candidate(cause, cause.points + favoured + 2 * (need is not None), match, need)


def _counts(cause: Cause, match: re.Match[str]) -> bool:
    """Return whether a message's share of bad values (all or some) is as the cause requires."""
    if not cause.counts:
        return True
    total = math.prod(map(int, re.findall(r"\d{1,9}", match["shape"])))
    return (int(match["invalid"]) >= total) is (cause.counts == "all")


def _find_first(patterns: Iterable[re.Pattern[str]], text: str) -> re.Match[str] | None:
    """Return the match of the first pattern that has one; patterns are in order of significance."""
    return next((match for pattern in patterns if (match := pattern.search(text))), None)


def _find_all(patterns: Iterable[re.Pattern[str]], text: str) -> list[re.Match[str]]:
    """Return a match of each pattern; an empty list if one has none."""
    matches = [pattern.search(text) for pattern in patterns]
    return [match for match in matches if match] if all(matches) else []


def condense(text: str, end: str = "") -> tuple[str, list[int]]:
    """Return a text without repeated lines, and the original number of each line, from 1.

    Lines that differ only in digits, such as those of a progress bar, count as repeated. Control sequences
    are removed, white space in a line becomes one space, quotation marks become plain ones, long lines are
    cut, and the middle of a text that is still too long is dropped. A traceback in one line, as in a log in
    JSON, becomes several lines with one number. Patterns therefore need not handle long lines, repeated
    spaces or empty lines.

    Args:
        text: the whole text, or its beginning.
        end: its end, if the middle was not read; the number of these lines is 0.
    """
    lines: dict[str, tuple[int, str]] = {}
    seen: set[str] = set()
    numbered = [*enumerate(text.splitlines(), 1), *((0, line) for line in end.splitlines())]
    for number, part in ((n, part) for n, line in numbered for part in _split_quoted(line)):
        cut = part[:LONGEST_LINE]
        if cut not in seen:
            seen.add(cut)
            clean = " ".join(make_printable(cut).translate(_QUOTES).split())
            lines.setdefault(_DIGITS.sub("0", clean), (number, clean))
    kept = _drop_middle(list(lines.values()))
    return "\n".join(line for _, line in kept), [number for number, _ in kept]


_DIGITS = re.compile(r"\d+")

_QUOTES = str.maketrans("\u201c\u201d\u201e\u2018\u2019\u201a", '"""' + "'''")
"""Quotation marks of word processors and chats to those of programs."""

_IS_QUOTED = re.compile(r"""\s{0,80}b?['"]|[^\n]{0,200}?\{\s?['"]""")


def _split_quoted(line: str) -> list[str]:
    """Split a line of JSON, or a text in quotes, at the line ends that are written in it as `\\n`."""
    if "\\" not in line or not _IS_QUOTED.match(line):
        return [line]
    return [re.sub(r"\\([\\'\"])", r"\1", part) for part in re.split(r"(?<!\\)\\[nr]", line)]


_MOST_WRAPS = 2
_ERROR = r"(?:\S{1,60}+ ){0,2}?[\w.]{0,80}(?:Error|Exception|Warning)\b"
_IS_ERROR = re.compile(rf"{_ERROR}: ")
_IS_NEXT = re.compile(rf'{_ERROR}|File "|Traceback|During handling|The above|[\[\d]')


def _join_wrapped(text: str, numbers: list[int]) -> tuple[str, list[int]]:
    """Join an error's message that a terminal wrapped, which is otherwise read line by line.

    Returns:
        The text, and the number of each of its lines.
    """
    lines: list[tuple[int, str]] = []
    room = 0
    for number, line in zip(numbers, text.split("\n"), strict=False):
        if room and not _IS_NEXT.match(line):
            first, message = lines[-1]
            lines[-1] = first, f"{message} {line}"[:LONGEST_LINE]
            room -= 1
        else:
            lines.append((number, line))
            room = _MOST_WRAPS if _IS_ERROR.match(line) else 0
    return "\n".join(line for _, line in lines), [number for number, _ in lines]


def _drop_middle(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    ends: list[list[tuple[int, str]]] = []
    rest = lines
    for direction in (1, -1):
        room, end = MOST_CHARACTERS // 2, []
        for entry in rest[::direction]:
            room -= len(entry[1]) + 1
            if room < 0:
                break
            end.append(entry)
        ends.append(end)
        rest = rest[len(end) :]
    return [*ends[0], *ends[1][::-1]]


def _describe_known(
    text: str, numbers: list[int], weighed: list[_Candidate], signs: _Signs, known: Knowledge
) -> Diagnosis:
    best = weighed[0]
    found = {name: value for name, value in best.match.groupdict().items() if value}
    values = {k: v if k == "operation" else name_operand(v) for k, v in found.items()}
    shown = [(best.match, "the message")]
    shown += [(best.need, "the context")] if best.need else []
    shown += [(hits[0], sign.says) for sign, hits in signs if best.cause.fault in sign.favours]
    clues = []
    for match, says in shown:
        row = text.count("\n", 0, match.start())
        clues.append(Clue(numbers[row], text.split("\n")[row].strip()[:300], says))
    run = read_run(known, text)
    return Diagnosis(
        fault=best.cause.fault,
        meaning=known.faults[best.cause.fault],
        cause=best.cause.name,
        title=_fill(best.cause, values),
        why=best.cause.why,
        evidence=tuple(dict.fromkeys(clues)),
        frame=_find_frame(text),
        run=tuple(f"PyTorch {x}" if what == "PyTorch" else x for what, x in run.items()),
        remedy=_choose_remedies(known, best.cause, run.get("card", "")),
        run_next=best.cause.next,
        reports=best.cause.reports,
        alternatives=tuple(_list_alternatives(weighed, known)),
    )


def read_run(known: Knowledge, text: str) -> dict[str, str]:
    """Read the facts about a run in a log, by name: all options, and the first match of other facts."""
    found = {}
    text = _blank(known.demands, text)
    for fact in known.facts:
        if fact.what == "options":
            values = [x["value"] for pattern in fact.lines for x in pattern.finditer(text)]
            value = ", ".join(dict.fromkeys(values))
        else:
            match = _find_first(fact.lines, text)
            value = match["value"] if match else ""
        if value:
            found[fact.what] = value.replace(" version:", "").strip()
    return found


def _choose_remedies(known: Knowledge, cause: Cause, card: str) -> tuple[str, ...]:
    """Return a cause's remedies: those for the given card first, and none for other cards.

    Args:
        card: name of the card in the log; "" if unknown.
    """
    own = [x.named for x in known.generations if card and x.cards.search(card)]
    others = [x.named for x in known.generations if card and not x.cards.search(card)]

    def names(cards: list[re.Pattern[str]], remedy: str) -> bool:
        head = re.match(r"(?:On|For|With)\b[^,:]{0,80}", remedy)
        return head is not None and any(x.search(head[0]) for x in cards)

    meant = [x for x in cause.remedy if names(own, x)]
    open_to_all = [x for x in cause.remedy if x not in meant and not (own and names(others, x))]
    return tuple(meant + open_to_all) or cause.remedy


def _list_alternatives(weighed: list[_Candidate], known: Knowledge) -> Iterator[Alternative]:
    """Yield each fault other than the best candidate's once, most likely first."""
    seen = {weighed[0].cause.fault}
    for other in weighed[1:]:
        fault = other.cause.fault
        if fault not in seen and len(seen) <= ALTERNATIVES:
            seen.add(fault)
            yield Alternative(fault, known.faults[fault], other.cause.next[0])


_DTYPES = (
    (r"bfloat16|^v2$", "bf16"),
    (r"float8_?e4m3", "fp8-e4m3"),
    (r"float8_?e5m2", "fp8-e5m2"),
    (r"half|float16|^f2$|^23$", "fp16"),  # as NumPy and OpenCV name it
    (r"double|float64", "fp64"),
    (r"float", "fp32"),
)


def name_operand(text: str) -> str:
    """Return Stopdown's name of a dtype in a message: `fp16` for `c10::Half` or `torch.cuda.HalfTensor`."""
    for pattern, name in _DTYPES:
        if re.search(pattern, text, re.IGNORECASE):
            return name
    return text.strip()


def _fill(cause: Cause, values: dict[str, str]) -> str:
    """Fill a cause's title with values from the message; return the plain title if a value is missing."""
    wanted = set(re.findall(r"\{(\w+)\}", cause.title))
    return cause.title.format(**values) if wanted <= set(values) else cause.plain or cause.title


_FRAME = re.compile(
    r'(?:^|\s)File "([^"\n]{1,500}+)", line (\d{1,9}+), in (\S{1,200}+)', re.MULTILINE
)
_MODEL_FILE = re.compile(r"(?:^|/)(?=(?:diffusers|transformers)/(?:models|pipelines)/)")


def _find_frame(text: str) -> str:
    """Return the deepest frame of a traceback in Diffusers' or Transformers' model code; "" if none."""
    frames = [
        f"{parts[-1]}:{frame[2]} in {frame[3]}"
        for frame in _FRAME.finditer(text)
        if len(parts := _MODEL_FILE.split(frame[1].replace("\\", "/"))) > 1
    ]
    return frames[-1] if frames else ""


def _describe_unknown(text: str, numbers: list[int]) -> Diagnosis:
    rows = [(n, line) for n, line in zip(numbers, text.split("\n"), strict=False) if line.strip()]
    last = [Clue(number, line.strip()[:300], "the last line") for number, line in rows[-1:]]
    return Diagnosis(
        fault=UNKNOWN,
        meaning="no message of precision that is known here",
        title="This text contains no known precision problem."
        if rows
        else "There's no text to explain.",
        why="The cause may be something else (memory, a missing file, a wrong size), or a problem that "
        "Stopdown doesn't know. The message that matters may come earlier in the log: look for the "
        "first warning, not the last line."
        if rows
        else "The message or log is empty.",
        evidence=tuple(last),
        frame=_find_frame(text),
        remedy=(
            f"Paste {'more of it: ' if rows else ''}the whole log or traceback, with the model, the device "
            "and the dtype.",
        ),
        run_next=(
            RUN_AGAIN.format("fp32"),
            RUN_AGAIN.format("fp16"),
        ),
    )


RUN_AGAIN = "stopdown generate SOURCE PROMPT --precision {}"
_COMPARE = "stopdown compare SOURCE --prompt PROMPT -o report.html"
