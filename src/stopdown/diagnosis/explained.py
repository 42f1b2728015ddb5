"""`explain`: diagnose exceptions, texts, piped logs, pictures, clips, sound and records."""

from __future__ import annotations

import dataclasses
import re
import shlex
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from stopdown.diagnosis.knowledge import read_knowledge
from stopdown.diagnosis.texts import (
    _COMPARE,
    MOST_BYTES,
    RUN_AGAIN,
    decode_log,
    explain_ends,
    explain_text,
    find_coding,
)
from stopdown.errors import InputError, make_printable
from stopdown.files.outputs import find_record_path
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

NONE = "none"
"""`Diagnosis.fault` of a picture or video without a visible fault."""

FEW_STEPS = 4
"""Number of denoising steps up to which a result is bad in any precision, except for few-step models."""

MOST_STREAM_BYTES = 2**30
"""Bytes after which reading of a stream stops."""

MOST_FRAMES = 2_000
"""Number of frames of a video that are checked; large ones are limited by `media.MOST_CLIP_BYTES`."""


def explain(subject: str | BaseException | Path) -> Diagnosis:
    """Explain a failure, and name the remedy and the next command.

    Args:
        subject: an error message, a traceback or a log as text; an exception; or the path of a log,
            of a picture, or of a video.

    Returns:
        The diagnosis. Its `fault` is `unknown` if no cause is known, and `none` for a picture that looks
        healthy.

    Raises:
        InputError: the path cannot be read.

    Examples:
        >>> message = "RuntimeError: expected scalar type Half but found Float"
        >>> stopdown.explain(message).fault
        'dtype-mismatch'
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


def explain_stream(stream: BinaryIO) -> Diagnosis:
    """Explain a log from a stream, of which only the beginning and the end are kept in memory."""
    head, tail = stream.read(MOST_BYTES // 2), b""
    for _ in range(MOST_STREAM_BYTES // (MOST_BYTES // 2)):
        piece = stream.read(MOST_BYTES // 2)
        if not piece:
            break
        tail = (tail + piece)[-MOST_BYTES // 2 :]
    return explain_ends(decode_log(head, tail))


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
    return explain_ends(_read_log(path))


def _explain_clip(path: Path, frames: Iterator[Any]) -> Diagnosis:
    """Explain the faults in the frames of a clip, up to a limit of frames and bytes, and in its track."""
    from stopdown.frames import frame_faults, media, sound_faults

    count, was_cut = 0, False

    def take() -> Iterator[Any]:
        nonlocal count, was_cut
        for frame in frames:
            was_cut = count == MOST_FRAMES or frame.nbytes * (count + 1) > media.MOST_CLIP_BYTES
            if was_cut:
                return
            count += 1
            yield frame

    seen: list[FrameFault | SoundFault] = [*frame_faults.find_frame_faults(take())]
    if path.suffix.lower() in VIDEOS:
        seen += sound_faults.find_track_faults(path)
    found = explain_faults(path, seen)
    said = f" Only its first {count} frames were looked at." if was_cut else ""
    return _name_run(dataclasses.replace(found, why=found.why + said), path)


def _name_run(found: Diagnosis, path: Path) -> Diagnosis:
    """Extend a clip's diagnosis by the record beside it: the run's faults, its model and its prompt."""
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
    if found.fault == NONE and (few := _count_few_steps(run)):
        found = dataclasses.replace(
            found,
            title=f"{found.title.removesuffix('.')}, but it was made in only {few}; most models need "
            "20 or more.",
            remedy=("Use more steps: stopdown generate SOURCE PROMPT --steps 20", *found.remedy),
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


def _count_few_steps(run: RunRecord) -> str:
    """Write `4 steps` if a run had so few that most models' results are bad; "" otherwise."""
    steps = run.request.get("steps")
    if not isinstance(steps, int) or steps > FEW_STEPS:
        return ""
    return f"{steps} step{'s' * (steps != 1)}"


def _read_log(path: Path) -> list[str]:
    half = MOST_BYTES // 2
    try:
        if not path.is_file():
            raise _refuse_log(path, "it isn't a file" if path.exists() else "No such file")
        with path.open("rb") as file:
            head = file.read(half)
            if b"\0" in head and find_coding(head) == "utf-8":
                raise _refuse_log(path, "it isn't text")
            file.seek(max(half, path.stat().st_size - half))
            return decode_log(head, file.read(half))
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
    called = {call.component for call in run.calls}
    reasons = group_components(
        (x.component, f"ran in {x.precision}. {x.reason}")
        for x in run.decisions
        if not called or x.component in called
    )
    nothing = "Nothing to do."
    if few := _count_few_steps(run):
        nothing = (
            f"Precision needs no change, but the run had only {few}; most models need 20 or more."
        )
    return Diagnosis(
        fault=kinds[0] if kinds else NONE,
        meaning="what the run itself recorded",
        title=f"{make_printable(path.name)} is the record of a run of {run.source}: {run.verdict}",
        why=" ".join(f"{names} {reason}" for names, reason in reasons),
        evidence=(*found, *_list_repairs(run)),
        remedy=tuple(x.remedy for x in run.findings) or (nothing,),
        run_next=(f"stopdown report {shlex.quote(str(path))}",),
    )


def _list_repairs(run: RunRecord) -> list[Clue]:
    """List the faults of a run, with the repair of each."""
    done = {x.action: f"repaired ({x.done})" for x in run.repairs} | {"none": "not repaired"}
    return [Clue(0, x.evidence, f"{done[x.action]}, {x.module_path}") for x in run.repairs]


_SHOWN_BY = {
    "plan": "Use it: stopdown generate SOURCE PROMPT --precision plan.json",
    "comparison": "Make its page: stopdown report report.html.json",
}


def _refuse_log(path: Path, cause: str) -> InputError:
    return InputError(
        f"The file {path} can't be read: {cause}.",
        remedy="Name a log, a picture or a video that exists, give the message itself, or pipe a "
        "log into stopdown explain -",
    )


def explain_faults(path: Path, faults: Iterable[FrameFault | SoundFault]) -> Diagnosis:
    """Make the diagnosis of a finished picture, video or sound from its faults; the first is its title."""
    found = list(faults)
    noun = "sound" if path.suffix.lower() in SOUNDS else "frames"
    kinds = "silent, clipped or noisy" if noun == "sound" else "black, grey, flat, frozen or noisy"
    if not found:
        return Diagnosis(
            fault=NONE,
            meaning=f"no fault that {noun} can show",
            title=f"No fault found in {make_printable(path.name)}.",
            why=f"The result isn't {kinds}. The {noun} alone can't show whether it matches the prompt, or "
            "how close it is to fp32.",
            remedy=(f"Compare it with an fp32 run from the same seed: {_COMPARE}",),
            run_next=(_COMPARE,),
        )
    known, first = read_knowledge(), found[0]
    meant = first.meaning
    related = [cause for cause in known.causes if cause.fault == meant.fault]
    return Diagnosis(
        fault=meant.fault,
        meaning=known.faults.get(meant.fault, meant.says),
        cause=f"{first.kind}-{first.noun}",
        title=f"{make_printable(path.name)}: {meant.says}.",
        why=meant.why,
        evidence=tuple(Clue(0, entry.evidence, f"{entry.kind} {entry.noun}") for entry in found),
        remedy=tuple(entry.remedy for entry in found) + tuple(c.remedy[0] for c in related[:1]),
        run_next=related[0].next if related else ("stopdown generate SOURCE PROMPT --seed 1",),
        reports=tuple(report for cause in related for report in cause.reports)[:8],
        alternatives=tuple(
            Alternative(name, known.faults[name], RUN_AGAIN.format(precision))
            for name, precision in meant.elsewhere.items()
        ),
    )
