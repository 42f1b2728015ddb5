"""`explain`: an error message, a traceback, a log or a finished picture, to its cause and its remedy.

The knowledge is data in `knowledge/explain/`: *causes*, each with patterns of the messages that show
it, and *signs*, which are facts around a message (a model, a device, a dtype, an option) that make one
fault likelier than another. A cause is a candidate when one of its patterns is found, and what it needs
beside it; its points are its own and those of the signs that favour its fault. The candidate with most
points is the answer, the others are named as alternatives. Every line that counted is shown. Lines that
programs print in every run (*routine*) are no signs, and advice that they print (*advice*) is not read.

**Catches** mixed dtypes, fp32 layers that were lowered, missing kernels and formats, builds of PyTorch
without kernels for the card, bf16 that is emulated, overflow by component as far as the text names one,
masks, kernels, sums in fp16, autocast, offload, what ran before, schedules, quantised files, adapters;
black, grey, flat, frozen and noisy pictures and videos.
**Does not catch** what the text does not say, and the middle of a very long one. A bare `invalid value
encountered in cast` is answered with how to find the component, and not with a guess. Anything else is
unknown.

Nothing here imports torch; a picture or video needs only the libraries that read it.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import math
import re
import shlex
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import msgspec

from stopdown.errors import InputError, make_printable
from stopdown.files.outputs import find_record_path
from stopdown.files.toml_files import read_folder
from stopdown.records import (
    Alternative,
    Clue,
    Diagnosis,
    RunRecord,
    group_components,
    read_kind,
    read_record,
)

if TYPE_CHECKING:
    from stopdown.frames.frame_faults import FrameFault
    from stopdown.frames.sound_faults import SoundFault

UNKNOWN = "unknown"
"""The fault of a text that holds no message that is known."""

NONE = "none"
"""The fault of a picture or video that looks fine."""

MOST_CHARACTERS = 200_000
"""Of a longer text, once its lines are condensed, the first and the last half of this are searched."""

LONGEST_LINE = 1_000
"""Characters of a line that are searched; a message is at its beginning."""

MOST_BYTES = 8_000_000
"""Of a longer text, file or stream the first and the last half of this are read."""

MOST_STREAM_BYTES = 2**30
"""A stream that has not ended by then is read no further."""

MOST_FRAMES = 2_000
"""Of a longer video the first frames are looked at; of large ones `media.MOST_CLIP_BYTES`."""

ALTERNATIVES = 8


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


def explain(subject: str | BaseException | Path) -> Diagnosis:
    """Explain a failure, and name the remedy and the next command.

    Args:
        subject: an error message, a traceback or a log as text; an exception; or the path of a log,
            of a picture, or of a video.

    Returns:
        The diagnosis. Its `fault` is `unknown` where no cause is known, and `none` for a picture that
        looks healthy.

    Raises:
        InputError: a path that cannot be read.
    """
    if isinstance(subject, Path):
        return explain_file(subject)
    if isinstance(subject, BaseException):
        return explain_text("".join(traceback.format_exception(subject)))
    if not isinstance(subject, str):
        raise InputError(
            f"explain was given a {type(subject).__name__}.",
            expected="It takes the text of a message or a log, an exception, or a pathlib.Path.",
            remedy="Give str(...) of it, or Path('clip.mp4') for a file.",
        )
    return explain_text(subject)


def explain_text(text: str) -> Diagnosis:
    """Explain the text of a message, a traceback or a log, as `explain` does."""
    half = MOST_BYTES // 2
    ends = [text] if len(text) <= MOST_BYTES else [text[:half], text[-half:]]
    return _explain_ends(ends)


REFUSALS = (RuntimeError, TypeError, ValueError)
"""What torch, and kernels that are called in its place, raise at operands of two dtypes."""


def is_refusal(error: Exception) -> bool:
    """Return whether an error says that the operands of one operation have different dtypes."""
    return explain_text(f"{type(error).__name__}: {error}").fault == "dtype-mismatch"


def explain_stream(stream: BinaryIO) -> Diagnosis:
    """Explain piped input as `explain` does, with only its beginning and end in memory."""
    head, tail = stream.read(MOST_BYTES // 2), b""
    for _ in range(MOST_STREAM_BYTES // (MOST_BYTES // 2)):
        piece = stream.read(MOST_BYTES // 2)
        if not piece:
            break
        tail = (tail + piece)[-MOST_BYTES // 2 :]
    return _explain_ends(_decode(head, tail))


def _decode(head: bytes, tail: bytes) -> list[str]:
    """Decode the beginning and end of a text; as one part where nothing was skipped between them."""
    is_whole = len(tail) < MOST_BYTES // 2
    parts = [head + tail] if is_whole else [head, tail]
    coding = _find_coding(head)
    return [part.decode(coding, errors="replace") for part in parts]


def _find_coding(head: bytes) -> str:
    """Return the encoding of a text: UTF-8, or the UTF-16 of PowerShell's logs."""
    if b"\0" not in head:
        return "utf-8"
    return {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(
        head[:2], "utf-8"
    )


def _explain_ends(ends: Iterable[str]) -> Diagnosis:
    known = read_knowledge()
    text, numbers = condense(*ends)
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
    if not weighed:
        return _describe_unknown(text, numbers)
    return _describe_known(text, numbers, weighed, signs, known)


@dataclass(frozen=True)
class _Candidate:
    cause: Cause
    points: int
    match: re.Match[str]
    need: re.Match[str] | None


_Signs = list[tuple[Sign, list[re.Match[str]]]]


def _blank(patterns: Iterable[re.Pattern[str]], text: str) -> str:
    """Replace the matches of patterns by blanks; all other characters keep their position."""
    for pattern in patterns:
        text = pattern.sub(lambda found: " " * len(found[0]), text)
    return text


def _weigh(
    cause: Cause, text: str, telling: str, signs: _Signs, *, is_told: bool
) -> _Candidate | None:
    """Weigh the evidence for a cause; return None when its message, or a sign it needs, is missing.

    Args:
        is_told: it may be a person's description, in which loose words count.
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
    """Return whether a message's share of bad values, all or some, is that of the cause."""
    if not cause.counts:
        return True
    total = math.prod(map(int, re.findall(r"\d{1,9}", match["shape"])))
    return (int(match["invalid"]) >= total) is (cause.counts == "all")


def _find_first(patterns: Iterable[re.Pattern[str]], text: str) -> re.Match[str] | None:
    """Return the match of the first pattern that has one; patterns are in order of significance."""
    return next((match for pattern in patterns if (match := pattern.search(text))), None)


def _find_all(patterns: Iterable[re.Pattern[str]], text: str) -> list[re.Match[str]]:
    """Return a match of every pattern, or an empty list."""
    matches = [pattern.search(text) for pattern in patterns]
    return [match for match in matches if match] if all(matches) else []


def condense(text: str, end: str = "") -> tuple[str, list[int]]:
    """Return a text with each line once, and the original number of each line, from 1.

    Lines that differ in their digits only, such as those of a progress bar, count as one. Control
    sequences are removed, white space in a line becomes one blank, long lines are cut, and the middle
    of a text that is still long is left out: no pattern sees a long line, or two blanks or line ends
    side by side.

    Args:
        text: all of it, or its beginning.
        end: its end, where the middle was not read; its lines have the number 0.
    """
    lines: dict[str, tuple[int, str]] = {}
    seen: set[str] = set()
    numbered = [*enumerate(text.splitlines(), 1), *((0, line) for line in end.splitlines())]
    for number, line in numbered:
        cut = line[:LONGEST_LINE]
        if cut not in seen:
            seen.add(cut)
            clean = " ".join(make_printable(cut).split())
            lines.setdefault(_DIGITS.sub("0", clean), (number, clean))
    kept = _drop_middle(list(lines.values()))
    return "\n".join(line for _, line in kept), [number for number, _ in kept]


_DIGITS = re.compile(r"\d+")


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
    """Read the facts of a run that a log names: all its options, and the first match of other facts."""
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
    """Return a cause's remedies, those for the named card first, without those for other cards."""
    own = [x.named for x in known.generations if card and x.cards.search(card)]
    others = [x.named for x in known.generations if card and not x.cards.search(card)]

    def names(cards: list[re.Pattern[str]], remedy: str) -> bool:
        head = re.match(r"(?:On|For|With)\b[^,:]{0,80}", remedy)
        return head is not None and any(x.search(head[0]) for x in cards)

    meant = [x for x in cause.remedy if names(own, x)]
    open_to_all = [x for x in cause.remedy if x not in meant and not (own and names(others, x))]
    return tuple(meant + open_to_all) or cause.remedy


def _list_alternatives(weighed: list[_Candidate], known: Knowledge) -> Iterator[Alternative]:
    """List the other faults once each, likeliest first."""
    seen = {weighed[0].cause.fault}
    for other in weighed[1:]:
        fault = other.cause.fault
        if fault not in seen and len(seen) <= ALTERNATIVES:
            seen.add(fault)
            yield Alternative(fault, known.faults[fault], other.cause.next[0])


_DTYPES = (
    (r"bfloat16", "bf16"),
    (r"float8_?e4m3", "fp8-e4m3"),
    (r"float8_?e5m2", "fp8-e5m2"),
    (r"half|float16", "fp16"),
    (r"double|float64", "fp64"),
    (r"float", "fp32"),
)


def name_operand(text: str) -> str:
    """Return our name of a dtype in a message: `fp16` for `struct c10::Half` or `torch.cuda.HalfTensor`."""
    for pattern, name in _DTYPES:
        if re.search(pattern, text, re.IGNORECASE):
            return name
    return text.strip()


def _fill(cause: Cause, values: dict[str, str]) -> str:
    """Fill the title with the values of the message; return the plain title when a value is missing."""
    wanted = set(re.findall(r"\{(\w+)\}", cause.title))
    return cause.title.format(**values) if wanted <= set(values) else cause.plain or cause.title


_FRAME = re.compile(r'^File "([^"\n]{1,500}+)", line (\d{1,9}+), in (\S{1,200}+)', re.MULTILINE)
_MODEL_FILE = re.compile(r"(?:^|/)(?=(?:diffusers|transformers)/(?:models|pipelines)/)")


def _find_frame(text: str) -> str:
    """Return the deepest frame of a traceback in a model's code; "" when there is none."""
    frames = [
        f"{parts[-1]}:{frame[2]} in {frame[3]}"
        for frame in _FRAME.finditer(text)
        if len(parts := _MODEL_FILE.split(frame[1])) > 1
    ]
    return frames[-1] if frames else ""


def _describe_unknown(text: str, numbers: list[int]) -> Diagnosis:
    rows = [(n, line) for n, line in zip(numbers, text.split("\n"), strict=False) if line.strip()]
    last = [Clue(number, line.strip()[:300], "the last line") for number, line in rows[-1:]]
    return Diagnosis(
        fault=UNKNOWN,
        meaning="no message of precision that is known here",
        title="Nothing in this text is a known failure of precision.",
        why="It may be something else (memory, a missing file, a size), or new. A log that begins "
        "earlier may hold the message that counts: the first warning, not the last line.",
        evidence=tuple(last),
        frame=_find_frame(text),
        remedy=(
            "Give it more text: the whole log or traceback, with the model, the device and the dtype.",
        ),
        run_next=(
            _RUN.format("fp32"),
            _RUN.format("fp16"),
        ),
    )


PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".avif")
VIDEOS = (
    *(".mp4", ".gif", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".flv", ".ogv", ".ts", ".mpg"),
    *(".mpeg", ".wmv", ".apng"),
)
SOUNDS = (".wav", ".flac", ".mp3", ".ogg")
EXPLAINED = (".log", ".txt", *PICTURES, *VIDEOS, *SOUNDS)


def explain_file(path: Path) -> Diagnosis:
    """Explain a picture, a video, sound, a folder of frames, a log or a record, as `explain` does."""
    from stopdown.frames import media, sound, sound_faults

    if path.is_dir() and not any(path.glob("*.png")):
        raise _refuse_folder(path)
    if path.suffix == ".json" and (kind := read_kind(path)):
        return _explain_record(path, kind)
    if path.is_dir() or path.suffix.lower() in VIDEOS:
        return _explain_clip(path, media.iterate_frames(path, MOST_FRAMES + 1))
    if path.suffix.lower() in PICTURES:
        return _explain_clip(path, iter([media.read_image(path)]))
    if path.suffix.lower() in SOUNDS:
        return _name_run(
            explain_faults(path, sound_faults.find_sound_faults(sound.read_sound(path))), path
        )
    return _explain_ends(_read_log(path))


def _explain_clip(path: Path, frames: Iterator[Any]) -> Diagnosis:
    """Explain the faults in the frames of a clip, up to a limit of frames and bytes."""
    from stopdown.frames import frame_faults, media

    count, was_cut = 0, False

    def take() -> Iterator[Any]:
        nonlocal count, was_cut
        for frame in frames:
            was_cut = count == MOST_FRAMES or frame.nbytes * (count + 1) > media.MOST_CLIP_BYTES
            if was_cut:
                return
            count += 1
            yield frame

    found = explain_faults(path, frame_faults.find_frame_faults(take()))
    said = f" Only its first {count} frames were looked at." if was_cut else ""
    return _name_run(dataclasses.replace(found, why=found.why + said), path)


def _name_run(found: Diagnosis, path: Path) -> Diagnosis:
    """Add the record beside a clip to a diagnosis: the faults of its run first, model and prompt."""
    record = find_record_path(path)
    try:
        if not record.is_file() or read_kind(record) != "run":
            return found
        run = read_record(record, RunRecord)
    except InputError:  # damaged: the frames say what they say
        return found
    prompt = run.request.get("prompt")
    names = {"SOURCE": run.source, **({"PROMPT": prompt} if isinstance(prompt, str) else {})}

    def fill(text: str) -> str:
        return re.sub(r"\b(SOURCE|PROMPT)\b", lambda x: shlex.quote(names.get(x[0], x[0])), text)

    if run.repairs:
        count = f"{len(run.repairs)} fault{'s' * (len(run.repairs) != 1)}"
        found = dataclasses.replace(
            found,
            fault="repaired" if found.fault == NONE else found.fault,
            title=f"{found.title} The run that made it had {count}, listed below.",
            evidence=(*_list_repairs(run), *found.evidence),
        )
    made = Clue(0, f"made by {run.source} on {run.device}", f"its record, {record.name}")
    return dataclasses.replace(
        found,
        evidence=(*found.evidence, made),
        remedy=tuple(map(fill, found.remedy)),
        run_next=tuple(map(fill, found.run_next)),
        alternatives=tuple(
            dataclasses.replace(x, run_next=fill(x.run_next)) for x in found.alternatives
        ),
    )


def _read_log(path: Path) -> list[str]:
    half = MOST_BYTES // 2
    try:
        if not path.is_file():
            raise _refuse_log(path, "it is no file" if path.exists() else "No such file")
        with path.open("rb") as file:
            head = file.read(half)
            if b"\0" in head and _find_coding(head) == "utf-8":
                raise _refuse_log(path, "it is not text")
            file.seek(max(half, path.stat().st_size - half))
            return _decode(head, file.read(half))
    except OSError as error:
        raise _refuse_log(path, error.strerror or str(error)) from error


def _refuse_folder(path: Path) -> InputError:
    names = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() in EXPLAINED)
    example = f"stopdown explain {shlex.quote(str(path / names[0]))}" if names else ""
    return InputError(
        f"The folder {path} holds no frames.",
        expected="A folder of frames holds frame_0000.png, frame_0001.png and so on.",
        remedy=f"Name one file in it: {example}" if names else "Name a log, a picture or a video.",
    )


def _explain_record(path: Path, kind: str) -> Diagnosis:
    """Explain the record of a run by its findings and repairs; refuse other records with a remedy."""
    if kind != "run":
        raise InputError(
            f"{path} is a record of the kind {kind}.",
            expected="A message, a log, a picture, a video or the record of a run is explained.",
            remedy=_SHOWN_BY.get(kind, "Open it as text: it is JSON."),
        )
    run = read_record(path, RunRecord)
    found = [Clue(0, x.evidence, x.kind) for x in run.findings]
    kinds = [x.kind for x in run.findings] or ["repaired"] * bool(run.repairs)
    state = "found nothing wrong" if not kinds else f"found {', '.join(dict.fromkeys(kinds))}"
    reasons = group_components(
        (x.component, f"ran in {x.precision}. {x.reason}") for x in run.decisions
    )
    return Diagnosis(
        fault=kinds[0] if kinds else NONE,
        meaning="what the run itself recorded",
        title=f"{make_printable(path.name)} is the record of a run of {run.source}, which {state}.",
        why=" ".join(f"{names} {reason}" for names, reason in reasons),
        evidence=(*found, *_list_repairs(run)),
        remedy=tuple(x.remedy for x in run.findings) or ("Nothing has to be done.",),
        run_next=(f"stopdown report {shlex.quote(str(path))}",),
    )


def _list_repairs(run: RunRecord) -> list[Clue]:
    """List the faults of a run, with the repair of each."""
    done = {x.action: f"repaired, {x.action}" for x in run.repairs} | {"none": "not repaired"}
    return [Clue(0, x.evidence, f"{done[x.action]}, {x.module_path}") for x in run.repairs]


_SHOWN_BY = {
    "plan": "Use it: stopdown generate SOURCE PROMPT --precision plan.json",
    "comparison": "Make its page: stopdown report report.html.json",
}


def _refuse_log(path: Path, cause: str) -> InputError:
    return InputError(
        f"The file {path} cannot be read: {cause}.",
        remedy="Name a log, a picture or a video that exists, give the message itself, or pipe a "
        "log into stopdown explain -",
    )


_RUN = "stopdown generate SOURCE PROMPT --precision {}"
_COMPARE = "stopdown compare SOURCE --prompt PROMPT -o report.html"


def explain_faults(path: Path, faults: Iterable[FrameFault | SoundFault]) -> Diagnosis:
    """Make the diagnosis of a finished picture, video or sound from its faults."""
    found = list(faults)
    noun = "sound" if path.suffix.lower() in SOUNDS else "frames"
    kinds = "silent, clipped or noise" if noun == "sound" else "black, grey, flat, frozen or noise"
    if not found:
        return Diagnosis(
            fault=NONE,
            meaning=f"no fault that {noun} can show",
            title=f"{make_printable(path.name)} looks fine.",
            why=f"It is not {kinds}. The {noun} alone cannot show whether it matches the prompt, or how "
            "close it is to fp32.",
            remedy=(f"Compare it with the same seed in fp32: {_COMPARE}",),
            run_next=(_COMPARE,),
        )
    known, first = read_knowledge(), found[0]
    meant = first.meaning
    related = [cause for cause in known.causes if cause.fault == meant.fault]
    return Diagnosis(
        fault=meant.fault,
        meaning=known.faults.get(meant.fault, meant.says),
        cause=f"{first.kind}-{noun}",
        title=f"{make_printable(path.name)}: {meant.says}.",
        why=meant.why,
        evidence=tuple(Clue(0, entry.evidence, f"{entry.kind} {noun}") for entry in found),
        remedy=tuple(entry.remedy for entry in found) + tuple(c.remedy[0] for c in related[:1]),
        run_next=related[0].next if related else ("stopdown generate SOURCE PROMPT --seed 1",),
        reports=tuple(report for cause in related for report in cause.reports)[:8],
        alternatives=tuple(
            Alternative(name, known.faults[name], _RUN.format(precision))
            for name, precision in meant.elsewhere.items()
        ),
    )
