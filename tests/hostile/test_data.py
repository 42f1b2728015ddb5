"""Hostile data: records, plans, journals, reports, logs, pictures, videos, prompt files and profiles.

Each row gives one file to one command; `UNREADABLE` is what any JSON file may be instead of one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hostile.runner import MIB, Attack, copy_tiny, run_attack
from hostile.test_models import UNREADABLE, Damage, void, write
from models.comparisons import RUN, make_comparison, write_profile
from stopdown.frames.media import write_media
from stopdown.plans.plan_files import seal_plan
from stopdown.records import ComponentPlan, Plan, Scaling, to_json

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]x[/red]\u202e\x9b1m"
"""Control sequences, markup and reversed text, as a name may hold them."""


def give(name: str, words: str, make: Damage, code: int, message: str, **more: Any) -> Attack:
    """A row: `make` makes the file that `FILE.suffix` in the words names, exit code and message."""

    def build(folder: Path) -> list[str]:
        found = [word for word in words.split() if word.startswith("FILE")]
        path = folder / found[0].replace("FILE", "file")
        make(path)
        return [
            str(path) if word == found[0] else word.replace("OUT", f"{folder}/out")
            for word in words.split()
        ]

    return Attack(f"{words.split()[0]}: {name}", build, code, message, **more)


def run_rows(rows: list[Attack], every: int = 1) -> Any:
    """Rows of a test: one in so many in the default run, all of them with the slow tests."""
    marks = [() if place % every == 0 else pytest.mark.slow for place in range(len(rows))]
    marked = [pytest.param(row, marks=mark) for row, mark in zip(rows, marks, strict=True)]
    return pytest.mark.parametrize("row", marked, ids=[row.name for row in rows])


# ---------------------------------------------------------------------------------------------
# Records and their pages

REPORT = "report FILE.json -o OUT.html"


def put_run(**changes: Any) -> Damage:
    """A run's record with other fields."""
    return lambda path: void(path.write_text(json.dumps({**json.loads(to_json(RUN)), **changes})))


def put_record(record: Callable[[], Any]) -> Damage:
    return lambda path: void(path.write_text(to_json(record())))


def damage_run(damage: Damage) -> Damage:
    """A run's record, damaged as JSON."""

    def make(path: Path) -> None:
        path.write_text(to_json(RUN))
        damage(path)

    return make


@functools.cache
def comparison() -> Any:
    return make_comparison(2)


WRONG_FIELDS: dict[str, Any] = {
    "source": 3,
    "request": [],
    "machine": None,
    "decisions": {"a": 1},
    "calls": [{"component": "vae"}],
    "stages_s": {"load": "soon"},
    "peak_bytes": 1.5,
    "peak_source": [],
    "own_s": "0.0",
    "findings": [[]],
    "output": 1,
    "elapsed_s": True,
    "repairs": "none",
    "maxima": [{"component": "vae", "path": "a", "step": "first", "precision": "fp16", "amax": 1}],
    "journal": [],
}


def put_sparse(mib: int) -> Damage:
    """A file of zeros that takes no room."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, mib * MIB)

    return make


LARGER = {**UNREADABLE, "huge": (put_sparse(257), "it has 269484032 bytes, and at most")}
"""A comparison may be larger than a configuration."""

RECORDS = [
    *(
        give(
            kind,
            REPORT,
            damage_run(damage),
            2,
            "The file {folder}/file.json isn't a record of Stopdown: " + said,
        )
        for kind, (damage, said) in LARGER.items()
    ),
    *(
        give(
            f"a wrong {field}",
            REPORT,
            put_run(**{field: value}),
            2,
            "The text isn't a RunRecord: Expected"
            if field != "calls"
            else "The text isn't a RunRecord: Object missing required field",
        )
        for field, value in WRONG_FIELDS.items()
    ),
    *(
        give(
            f"kind {kind!r:.20}",
            REPORT,
            put_run(kind=kind),
            2,
            "The file {folder}/file.json holds a record of the kind",
        )
        for kind in ("plan", "", None, 3, [], {"kind": "run"}, "x" * 100_000, HOSTILE)
    ),
    *(
        give(
            f"schema {schema!r}",
            REPORT,
            put_run(schema=schema),
            2,
            f"The RunRecord has schema {schema!r}.",
        )
        for schema in (0, 3, "1", None, 1e300)
    ),
    give(
        "a field more",
        REPORT,
        put_run(**{HOSTILE: 1}),
        2,
        "The RunRecord has fields that are unknown: [red]x",
    ),
    give(
        "no field",
        REPORT,
        write(b'{"kind": "run"}'),
        2,
        "The text isn't a RunRecord: Object missing",
    ),
]

SHOWN = [
    give(
        "a call without a decision",
        REPORT,
        put_run(decisions=[]),
        0,
        "circle.mp4",
        left=("out.html",),
    ),
    give(
        "stages that sum to 0",
        REPORT,
        put_run(stages_s={"a": -1, "b": 1}),
        0,
        "circle.mp4",
        left=("out.html",),
    ),
    give(
        "the largest numbers",
        REPORT,
        put_run(elapsed_s=1e308, stages_s={"a": 1e308, "b": 1e308}, peak_bytes=2**63),
        0,
        "circle.mp4",
        left=("out.html",),
    ),
    give(
        "names that a terminal obeys",
        REPORT,
        put_run(
            source=HOSTILE,
            pipeline=HOSTILE,
            output=HOSTILE,
            request={HOSTILE: HOSTILE, "prompt": HOSTILE},
        ),
        0,
        "\ufffd]0;owned[red]x[/red]",
        left=("out.html",),
    ),
    give(
        "a step far away",
        REPORT,
        put_run(
            maxima=[
                {
                    "component": "vae",
                    "path": "a",
                    "step": 10**18,
                    "precision": "fp16",
                    "amax": 1e-300,
                }
            ]
        ),
        0,
        "circle.mp4",
        left=("out.html",),
    ),
    give(
        "a prompt that a terminal obeys",
        REPORT,
        put_record(lambda: dataclasses.replace(comparison(), headline=HOSTILE, reasons=(HOSTILE,))),
        0,
        "\ufffd]0;owned[red]x[/red]",
        left=("out.html",),
    ),
]


@pytest.mark.default_rows(5)
@run_rows(RECORDS, every=5)
def test_a_record_that_is_none(row: Attack, tmp_path: Path) -> None:
    """It is named with what is wrong with it, and no page is written."""
    run_attack(row, tmp_path)


@run_rows(SHOWN, every=2)
def test_a_record_that_is_odd(row: Attack, tmp_path: Path) -> None:
    """It is shown as it is, and nothing in it is obeyed."""
    assert is_plain(run_attack(row, tmp_path).stdout)


def is_plain(text: str) -> bool:
    """Whether a terminal shows a text and obeys nothing in it."""
    return not set(text) & set("\x1b\x07\x08\x9b\u202e")


# ---------------------------------------------------------------------------------------------
# Plans


def make_plan(**changes: Any) -> str:
    entry = ComponentPlan(
        "transformer", "CogVideoXTransformer3DModel", "aa", "fp16", Scaling({"a": -6})
    )
    plan = Plan("m", "", "CogVideoXPipeline", "fp16", {}, (entry,), "cpu", 0.0)
    return json.dumps({**json.loads(to_json(seal_plan(plan))), **changes})


def put_plan(damage: Damage = void, **changes: Any) -> Damage:
    def make(path: Path) -> None:
        path.write_text(make_plan(**changes))
        damage(path)

    return make


def take_plan(name: str, make: Damage, message: str) -> Attack:
    """A plan given to `convert` beside a healthy tiny model."""

    def build(folder: Path) -> list[str]:
        model, path = copy_tiny(folder), folder / "plan.json"
        make(path)
        return ["convert", str(model), str(folder / "out"), "--plan", str(path)]

    return Attack(f"convert: {name}", build, 2, message)


NO_PLAN = "{folder}/plan.json isn't a plan. The text isn't a Plan: "
SYSTEM = ("huge", "pipe", "folder", "loop", "link to nothing")
PLANS = [
    *(
        take_plan(
            kind,
            put_plan(damage),
            f"The plan {{folder}}/plan.json can't be read: {said}"
            if kind in SYSTEM
            else NO_PLAN + ("" if kind in ("a list", "a word") else said),
        )
        for kind, (damage, said) in UNREADABLE.items()
    ),
    *(
        take_plan(f"a wrong {field}", put_plan(**{field: value}), NO_PLAN + "Expected")
        for field, value in {
            "components": {},
            "versions": {"torch": 2},
            "elapsed_s": None,
            "seal": 0,
        }.items()
    ),
    take_plan(
        "another seal",
        put_plan(seal=HOSTILE),
        "The plan {folder}/plan.json was edited: its content",
    ),
    take_plan(
        "a run", put_plan(kind="run"), "{folder}/plan.json isn't a plan. The Plan has kind 'run'."
    ),
    take_plan(
        "a newer schema",
        put_plan(schema=4),
        "{folder}/plan.json isn't a plan. The Plan has schema 4.",
    ),
    take_plan(
        "a field more",
        put_plan(more=1),
        "{folder}/plan.json isn't a plan. The Plan has fields that",
    ),
]


@run_rows(PLANS, every=5)
def test_a_plan_that_is_none(row: Attack, tmp_path: Path) -> None:
    """It is named with what is wrong with it, and nothing is written."""
    run_attack(row, tmp_path)


# ---------------------------------------------------------------------------------------------
# What `explain` is given

CUT = {"png": ".png", "jpeg": ".jpg", "webp": ".webp", "tiff": ".tif", "bmp": ".bmp"}


def put_picture(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    Image.fromarray(noise).save(path)


def cut(make: Damage, share: float) -> Damage:
    """The first part of a file that is made so."""

    def damage(path: Path) -> None:
        make(path)
        os.truncate(path, int(path.stat().st_size * share))

    return damage


def put_clip(path: Path) -> None:
    write_media(path, np.zeros((3, 32, 32, 3), np.uint8))


def put_playlist(text: str) -> Damage:
    """A list of other files under the name of a video, beside a real video."""

    def make(path: Path) -> None:
        put_clip(path.with_name("secret.mp4"))
        path.write_text(text)

    return make


def put_bomb(path: Path) -> None:
    """A png of a few bytes whose header says 60000x60000 pixels."""
    Image.new("1", (8, 8)).save(path)
    content = path.read_bytes()
    header = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + content[24:29]
    import zlib

    path.write_bytes(content[:12] + header + zlib.crc32(header).to_bytes(4, "big") + content[33:])


def repeat_word(word: str) -> Damage:
    """900 lines of a word that a pattern begins with, each a little different: 0.9 MB."""

    def make(path: Path) -> None:
        names = (chr(97 + i % 26) + chr(97 + i // 26 % 26) + chr(97 + i // 676) for i in range(900))
        path.write_text("\n".join(f"{name} {word * (990 // len(word))}" for name in names))

    return make


def list_explained() -> Iterator[Attack]:
    for name, suffix in CUT.items():
        for share in (0, 0.1, 0.5):
            yield give(
                f"{share:.0%} of a {name}",
                f"explain FILE{suffix}",
                cut(put_picture, share),
                2,
                "The file {folder}/file" + suffix + " can't be read as a picture: ",
            )
    for suffix in (".png", ".jpg", ".log", ".mp4"):
        yield give(
            f"a pipe named {suffix}",
            f"explain FILE{suffix}",
            lambda path: os.mkfifo(path),
            2,
            "The file {folder}/file" + suffix + " can't be read: ",
        )
        yield give(
            f"a loop named {suffix}",
            f"explain FILE{suffix}",
            lambda path: path.symlink_to(path.name),
            2,
            "There is no file {folder}/file" + suffix,
        )
        yield give(
            f"a folder named {suffix}",
            f"explain FILE{suffix}",
            Path.mkdir,
            2,
            "The folder {folder}/file" + suffix + " holds no frames.",
        )
    for suffix in (".mp4", ".gif", ".mov", ".webm", ".avi", ".mkv"):
        yield give(
            f"text named {suffix}",
            f"explain FILE{suffix}",
            write(b"no frames" * 99),
            2,
            "The file {folder}/file" + suffix + " can't be read as a video: ",
        )
    for share in (0, 0.2, 0.6):
        for suffix in (".mp4", ".gif"):
            if (share, suffix) != (0.6, ".gif"):
                yield give(
                    f"{share:.0%} of a {suffix}",
                    f"explain FILE{suffix}",
                    cut(put_clip, share),
                    2,
                    "The file {folder}/file" + suffix + " can't be read as a video: ",
                )
    yield give(
        "a list of videos (concat)",
        "explain FILE.mp4",
        put_playlist("ffconcat version 1.0\nfile secret.mp4\n"),
        2,
        "The file {folder}/file.mp4 can't be read as a video: ",
    )

    yield give(
        "EPS, for which Pillow starts a program",
        "explain FILE.png",
        write(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) print\n"),
        2,
        "The file {folder}/file.png can't be read as a picture: cannot identify",
    )

    yield give(
        "60000x60000 pixels of nothing",
        "explain FILE.png",
        put_bomb,
        2,
        "The file {folder}/file.png can't be read as a picture: ",
    )

    for word in ("bf16 ", "only supports ", "from_pretrained("):
        name = f"many {word.strip()}"
        yield give(
            name,
            "explain FILE.log",
            repeat_word(word),
            1,
            "This text contains no known precision problem",
        )
    yield give(
        "white space",
        "explain FILE.log",
        lambda path: void(path.write_text("\n".join(" " * i for i in range(1300)))),
        1,
        "There's no text to explain.",
    )
    yield give(
        "one line of 20 MB",
        "explain FILE.log",
        write(b"x" * 20_000_000),
        1,
        "This text contains no known precision problem",
    )

    yield give(
        "zeros and bytes that are no text",
        "explain FILE.log",
        write(bytes(range(256)) * 50),
        2,
        "The file {folder}/file.log can't be read: it isn't text.",
    )
    yield give(
        "control sequences",
        "explain FILE.log",
        write(f"{HOSTILE}invalid value encountered in cast{HOSTILE}\n".encode()),
        0,
        "Most likely overflow in fp16",
    )


EXPLAINED = list(list_explained())


@pytest.mark.default_rows(5)
@run_rows(EXPLAINED, every=3)
def test_what_explain_is_given(row: Attack, tmp_path: Path) -> None:
    """A message or an answer, within a minute and a GiB, and nothing in a log is obeyed."""
    assert is_plain(run_attack(row, tmp_path).stdout)


# ---------------------------------------------------------------------------------------------
# Prompt files, pictures and videos for a run, profiles


def put_profile(**changes: Any) -> Damage:
    return lambda path: void(path.write_text(write_profile(**changes)))


ASKED = "doctor --device FILE.toml"
PROFILES = [
    *(
        give(name, ASKED, make, 2, "The profile {folder}/file.toml " + said)
        for name, make, said in (
            ("not TOML", write(b"name ="), "isn't TOML: "),
            ("deep brackets", write(b"a = " + b"[" * 30_000), "isn't TOML: "),
            ("5000 digits", put_profile(gib="9" * 5000), "isn't TOML: "),
            ("not UTF-8", write(b"name = '\xff'"), "can't be read: "),
            ("a pipe", lambda path: os.mkfifo(path), "can't be read: it isn't a regular file"),
            (
                "a rate of NaN",
                put_profile(rate="nan"),
                "gives formats.fp32 the rate nan, which isn't above 0",
            ),
            (
                "an endless rate",
                put_profile(rate="inf"),
                "gives formats.fp32 inf for rate, which no device has",
            ),
            (
                "endless memory",
                put_profile(gib="inf"),
                "gives it inf GiB of memory, which no device has",
            ),
            (
                "an unknown state",
                put_profile(state="fine"),
                "isn't complete: Invalid enum value 'fine'",
            ),
        )
    ),
]
TITLE = give(
    "a title that a terminal obeys",
    ASKED,
    put_profile(title="\\u001b[2J[red]x\\u0007"),
    0,
    "[red]x",
)


@run_rows(PROFILES, every=4)
def test_a_profile_that_is_none(row: Attack, tmp_path: Path) -> None:
    """It is named with what is wrong with it."""
    run_attack(row, tmp_path)


def test_the_title_of_a_profile_is_text(tmp_path: Path) -> None:
    """Control sequences and markup in it are shown and not obeyed."""
    page = run_attack(dataclasses.replace(TITLE, message=""), tmp_path).stdout
    assert "[red]x" in page
    assert is_plain(page)


def take_file(name: str, words: str, make: Damage, message: str) -> Attack:
    """A file for a run of a healthy tiny model."""

    def build(folder: Path) -> list[str]:
        model = copy_tiny(folder)
        given = [
            str(folder / word.lower()) if word.startswith(("FILE", "OUT")) else word
            for word in words.split()
        ]
        make(Path(next(word for word in given if "/file" in word)))
        return [str(model) if word == "MODEL" else word for word in given]

    return Attack(f"{words.split()[0]}: {name}", build, 2, message)


COMPARED = "compare MODEL --prompts FILE.txt --steps 1 -o OUT.html"
GIVEN = [
    *(
        take_file(f"prompts: {name}", COMPARED, make, "The prompt file {folder}/file.txt " + said)
        for name, make, said in (
            ("none", void, "can't be read: no such file"),
            ("a pipe", lambda path: os.mkfifo(path), "can't be read: it isn't a regular file"),
            ("a million lines", write(b"\n" * 10**6), "has 1000000 lines."),
            ("not UTF-8", write(b"\xff\xfe\n"), "holds no prompt: line 1: byte 1 isn't utf-8"),
            (
                "one long line",
                write(b"x" * 10**6),
                "holds no prompt: line 1: it has 1000000 characters",
            ),
        )
    ),
    *(
        take_file(
            name, f"generate MODEL ball --image FILE{suffix} --steps 1 -o OUT.mp4", make, "The "
        )
        for name, suffix, make in (
            ("a cut picture", ".png", cut(put_picture, 0.5)),
            ("a bomb as picture", ".png", put_bomb),
            ("a pipe as picture", ".png", lambda path: os.mkfifo(path)),
        )
    ),
    *(
        take_file(name, "generate MODEL ball --video FILE.mp4 --steps 1 -o OUT.mp4", make, "The ")
        for name, make in (
            ("a cut video", cut(put_clip, 0.2)),
            ("a list as video", put_playlist("ffconcat version 1.0\nfile secret.mp4\n")),
            ("a pipe as video", lambda path: os.mkfifo(path)),
        )
    ),
]


@run_rows(GIVEN, every=3)
def test_a_file_for_a_run(row: Attack, tmp_path: Path) -> None:
    """It is named before the model is loaded, and nothing is left."""
    run_attack(row, tmp_path)


def take_words(*words: str) -> Attack:
    """Words with bytes that are not UTF-8."""
    name = f"{words[0]}: {words[1]!a}"
    return Attack(name, lambda _: [*words], 2, "The argument ")


NO_TEXT = "a\udcff"
UNENCODABLE = [
    take_words("check", NO_TEXT),
    take_words("explain", f"{NO_TEXT}.png"),
    take_words("explain", f"what {NO_TEXT}"),
    take_words("generate", NO_TEXT, "a ball"),
    take_words("generate", "shapes", NO_TEXT),
    take_words("compare", "shapes", "--prompt", NO_TEXT),
    take_words("plan", "shapes", "-o", f"{NO_TEXT}.json"),
    take_words("convert", "shapes", "out", "--plan", f"{NO_TEXT}.json"),
]


@run_rows(UNENCODABLE, every=3)
def test_names_and_prompts_that_are_no_text(row: Attack, tmp_path: Path) -> None:
    """They are refused before anything is done, and do not reach the terminal."""
    outcome = run_attack(row, tmp_path)
    assert "\udcff" not in outcome.stdout + outcome.stderr


# ---------------------------------------------------------------------------------------------
# Journals

JOURNALS: dict[str, tuple[Damage, int, str]] = {
    "a cut head": (write(b"PK"), 0, ""),
    "a pipe as head": (
        lambda path: os.mkfifo(path),
        2,
        "The folder {folder}/journal isn't a journal: it contains run.journal.",
    ),
}


def take_journal(name: str, make: Damage, code: int, message: str) -> Attack:
    def build(folder: Path) -> list[str]:
        model = copy_tiny(folder)
        (folder / "journal").mkdir()
        make(folder / "journal" / "run.journal")
        options = [
            "--steps",
            "1",
            "--journal",
            str(folder / "journal"),
            "-o",
            str(folder / "out.mp4"),
        ]
        return ["generate", str(model), "a ball", *options]

    left = ("out.mp4", "out.mp4.json", "journal/*") if code == 0 else ("journal/.lock",)
    return Attack(f"generate: {name}", build, code, message, left=left)


@run_rows([take_journal(name, *row) for name, row in JOURNALS.items()])
def test_a_journal_that_is_damaged(row: Attack, tmp_path: Path) -> None:
    """It is begun anew with a word, or refused where something else is in its folder."""
    outcome = run_attack(row, tmp_path)
    assert row.exit_code or "The journal is started again." in outcome.stderr
