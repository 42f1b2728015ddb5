"""Places that cannot be written, signals and broken streams, for every command that writes."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hostile.runner import Attack, copy_tiny, run_attack
from hostile.write_faults import make_plan
from models.comparisons import make_comparison
from stopdown.records import to_json

SIZES = ("--frames", "9", "--height", "32", "--width", "32", "--steps", "1", "--device", "cpu")
MIXED = ("--precision", "fp16-plain", "--device", "v100", "--fix")
OTHER = {"plan.json": "run", "clip.mp4.json": "plan", "page.html.json": "run"}


@dataclass(frozen=True)
class Command:
    """One command that writes.

    Attributes:
        words: `DISK/` stands for the folder that is written.
        output: what it writes first, in that folder; empty for a folder or file that is read, too.
        models: tiny pipelines that it reads, by folder.
        beside: what it writes besides.
    """

    words: tuple[str, ...]
    output: str
    model: str = ""
    beside: tuple[str, ...] = ()
    is_folder: bool = False


COMMANDS = {
    "generate": Command(
        ("generate", "model", "a", *SIZES, "-o", "disk/clip.mp4", "--force"),
        "clip.mp4",
        "cogvideox",
        ("clip.mp4.json",),
    ),
    "frames": Command(
        ("generate", "model", "a", *SIZES, "-o", "disk/frames"),
        "frames",
        "cogvideox",
        ("frames.json",),
        is_folder=True,
    ),
    "plan": Command(("plan", "shapes", "-o", "disk/plan.json", "--force"), "plan.json"),
    "convert": Command(
        ("convert", "model", "disk/out", "--plan", "sd.json"), "out", "sd", is_folder=True
    ),
    "compare": Command(
        ("compare", "shapes", "--prompt", "a", "-o", "disk/page.html", "--force"),
        "page.html",
        beside=("page.html.json",),
    ),
    "report": Command(("report", "kept.html.json", "-o", "disk/page.html", "--force"), "page.html"),
    "check": Command(
        ("check", "model", *MIXED, "-o", "disk/mended"), "mended", "sd16", is_folder=True
    ),
}
WRITING = tuple(COMMANDS)
QUICK = ("generate", "plan", "compare", "report")


def prepare(
    name: str, before: Callable[[Path], object] | None = None
) -> Callable[[Path], list[str]]:
    """Builds what a command reads, and what stands in `disk` before it."""
    command = COMMANDS[name]

    def build(folder: Path) -> list[str]:
        (folder / "disk").mkdir()
        if command.model == "sd16":
            shutil.copytree(save_sd() / "half", folder / "model")
        elif command.model:
            copy_tiny(folder, command.model)
        if name == "convert":
            shutil.copy(save_sd() / "sd.json", folder)
        if name == "report":
            (folder / "kept.html.json").write_text(to_json(make_comparison()))
        if before is not None:
            before(folder / "disk")
        return list(command.words)

    return build


@functools.cache
def save_sd() -> Path:
    """A plan that scales nothing for the tiny Stable Diffusion, and that model in fp16."""
    import torch

    from hostile.runner import _save_tiny
    from stopdown import testing
    from stopdown.component_calls.components import find_components
    from stopdown.plans.plan_files import read_class_versions, seal_plan, write_plan
    from stopdown.plans.weight_fingerprints import sample_weights
    from stopdown.records import ComponentPlan, Plan
    from stopdown.sources.sources import fingerprint, resolve_source

    folder = Path(tempfile.mkdtemp(prefix="writes-"))
    testing.save_pipeline("sd", folder / "half", dtype=torch.float16)
    pipe = testing.make_pipeline("sd", dtype=torch.bfloat16)
    entries = tuple(
        ComponentPlan(name, type(part).__name__, sample_weights(part), "as loaded")
        for name, part in find_components(pipe).items()
    )
    mark = fingerprint(resolve_source(_save_tiny("sd")))
    versions = read_class_versions()
    plan = Plan("sd", mark, type(pipe).__name__, "fp16", versions, entries, "cpu", 0.0)
    write_plan(seal_plan(plan), folder / "sd.json")
    return folder


def put_old(name: str) -> Callable[[Path], None]:
    """What an earlier run left at the same places: it may be replaced, and must outlive a fault."""
    command = COMMANDS[name]

    def put(disk: Path) -> None:
        if command.is_folder:
            return
        if command.output == "page.html":
            (disk / "page.html").write_text('<meta name="generator" content="stopdown">')
            (disk / "page.html.json").write_text('{"kind": "comparison", "schema": 1}')
        else:
            kind = "plan" if command.output == "plan.json" else "run"
            (disk / command.output).write_text(f'{{"kind": "{kind}", "schema": 1}}')
            (disk / "clip.mp4.json").write_text('{"kind": "run", "schema": 1}')

    return put


def make_row(
    name: str,
    fault: str,
    exit_code: int,
    message: str,
    *,
    label: str = "",
    before: Callable[[Path], object] | None = None,
    left: tuple[str, ...] = (),
) -> Attack:
    return Attack(
        f"{name}: {label or fault}",
        prepare(name, before or put_old(name)),
        exit_code,
        message.replace("OUTPUT", f"disk/{COMMANDS[name].output}"),
        left,
        environment={"WRITE_FAULT": fault},
        command="hostile.write_faults:main",
    )


def list_written(name: str) -> tuple[str, ...]:
    command = COMMANDS[name]
    return tuple(
        pattern
        for path in (command.output, *command.beside)
        for pattern in (f"disk/{path}", f"disk/{path}/*")
    )


def list_signals() -> Iterator[Attack]:
    """A signal when the result is whole under its temporary name: what stood there stays."""
    for name in WRITING:
        yield make_row(
            name, "signal SIGTERM", 143, "Stopped by SIGTERM; no partial output was left."
        )
        left = ("disk/.stopdown-*.part*", "disk/.page.html.cells*")
        yield make_row(name, "signal SIGKILL", -9, "", left=left)
    for name in QUICK:
        yield make_row(name, "signal SIGHUP", 129, "Stopped by SIGHUP; no partial output was left.")
        yield make_row(name, "signal SIGINT", 130, "Stopped by Ctrl-C; no partial output was left.")


def list_disks() -> Iterator[Attack]:
    """A file that may not grow, found only when the result is written."""
    grew = "The output OUTPUT couldn't be written: the file grew larger than this system allows."
    for name in WRITING:
        yield make_row(name, "limit 100", 1, grew)


def list_places() -> Iterator[Attack]:
    """Places that are refused before anything is loaded, by every command in the same words."""
    for name in WRITING:
        command = COMMANDS[name]
        target = command.output

        def put_pipe(disk: Path, target: str = target) -> None:
            os.mkfifo(disk / target)

        def put_loop(disk: Path, target: str = target) -> None:
            (disk / target).symlink_to(target)

        def put_null(disk: Path, target: str = target) -> None:
            (disk / target).symlink_to("/dev/null")

        yield make_row(
            name, "none", 2, "The output OUTPUT is a pipe.", label="pipe", before=put_pipe
        )
        yield make_row(
            name, "none", 2, "The output OUTPUT is a device.", label="device", before=put_null
        )
        circle = "The output OUTPUT couldn't be written: its links lead in a circle."
        yield make_row(name, "none", 2, circle, label="links in a circle", before=put_loop)
        yield refuse_name(name, "/proc", "The output /proc/")
        yield refuse_name(name, f"disk/{'a' * 256}", "The output disk/aaa")


def refuse_name(name: str, folder: str, message: str) -> Attack:
    """A row whose output lies in another folder."""
    row = make_row(name, "none", 2, message, label=f"in {folder[:12]}")

    def build(path: Path) -> list[str]:
        return [word.replace("disk/", f"{folder}/", 1) for word in row.build(path)]

    return replace(row, build=build)


def list_foreign() -> Iterator[Attack]:
    """Files of other people, and of ours with another purpose, stay."""
    for name in WRITING:
        command = COMMANDS[name]

        def put_foreign(disk: Path, command: Command = command) -> None:
            if command.is_folder:
                (disk / command.output).mkdir()
                (disk / command.output / "letter.txt").write_text("mine")
            else:
                (disk / command.output).write_text("mine")

        what = {
            "plan": "OUTPUT would replace a file that Stopdown didn't write as a record.",
            "convert": "OUTPUT would replace a folder that convert didn't write.",
            "compare": "OUTPUT would replace a file that is no page of Stopdown.",
            "report": "OUTPUT would replace a file that is no page of Stopdown.",
            "frames": "folder OUTPUT isn't empty.",
            "check": "folder OUTPUT isn't empty.",
        }
        if name in what:
            yield make_row(
                name, "none", 2, f"The output {what[name]}", label="foreign", before=put_foreign
            )
        for path in (path for path in command.beside if path in OTHER):

            def put_other(disk: Path, path: str = path) -> None:
                (disk / path).write_text(f'{{"kind": "{OTHER[path]}", "schema": 1}}')

            said = f"The record disk/{path} would replace a record of the kind {OTHER[path]}."
            yield make_row(name, "none", 2, said, label=f"a {OTHER[path]}", before=put_other)


def list_streams() -> Iterator[Attack]:
    """Standard output that is full, closed, or read no more: everything was written by then."""
    full = "Standard output couldn't be written: the disk is full."
    for name in QUICK:
        left = list_written(name)
        yield make_row(name, "stdout full", 1, full, left=left)
        yield make_row(name, "stdout closed", 0, "", left=left)
        yield make_row(name, "stdout left", 141, "", left=left)
    for words in (
        ["doctor", "--device", "v100", "--toml"],
        ["explain", "black"],
        ["check", "shapes"],
    ):
        for fault, code, message in (("full", 1, full), ("left", 141, "")):
            yield Attack(
                f"{words[0]}: stdout {fault}",
                lambda folder, words=words: list(words),  # type: ignore[misc]
                code,
                message,
                environment={"WRITE_FAULT": f"stdout {fault}"},
                command="hostile.write_faults:main",
            )


WIDE = ("generate", "convert", "report")
"""Commands that meet every fault in the default run; the others meet one of each kind there."""


def list_rows() -> Iterator[Any]:
    """The rows of each kind, those that another command shows already among the slow tests."""
    for part in (list_signals, list_disks, list_places, list_foreign, list_streams):
        met = set[str]()
        for row in part():
            command = row.name.partition(":")[0]
            is_default = command in WIDE or (part is not list_streams and command not in met)
            met.add(command)
            yield pytest.param(row, marks=() if is_default else pytest.mark.slow, id=row.name)


@pytest.mark.default_rows(5)
@pytest.mark.parametrize("row", list(list_rows()))
def test_a_fault_while_writing_is_one_message(row: Attack, tmp_path: Path) -> None:
    """The exit code and the words of the row; what stood there stands there, and nothing half-written."""
    run_attack(row, tmp_path)


@functools.cache
def can_mount() -> bool:
    """Whether a process here may have a disk of its own, as root in a container may or may not."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hostile.write_faults", json.dumps("full")]
        path = {"PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(command, cwd=folder, env={**os.environ, **path}, capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize(
    "name", [x if x in WIDE else pytest.param(x, marks=pytest.mark.slow) for x in WRITING]
)
@pytest.mark.parametrize(
    ("kind", "code", "cause"),
    [("full", 1, "the disk is full"), ("read-only", 2, "the disk is read-only")],
)
def test_a_disk_that_is_full_or_read_only(
    name: str, kind: str, code: int, cause: str, tmp_path: Path
) -> None:
    """A real disk of 4 KiB, and one that is mounted read-only: one message with the cause."""
    if not can_mount():
        pytest.skip("a process may not mount a disk of its own here")
    said = f"The output OUTPUT couldn't be written: {cause}."
    run_attack(make_row(name, f"mount {kind}", code, said), tmp_path)


def test_repairs_of_a_script_are_written_whole(tmp_path: Path) -> None:
    """`run --keep-repairs` replaces its plan in one step: a kill or a full disk leaves the old one."""

    def build(folder: Path) -> list[str]:
        (folder / "script.py").write_text("")
        (folder / "plan.json").write_text(to_json(make_plan()))
        return ["run", "--plan", "plan.json", "--keep-repairs", "script.py"]

    full = "The output plan.json couldn't be written: the file grew larger than this system allows."
    for place, (fault, code, message, left) in enumerate(
        (
            ("signal SIGTERM", 143, "Stopped by SIGTERM, while the script ran.", ()),
            ("signal SIGKILL", -9, "", (".stopdown-*.part",)),
            ("limit 100", 1, full, ()),
        )
    ):
        row = Attack(
            fault,
            build,
            code,
            message,
            left,
            environment={"WRITE_FAULT": fault},
            command="hostile.write_faults:main",
        )
        (tmp_path / str(place)).mkdir()
        run_attack(row, tmp_path / str(place))


def list_journals() -> Iterator[Attack]:
    """A journal's folder that is none, or cannot be made: refused before anything runs."""
    makers: dict[str, tuple[Callable[[Path], object], str]] = {
        "a file": (lambda path: path.write_text("mine"), "File exists"),
        "a pipe": (os.mkfifo, "File exists"),
        "a device": (lambda path: path.symlink_to("/dev/null"), "File exists"),
        "a circle": (lambda path: path.symlink_to(path.name), "File exists"),
        "foreign": (lambda path: (path.mkdir(), (path / "mine").touch()), ""),
        "below a file": (
            lambda path: path.parent.rmdir() or path.parent.touch(),
            "Not a directory",
        ),
    }
    for label, (make, cause) in makers.items():

        def build(folder: Path, make: Callable[[Path], object] = make) -> list[str]:
            (folder / "disk").mkdir()
            make(folder / "disk" / "journal")
            words = [
                "generate",
                "model",
                "a",
                *SIZES,
                "-o",
                "clip.mp4",
                "--journal",
                "disk/journal",
            ]
            copy_tiny(folder)
            return words

        said = f"The journal {{folder}}/disk/journal can't be written: {cause}."
        message = (
            said if cause else "The folder {folder}/disk/journal isn't a journal: it contains mine."
        )
        yield Attack(f"journal: {label}", build, 2, message)


@pytest.mark.parametrize("row", list(list_journals()), ids=lambda row: row.name)
def test_a_place_that_is_no_journal_is_one_message(row: Attack, tmp_path: Path) -> None:
    """Exit code 2, and what stands there stays."""
    run_attack(row, tmp_path)
