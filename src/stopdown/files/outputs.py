"""Atomic writing of results, and checks of output paths before a run.

A file or folder is written under a temporary name in the folder of its target, and renamed when it is
complete, so that a full disk, Ctrl-C or `kill -9` leaves nothing half-written. If the target is a link, the
file that it points to is replaced. Temporary files of a killed process are removed by the next process that
writes to the folder. A default name is numbered (`stopdown-2.mp4`) so that nothing is replaced. Missing
folders are made when the result is written.

**Catches**, before the run, folders that cannot be made or written to, names that are too long, a file in
place of a folder and vice versa, pipes and devices, an output that is an input of the same run, and files
that must not be replaced according to the caller.
**Does not catch** a disk that is too small for the result, which is reported at the end.
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
"""Function that describes a file that must not be replaced, such as `a plan`; "" if it may be."""

LOCK = ".lock"
"""Name of the lock file in a folder that a process has locked."""

_PROBE_BYTES = 65536


def refuse_nameless(path: str | os.PathLike[str], option: str = "with -o") -> None:
    """Refuse `/`, `.` and `..`, which cannot be replaced by a file or folder."""
    if Path(path).name in ("", ".."):
        raise OutputError(
            f"The output {os.fspath(path)} is a folder that can't be replaced.",
            expected="Stopdown writes under a temporary name beside the output and renames it.",
            remedy=f"Name a file or folder inside of it {option}: {Path(path, 'out')}",
        )


def check_suffix(path: Path, *suffixes: str, expected: str = "") -> None:
    """Refuse an output without the suffix of its format.

    Args:
        suffixes: accepted suffixes in lower case, the usual one first.
        expected: explanation for the message.
    """
    refuse_nameless(path)
    if path.suffix.lower() not in suffixes:
        raise OptionError(
            f"The output {path} doesn't end in {suffixes[0]}.",
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
    """Refuse an output path that cannot be written, before hours are spent on the result.

    As a test, a small file is written beside the target and removed, with any folders made for it.

    Args:
        path: the output path as it was typed.
        folder: whether the output is a folder; an existing one must be empty unless `replaces` is given.
        noun: word for the output in the message.
        option: how to name another path, for the message.
        replaces: describes a file, or a folder that is not empty, that must not be replaced; None to
            allow any file.
        force: whether an existing file may be replaced at all.
        inputs: files that the run reads, which the output must not replace; None entries are skipped.
    """
    refuse_nameless(path, option)
    shown, target = Path(path), _resolve(path)
    try:
        found = _find_kind(target)
        holder = next(folder for folder in target.parents if folder.exists())
        if not holder.is_dir():
            raise OutputError(
                f"The {noun} {shown} can't be written: {holder} is a file, not a folder.",
                remedy=f"Choose another name {option}.",
            )
        _refuse_kind(shown, noun, found, folder)
        _refuse_inputs(shown, noun, target, inputs)
        _refuse_taken(shown, noun, target, option, replaces)
        if not force and found == "file":
            raise OutputError(
                f"The {noun} {shown} already exists.",
                expected="Existing files aren't replaced.",
                remedy="Add force=True to replace it, or choose another name "
                f"{option}: {find_free(shown)}.",
            )
        if folder and os.path.ismount(target):
            raise OutputError(
                f"The output {shown} is a mount point, and can't be replaced.",
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
    """Yield a temporary path beside `path`, which is renamed to `path` if the block succeeds.

    After an error or Ctrl-C, the temporary output is removed and `path` is unchanged. If a file that must
    not be replaced has appeared meanwhile, the output gets a numbered name and `OutputError` is raised.

    Args:
        path: path of the finished file or folder.
        option: how to name another path, for error messages.
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
    """Write to a path, or to the first free numbered one if it exists.

    Args:
        path: preferred path.
        write: writes the file or folder to the path that it receives.
        companions: suffixes of other names that must be free: `.json` for `clip.mp4.json`.

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
        companions: suffixes of other names that must be free, as for `write_numbered`.
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
    """Lock an existing folder while the block runs, and remove the lock file afterwards.

    Raises:
        InputError: another process has locked the folder; the error is `busy`.
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
        except OSError as error:  # as on network folders without locks
            raise explain_refusal(folder / LOCK, error) from error
        _held.add(folder / LOCK)
        yield
    finally:
        if not is_busy:
            _remove_lock(lock, folder / LOCK)
            _held.discard(folder / LOCK)


_held: set[Path] = set()
"""Lock files that this process has created."""


def drop_locks() -> None:
    """Remove the lock files of this process, for exits without unwinding."""
    for path in tuple(_held):
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_lock(lock: filelock.BaseFileLock, path: Path) -> None:
    """Release a lock and remove its file, unless another process holds it.

    Also works if a signal interrupted the creation of the lock.
    """
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
    """Return the kind of file at a path, such as `file`, `folder` or `pipe`; "" if there is none."""
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
    """Refuse a target whose present content must not be replaced."""
    if target.is_dir() and replaces is None and any(target.iterdir()):
        raise OutputError(
            f"The {noun} folder {shown} isn't empty.",
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
    """Yield a temporary path in the folder of a target; remove anything still at that path at the end.

    Missing folders are made, and removed if they are empty at the end.
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
    """Return a hash of the host, and on Linux the PID namespace, in which process IDs are unique."""
    with contextlib.suppress(OSError):
        return _hash(socket.gethostname() + os.readlink("/proc/self/ns/pid"))
    return _hash(socket.gethostname())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]


def _sweep(folder: Path) -> None:
    """Remove temporary files that ended processes of this machine left in a folder."""
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
    """Return whether there is no process with this ID on Windows, or it has ended."""
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
"""Windows' access right to wait for a process, and the error of `OpenProcess` for an unused ID."""


def discard(part: Path) -> None:
    """Remove a file or folder; do nothing if there is none, or if it cannot be removed."""
    if part.is_dir() and not part.is_symlink():
        shutil.rmtree(part, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            part.unlink()


def _settle(part: Path, shown: Path, target: Path, option: str, replaces: Replaces | None) -> None:
    """Rename finished output to its target, or to the next free name with a number.

    Raises:
        OutputError: the target can't be replaced. The message has the name that the output got.
    """
    try:
        _refuse_taken(shown, "output", target, option, replaces)
        _rename(part, target)
    except (OSError, OutputError) as error:
        kept = _rename_numbered(part, target)
        why = error.what if isinstance(error, OutputError) else f"{error.strerror}."
        raise OutputError(
            f"The output {shown} couldn't be put into its place: {why}",
            expected=f"It is whole, and was kept as {kept}.",
            remedy=f"Move it: mv {kept} PLACE",
        ) from error


def _rename(part: Path, target: Path) -> None:
    """Rename atomically if possible; a folder with files is moved aside first and removed later."""
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
    """Rename to the first free name; a file that appears at the same moment is not replaced."""
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
"""Errors that are not the fault of the chosen path."""


def explain_refusal(target: Path, error: OSError, option: str = "with -o") -> OutputError:
    """Convert the operating system's error for an output into one with cause and remedy."""
    known = _REFUSALS.get(error.errno or 0)
    cause, remedy = known or (error.strerror or str(error), "Choose another place with -o.")
    return OutputError(
        f"The output {target} couldn't be written: {cause}.",
        expected="Nothing half-written was left behind.",
        remedy=remedy.replace("with -o", option),
        by_system=error.errno in _FAILURES,
    )
