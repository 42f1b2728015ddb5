"""Where results go: places that are refused before a run, names that are kept, what a kill leaves."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import filelock
import pytest

from stopdown.app import cli
from stopdown.errors import InputError, OutputError
from stopdown.files import outputs
from stopdown.files.outputs import (
    LOCK,
    check_target,
    find_free,
    held_folder,
    write_numbered,
    written_beside,
)

posix = pytest.mark.skipif(os.name != "posix", reason="pipes and sockets are files on POSIX")


def write(text: str) -> Callable[[Path], int]:
    return lambda part: part.write_text(text)


def refuse(path: str | Path, **options: object) -> str:
    with pytest.raises(OutputError) as caught:
        check_target(path, **options)  # type: ignore[arg-type]
    return str(caught.value)


@posix
def test_pipes_sockets_and_devices_stay(tmp_path: Path) -> None:
    """None is written into, and none is replaced; each is named."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(tmp_path / "socket"))
    (tmp_path / "null").symlink_to(os.devnull)
    for name, kind in (("pipe", "pipe"), ("socket", "socket"), ("null", "device")):
        before = (tmp_path / name).lstat().st_ino
        assert refuse(tmp_path / name) == (
            f"The output {tmp_path / name} is a {kind}. Stopdown writes an output under a temporary "
            "name and renames it, which would replace "
            f"the {kind}. Write a file, and pass that "
            "on."
        )
        assert (tmp_path / name).lstat().st_ino == before


def test_the_longest_name_works_and_a_longer_one_is_refused(tmp_path: Path) -> None:
    """A name of 255 bytes is written; the temporary one beside it does not grow with it."""
    longest = tmp_path / ("é" * 125 + ".json")
    check_target(longest)
    with written_beside(longest) as part:
        part.write_text("{}")
    assert longest.read_text() == "{}"
    assert "couldn't be written: the name is too long." in refuse(tmp_path / ("a" * 256))
    assert "couldn't be written: the name is too long." in refuse(tmp_path / ("a" * 256) / "b")


def test_links_are_followed(tmp_path: Path) -> None:
    """What a link points to is written, there or not there yet; links in a circle are refused."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "file")
    for text in ("new", "again"):
        check_target(tmp_path / "link")
        with written_beside(tmp_path / "link") as part:
            assert part.parent == tmp_path / "disk"
            part.write_text(text)
        assert (tmp_path / "disk" / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert "couldn't be written: its links lead in a circle." in refuse(tmp_path / "a")
    (tmp_path / "far").symlink_to(tmp_path / "none" / "file")
    with written_beside(tmp_path / "far") as part:
        part.write_text("new")
    assert (tmp_path / "none" / "file").read_text() == "new"
    (tmp_path / "under").symlink_to(tmp_path / "none" / "file" / "x")
    assert f"{tmp_path / 'none' / 'file'} is a file, not a folder." in refuse(tmp_path / "under")


def test_folders_that_are_missing_are_made_with_the_file(tmp_path: Path) -> None:
    """The check leaves none behind, nor does a write that fails; a whole file has its folders."""
    target = tmp_path / "new" / "deep" / "pic.png"
    check_target(target)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), written_beside(target):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with written_beside(target) as part:
        part.write_text("whole")
    assert target.read_text() == "whole"
    numbered = write_numbered(
        tmp_path / "other" / "pic.png", lambda part: part.write_text("whole"), ".json"
    )
    assert numbered.read_text() == "whole"


def test_an_input_is_not_replaced(tmp_path: Path) -> None:
    """The file that a run reads is no output, also by another name for it."""
    (tmp_path / "clip.mp4").write_text("mine")
    (tmp_path / "link.mp4").symlink_to("clip.mp4")
    assert refuse(tmp_path / "link.mp4", inputs=(None, tmp_path / "clip.mp4")) == (
        f"The output {tmp_path / 'link.mp4'} is a file that this run reads. An input is left as it is. "
        "Choose another name with -o."
    )


def test_the_caller_says_what_stays(tmp_path: Path) -> None:
    """Its reason stands in the refusal; without one the file may be replaced."""
    (tmp_path / "file").write_text("mine")
    check_target(tmp_path / "file", replaces=lambda path: "")
    assert refuse(tmp_path / "file", noun="record", replaces=lambda path: "a letter") == (
        f"The record {tmp_path / 'file'} would replace a letter. Only what Stopdown wrote there for the "
        "same purpose is replaced. Choose another name with -o."
    )


def test_a_mounted_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder cannot be renamed over a place where a disk is mounted, so that is said before."""
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    assert refuse(tmp_path / "disk", folder=True).endswith(
        f"Name a folder inside of it: {tmp_path / 'disk' / 'out'}"
    )


@pytest.mark.parametrize("option", ["with -o", "as OUT"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_ends_early_leaves_nothing(
    failure: BaseException, option: str, tmp_path: Path
) -> None:
    """Ctrl-C or a full disk after the first bytes: neither a result nor anything beside it."""

    def fail() -> None:
        with written_beside(tmp_path / "out", option=option) as part:
            part.write_text("half")
            raise failure

    with pytest.raises((KeyboardInterrupt, OutputError)) as caught:
        fail()
    assert list(tmp_path.iterdir()) == []
    if isinstance(failure, OSError):
        assert str(caught.value) == (
            f"The output {tmp_path / 'out'} couldn't be written: the disk is full. Nothing "
            f"half-written was left behind. Free some space, or choose another disk {option}."
        )


def test_what_is_taken_meanwhile_stays(tmp_path: Path) -> None:
    """A target that fills during the run is not replaced; the result is kept beside it, and where."""
    target = tmp_path / "plan.json"

    def fill() -> None:
        with written_beside(target, replaces=lambda path: "a letter") as part:
            part.write_text("new")
            target.write_text("mine")

    with pytest.raises(OutputError) as caught:
        fill()
    kept = tmp_path / "plan-2.json"
    assert str(caught.value) == (
        f"The output {target} couldn't be put into its place: The output {target} would replace a "
        f"letter. It is whole, and was kept as {kept}. Move it: mv {kept} PLACE"
    )
    assert (target.read_text(), kept.read_text()) == ("mine", "new")


def test_a_result_that_cannot_be_renamed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that refuses the rename at the end (a mounted file) does not cost what was made."""

    def refuse_rename(old: object, new: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "replace", refuse_rename)
    (tmp_path / "clip.mp4").write_text("old")
    with (
        pytest.raises(OutputError, match=r"Device or resource busy.*was kept as"),
        written_beside(tmp_path / "clip.mp4") as part,
    ):
        part.write_text("new")
    assert (tmp_path / "clip-2.mp4").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


def test_chosen_names_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first free name, whose companions are free too; a link to nothing takes a name as well."""
    monkeypatch.chdir(tmp_path)
    assert str(find_free("clip.mp4", ".json")) == "clip.mp4"
    (tmp_path / "clip.mp4").write_text("mine")
    (tmp_path / "clip-2.mp4.json").write_text("mine")
    (tmp_path / "clip-3.mp4").symlink_to("none")
    assert str(find_free("clip.mp4", ".json")) == "clip-4.mp4"
    assert str(write_numbered("clip.mp4", write("new"), ".json")) == "clip-4.mp4"
    assert str(write_numbered("new.mp4", write("new"))) == "new.mp4"
    assert str(write_numbered("frames", lambda part: part.mkdir())) == "frames"
    assert str(write_numbered("frames", lambda part: part.mkdir())) == "frames-2"
    assert (tmp_path / "clip.mp4").read_text() == "mine"
    assert sorted(os.listdir()) == sorted(
        ["clip.mp4", "clip-2.mp4.json", "clip-3.mp4", "clip-4.mp4", "new.mp4", "frames", "frames-2"]
    )


@pytest.mark.parametrize("has_links", [True, False])
def test_a_number_that_another_takes_first_is_passed_over(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs without -o in one folder: the later one takes the next number, nothing is lost."""
    if not has_links:
        monkeypatch.setattr(os, "link", refuse_link)

    def write_late(part: Path) -> None:
        part.write_text("second")
        (tmp_path / "clip.mp4").write_text("first")

    assert write_numbered(tmp_path / "clip.mp4", write_late) == tmp_path / "clip-2.mp4"
    assert (tmp_path / "clip.mp4").read_text() == "first"
    assert (tmp_path / "clip-2.mp4").read_text() == "second"


def refuse_link(old: object, new: object) -> None:
    raise OSError(1, "Operation not permitted")


KILLED = """
import os, signal, sys
from pathlib import Path
from stopdown.files.outputs import written_beside
with written_beside(sys.argv[1]) as part:
    part.mkdir()
    (part / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@posix
def test_what_a_kill_leaves_is_swept(tmp_path: Path) -> None:
    """A killed process leaves a hidden part and no target; the next writer there removes the part."""
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out")])
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".stopdown-")
    with written_beside(tmp_path / "other") as part:
        assert not left.exists()
        part.write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@posix
def test_parts_of_the_living_and_of_other_machines_stay(tmp_path: Path) -> None:
    """Another run's part, another host's, and files with names like them, are not swept."""
    with written_beside(tmp_path / "one") as part:
        part.write_text("mine")
        machine = part.name.split("-")[1]
        (tmp_path / ".stopdown-00000000-999999999-00000000.part").write_text("")
        (tmp_path / f".stopdown-{machine}-1-00000000.part").write_text("")
        (tmp_path / f".stopdown-{machine}-999999999.part").write_text("")
        with written_beside(tmp_path / "two") as other:
            other.write_text("")
        assert part.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 5


def test_a_folder_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old folder stays until the new one has its name; when that fails it comes back."""
    target = tmp_path / "out"
    for text in ("old", "new"):
        with written_beside(target, replaces=lambda path: "") as part:
            part.mkdir()
            (part / "file").write_text(text)
        assert (target / "file").read_text() == text
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    replace = os.replace

    def fail(old: Path, new: Path) -> None:
        if Path(old).suffix == ".part":
            raise OSError(5, "Input/output error")
        replace(old, new)

    monkeypatch.setattr(outputs.os, "replace", fail)
    with (
        pytest.raises(OutputError, match="was kept as"),
        written_beside(target, replaces=lambda path: "") as part,
    ):
        part.mkdir()
    assert (target / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-2"]


def test_a_stop_while_a_folder_is_locked_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may come when the lock's file is made and before anybody knows of it."""
    acquire, busy = filelock.FileLock.acquire, InputError("It is in use.")
    stops = iter([KeyboardInterrupt()])

    def stop(self: filelock.FileLock, *args: Any, **kwargs: Any) -> Any:
        held = acquire(self, *args, **kwargs)
        if (error := next(stops, None)) is not None:
            raise error
        return held

    monkeypatch.setattr(filelock.FileLock, "acquire", stop)
    with pytest.raises(KeyboardInterrupt), held_folder(tmp_path, busy):
        raise AssertionError("It was held.")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_left_takes_its_locks_with_it(tmp_path: Path) -> None:
    """As a signal in a long import does, after which nothing is unwound; other locks stay."""
    busy, other = InputError("It is in use."), tmp_path / "other"
    other.mkdir()
    (other / LOCK).touch()
    with held_folder(tmp_path, busy):
        assert (tmp_path / LOCK).exists()
        cli._leave(["batch"], "SIGTERM")
        assert not (tmp_path / LOCK).exists()
    assert (other / LOCK).exists()


def test_a_folder_in_use_keeps_its_lock(tmp_path: Path) -> None:
    """Who is refused removes nothing of the one who holds it."""
    busy = InputError("It is in use.")
    with held_folder(tmp_path, busy):
        with pytest.raises(InputError, match="It is in use"), held_folder(tmp_path, busy):
            raise AssertionError("It was held twice.")
        assert (tmp_path / LOCK).exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_ended", [True, False])
def test_on_windows_the_system_is_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    """A signal would end the process there: what killed processes left is known by its handle."""
    asked: list[int] = []
    monkeypatch.setattr(
        outputs, "_has_ended_on_windows", lambda pid: asked.append(pid) or has_ended
    )
    with mock.patch.object(os, "name", "nt"):
        is_alive = outputs._is_alive(7)
    assert (is_alive, asked) == (not has_ended, [7])


def test_a_folder_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network folders may have none: the sentence names the lock, where a traceback did."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    said = "lock couldn't be written: No locks available"
    with pytest.raises(OutputError, match=said), held_folder(tmp_path, InputError("In use.")):
        pass
