"""Where results go: a place is checked before the run, written beside, and renamed when it is whole.

A file or folder is made under a temporary name in the folder of its target and renamed at the end, so
that a full disk, Ctrl-C or `kill -9` leaves nothing half-written. Links are followed: what a link
points to is written, and the link stays. What a process that was killed left under a temporary name is
removed by the next one that writes there. A name that Stopdown chose itself replaces nothing: it is
numbered (`stopdown-2.mp4`).

A folder that is missing is made when the result is written.

**Catches**, before the run, folders that cannot be made or written, names that are too long, a
file where a folder is to be and the other way round, pipes and devices, an output that is an input of
the same run, and files that the caller says must stay.
**Does not catch** a disk that is too small for a result that is not there yet: that is told at the end.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopdown.errors import InputError, OptionError, OutputError

if TYPE_CHECKING:
    import filelock

Replaces = Callable[[Path], str]
"""Why what is at a path must stay, in words such as `a plan`; empty when it may be replaced."""

LOCK = ".lock"
"""The file in a folder that says that a process holds it."""

_PROBE_BYTES = 65536


def refuse_nameless(path: str | os.PathLike[str], option: str = "with -o") -> None:
    """Refuse `/`, `.` and `..`, which cannot be replaced by a file or folder."""
    if Path(path).name in ("", ".."):
        raise OutputError(
            f"The output {os.fspath(path)} is a folder that cannot be replaced.",
            expected="Stopdown writes under a temporary name beside the output and renames it.",
            remedy=f"Name a file or folder inside of it {option}: {Path(path, 'out')}",
        )


def check_suffix(path: Path, *suffixes: str, expected: str = "") -> None:
    """Refuse an output without the suffix of its format.

    Args:
        suffixes: that are taken, in lower case, the usual one first.
        expected: why, for the message.
    """
    refuse_nameless(path)
    if path.suffix.lower() not in suffixes:
        raise OptionError(
            f"The output {path} does not end in {suffixes[0]}.",
            expected=expected,
            remedy=f"Use -o {path.with_suffix(suffixes[0])}.",
        )


def check_target(
    path: str | os.PathLike[str],
    *,
    folder: bool = False,
    noun: str = "output",
    option: str = "with -o",
    replaces: Replaces | None = None,
    force: bool = True,
    inputs: Iterable[str | os.PathLike[str] | None] = (),
) -> None:
    """Refuse a place that cannot be written, before hours are spent on its content.

    A small file is made beside the target, and removed, with the folders that were missing.

    Args:
        path: where the result will go, as it was typed.
        folder: it will be a folder; one that is there has to be empty unless `replaces` is given.
        noun: names the output in the message.
        option: how another place is given, for the message.
        replaces: which file may be replaced; None for any. Of a folder: which one that is not empty.
        force: whether such a file is replaced, and not refused.
        inputs: files that the run reads, which the output must not replace; None is passed over.
    """
    refuse_nameless(path, option)
    shown, target = Path(path), _resolve(path)
    try:
        found = _find_kind(target)
        holder = next(folder for folder in target.parents if folder.exists())
        if not holder.is_dir():
            raise OutputError(
                f"The {noun} {shown} cannot be written: {holder} is a file, not a folder.",
                remedy=f"Choose another name {option}.",
            )
        _refuse_kind(shown, noun, found, folder)
        _refuse_inputs(shown, noun, target, inputs)
        _refuse_taken(shown, noun, target, option, replaces)
        if not force and found == "file":
            raise OutputError(
                f"The {noun} {shown} already exists.",
                expected="Existing files are not replaced.",
                remedy="Add force=True to replace it, or choose another name "
                f"{option}: {find_free(shown)}.",
            )
        if folder and os.path.ismount(target):
            raise OutputError(
                f"The output {shown} is a mount point, and cannot be replaced.",
                expected="Stopdown writes a folder under a temporary name and renames it.",
                remedy=f"Name a folder inside of it: {shown / 'out'}",
            )
        with _made_beside(target) as part:
            part.write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        raise explain_refusal(shown, error, option) from error


@contextmanager
def written_beside(
    path: str | os.PathLike[str], *, option: str = "with -o", replaces: Replaces | None = None
) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed to `path` when the block ends without an error.

    After an error, Ctrl-C included, the temporary output is removed and `path` is as it was. If a file
    that must stay has taken the name meanwhile, the output is kept under a numbered one.

    Args:
        path: where the finished file or folder belongs.
        replaces: as for `check_target`.
    """
    refuse_nameless(path, option)
    shown, target = Path(path), _resolve(path)
    try:
        with _made_beside(target) as part:
            yield part
            _settle(part, shown, target, option, replaces)
    except OSError as error:
        raise explain_refusal(shown, error, option) from error


def write_numbered(
    path: str | os.PathLike[str], write: Callable[[Path], object], *companions: str
) -> Path:
    """Write to the preferred name, or to the first free numbered one.

    Args:
        path: the first choice.
        write: makes the file or folder at the path that it is given.
        companions: endings of further names that have to be free: `.json` for `clip.mp4.json`.

    Returns:
        The path written. Nothing was replaced, not even a file that another process wrote meanwhile.
    """
    shown = Path(path)
    try:
        with _made_beside(_resolve(shown.parent) / shown.name) as part:
            write(part)
            return _rename_numbered(part, shown, *companions)
    except OSError as error:
        raise explain_refusal(shown, error, "with -o") from error


def find_free(path: str | os.PathLike[str], *companions: str) -> Path:
    """Return the path itself, or the first of `NAME-2.SUFFIX`, `NAME-3.SUFFIX`… that is free.

    Args:
        companions: as for `write_numbered`.
    """
    first = Path(path)
    for number in itertools.count(2):
        names = [path, *(f"{path}{end}" for end in companions)]
        if not any(os.path.lexists(name) for name in names):
            break
        path = first.with_name(f"{first.stem}-{number}{first.suffix}")
    return Path(path)


def find_record_path(output: str | os.PathLike[str]) -> Path:
    """Return the path of an output's record: `clip.mp4.json` beside `clip.mp4`."""
    path = Path(output)
    return path.with_name(path.name + ".json")


@contextmanager
def held_folder(folder: Path, busy: InputError) -> Iterator[None]:
    """Lock an existing folder for this process within the block, and remove the lock afterwards.

    Raises:
        InputError: `busy`, if another process holds the folder.
    """
    import filelock

    lock = filelock.FileLock(folder / LOCK)
    is_busy = False
    try:
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout as error:
            is_busy = True
            raise busy from error
        _held.add(folder / LOCK)
        yield
    finally:
        if not is_busy:
            _remove_lock(lock, folder / LOCK)
            _held.discard(folder / LOCK)


_held: set[Path] = set()
"""Files of locks of this process."""


def drop_locks() -> None:
    """Remove the locks of this process, for exits that skip cleanup."""
    for path in tuple(_held):
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_lock(lock: filelock.BaseFileLock, path: Path) -> None:
    """Remove a lock's file, also if a signal interrupted its creation, and never another process's."""
    import filelock

    with contextlib.suppress(filelock.Timeout, OSError):  # Windows removes it when it is released
        lock.acquire(blocking=False)
        path.unlink()
    lock.release(force=True)


def _resolve(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(path))


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def _find_kind(target: Path) -> str:
    """Return the kind of file at a path; "" if there is none."""
    try:
        return _KINDS[stat.S_IFMT(target.stat().st_mode)]
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _refuse_kind(shown: Path, noun: str, found: str, folder: bool) -> None:
    """Refuse a file in place of a folder, a folder in place of a file, and pipes, sockets and devices."""
    if found in ("pipe", "socket", "device"):
        raise OutputError(
            f"The {noun} {shown} is a {found}.",
            expected="Stopdown writes an output under a temporary name and renames it, which would replace "
            f"the {found}.",
            remedy="Write a file, and pass that on.",
        )
    if folder and found == "file":
        raise OutputError(
            f"The {noun} {shown} is to be a folder, and a file has that name.",
            expected="A path without suffix means a folder.",
            remedy="Choose another name.",
        )
    if not folder and found == "folder":
        raise OutputError(
            f"The {noun} {shown} would be a file, but a folder has that name.",
            expected=f"A path that ends in {shown.suffix} means a file.",
            remedy=f"Name a file inside of it, {shown / f'out{shown.suffix}'}, or another name.",
        )


def _refuse_inputs(
    shown: Path, noun: str, target: Path, inputs: Iterable[str | os.PathLike[str] | None]
) -> None:
    for given in inputs:
        if given is not None and target.exists() and _resolve(given) == target:
            raise OutputError(
                f"The {noun} {shown} is a file that this run reads.",
                expected="An input is left as it is.",
                remedy="Choose another name with -o.",
            )


def _refuse_taken(
    shown: Path, noun: str, target: Path, option: str, replaces: Replaces | None
) -> None:
    """Refuse a target whose present content must stay."""
    if target.is_dir() and replaces is None and any(target.iterdir()):
        raise OutputError(
            f"The {noun} folder {shown} is not empty.",
            expected="The folder must be new or empty.",
            remedy=f"Choose another folder {option}, for example {shown}-2/, or empty this one.",
        )
    if replaces is not None and target.exists() and (what := replaces(target)):
        raise OutputError(
            f"The {noun} {shown} would replace {what}.",
            expected="Only what Stopdown wrote there for the same purpose is replaced.",
            remedy=f"Choose another name {option}.",
        )


@contextmanager
def _made_beside(target: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of a target; remove anything there at the end.

    Folders that are missing are made, and removed if nothing is left in them.
    """
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), target.parents))
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    part = target.with_name(
        f".stopdown-{_name_machine()}-{os.getpid()}-{secrets.token_hex(4)}.part"
    )
    try:
        yield part
    finally:
        discard(part)
        with contextlib.suppress(OSError):
            for folder in missing:
                folder.rmdir()


@functools.cache
def _name_machine() -> str:
    """Return a hash of the scope of process ids: the host, and on Linux the container's namespace."""
    with contextlib.suppress(OSError):
        return _hash(socket.gethostname() + os.readlink("/proc/self/ns/pid"))
    return _hash(socket.gethostname())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]


def _sweep(folder: Path) -> None:
    """Remove the leftovers of ended processes of this machine."""
    pattern = re.compile(rf"\.stopdown-{_name_machine()}-(\d{{1,9}})-[0-9a-f]{{8}}\.part")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            found = pattern.fullmatch(name)
            if found and not _is_alive(int(found[1])):
                discard(folder / name)


def _is_alive(pid: int) -> bool:
    """Return whether a process exists, or may exist."""
    if os.name != "posix":  # where asking by a signal would end it
        return not _has_ended_on_windows(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _has_ended_on_windows(pid: int) -> bool:
    """Return whether Windows knows no process of this number, or one that has ended."""
    import ctypes

    kernel: Any = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    process = kernel.OpenProcess(_SYNCHRONIZE, False, pid)
    if not process:
        return bool(ctypes.get_last_error() == _NO_SUCH_PROCESS)  # type: ignore[attr-defined,unused-ignore]
    try:
        return bool(kernel.WaitForSingleObject(process, 0) == 0)
    finally:
        kernel.CloseHandle(process)


_SYNCHRONIZE, _NO_SUCH_PROCESS = 0x00100000, 87
"""The right to wait for a process, and what `OpenProcess` says of a number that no process has."""


def discard(part: Path) -> None:
    """Remove a file or folder; do nothing if there is none, or if it cannot be removed."""
    if part.is_dir() and not part.is_symlink():
        shutil.rmtree(part, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            part.unlink()


def _settle(part: Path, shown: Path, target: Path, option: str, replaces: Replaces | None) -> None:
    """Rename finished output; if its place is unavailable, use a numbered name and raise with that name."""
    try:
        _refuse_taken(shown, "output", target, option, replaces)
        _rename(part, target)
    except (OSError, OutputError) as error:
        kept = _rename_numbered(part, target)
        why = error.what if isinstance(error, OutputError) else f"{error.strerror}."
        raise OutputError(
            f"The output {shown} could not be put into its place: {why}",
            expected=f"It is whole, and was kept as {kept}.",
            remedy=f"Move it: mv {kept} PLACE",
        ) from error


def _rename(part: Path, target: Path) -> None:
    """Rename in one step if the system can; a folder with files in it stays until the new one is there."""
    if not (part.is_dir() and target.is_dir()):
        os.replace(part, target)
    elif not any(target.iterdir()):
        target.rmdir()  # Windows does not rename over a folder
        os.replace(part, target)
    else:
        old = part.with_suffix(".old")  # not swept: until the next line it is the only one
        os.replace(target, old)
        try:
            os.replace(part, target)
        except OSError:
            os.replace(old, target)
            raise
        os.replace(
            old, part
        )  # removed by the process that made `part`, or swept if that was killed


def _rename_numbered(part: Path, shown: Path, *companions: str) -> Path:
    """Rename to the first free name, without replacing files that appear at the same moment."""
    while True:
        free = find_free(shown, *companions)
        try:
            if part.is_dir():
                os.rename(part, free)
            else:
                try:
                    os.link(part, free)
                except FileExistsError:
                    raise
                except OSError:  # a file system without hard links
                    os.rename(part, free)
        except FileExistsError:
            continue
        return free


_REFUSALS = {
    errno.ENOSPC: ("the disk is full", "Free some space, or choose another disk with -o."),
    errno.EDQUOT: ("your disk quota is used up", "Free some space, or choose another disk."),
    errno.EFBIG: (
        "the file grew larger than this system allows",
        "Raise the limit (ulimit -f), or write fewer or smaller frames.",
    ),
    errno.EACCES: (
        "you may not write there",
        "Choose a folder of your own with -o, or change its permissions.",
    ),
    errno.EPERM: ("you may not write there", "Choose a folder of your own with -o."),
    errno.EROFS: ("the disk is read-only", "Choose another disk with -o."),
    errno.ENAMETOOLONG: ("the name is too long", "Choose a shorter name with -o."),
    errno.ELOOP: ("its links lead in a circle", "Choose another name with -o."),
}


_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What happens to whoever asked for the right place."""


def explain_refusal(target: Path, error: OSError, option: str = "with -o") -> OutputError:
    """Return an error with cause and remedy for the system's refusal to write an output."""
    known = _REFUSALS.get(error.errno or 0)
    cause, remedy = known or (error.strerror or str(error), "Choose another place with -o.")
    return OutputError(
        f"The output {target} could not be written: {cause}.",
        expected="Nothing half-written was left behind.",
        remedy=remedy.replace("with -o", option),
        by_system=error.errno in _FAILURES,
    )
