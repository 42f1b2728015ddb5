"""Where the outputs of a batch go: a local folder, or any place that fsspec knows by a URL.

An output is whole or not there: in a folder it is written beside and renamed, elsewhere it is made in a
temporary folder, uploaded under a temporary name, and renamed there.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stopdown.batch.prompts import is_url
from stopdown.errors import InputError, OutputError, take_first_line
from stopdown.files.outputs import (
    check_target,
    discard,
    explain_refusal,
    held_folder,
    written_beside,
)

_PROBE = ".stopdown-probe-"

_STRAY_S = 3600.0
"""Age at which a temporary file of another machine is taken for one that is no longer written."""


class Folder:
    """A local folder, as a flat store of files.

    Args:
        path: made when it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.place = str(self.path)

    def check(self) -> None:
        """Make the folder, and refuse it when it cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_refusal(self.path, error) from error
        check_target(self.path / "batch.json", replaces=lambda path: "")

    def list_names(self) -> set[str]:
        return {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all."""
        with written_beside(self.path / name) as part:
            part.write_bytes(content)

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens when there is none."""
        (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """The folder itself: what is made in it is written beside and renamed."""
        yield self.path

    @contextmanager
    def held(self) -> Iterator[None]:
        """The folder for this process alone, without what killed ones left; if new and empty, it is
        removed at the end: a refused batch leaves nothing behind.
        """
        busy = InputError(
            f"Another batch is writing to {self.path} just now.",
            remedy="Wait until it ends, or name another folder with -o.",
        )
        is_new = not self.path.exists()
        try:
            self.check()
            with held_folder(self.path, busy), _swept(self):
                yield
        finally:
            if is_new:
                with contextlib.suppress(OSError):
                    self.path.rmdir()

    def sweep(self) -> None:
        """Remove probes, and old temporary files of other machines; this one's go at the first write."""
        for probe in self.path.glob(f"{_PROBE}*"):
            discard(probe)
        for part in self.path.glob(".stopdown-*.part"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _STRAY_S:
                    discard(part)


class Remote:
    """As `Folder`, for a place that fsspec knows by a URL."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.place = url
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise OutputError(
                f"The output {url} cannot be opened: {take_first_line(error).rstrip('.')}.",
                expected="It is a folder, or a URL of fsspec.",
                remedy="Install what fsspec names, or write into a folder: -o out",
            ) from error
        self._root = root.rstrip("/")

    def check(self) -> None:
        name = _name_part()
        with self._explained():
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(self._path(name), b"stopdown")
            self._files.rm_file(self._path(name))

    def list_names(self) -> set[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return set()
        return {path.rstrip("/").rpartition("/")[2] for path in found}

    def read(self, name: str) -> bytes:
        return bytes(self._files.cat_file(self._path(name)))

    def write(self, name: str, content: bytes) -> None:
        with self._explained():
            self._files.pipe_file(part := self._path(_name_part()), content)
            self._files.mv(part, self._path(name))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """A temporary folder, whose files are uploaded at the end; records after their outputs."""
        with tempfile.TemporaryDirectory(prefix="stopdown-batch-") as made:
            yield Path(made)
            for path in sorted(Path(made).iterdir(), key=lambda x: (x.suffix == ".json", x.name)):
                with self._explained():
                    self._files.put_file(str(path), part := self._path(_name_part()))
                    self._files.mv(part, self._path(path.name))

    @contextmanager
    def held(self) -> Iterator[None]:
        """The place without what killed processes left; it cannot be locked."""
        self.check()
        with _swept(self):
            yield

    def sweep(self) -> None:
        """Remove temporary files and probes: a batch has its place to itself."""
        for name in self.list_names():
            if name.startswith(_PROBE) or (
                name.startswith(".stopdown-") and name.endswith(".part")
            ):
                self.remove(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a store's client raises
            raise OutputError(
                f"The output {self.place} could not be written: "
                f"{take_first_line(error).rstrip('.')}.",
                expected="Nothing half-written was left behind.",
                remedy="Check the address and your credentials for it.",
            ) from error


Store = Folder | Remote


@contextmanager
def _swept(store: Store) -> Iterator[None]:
    store.sweep()
    try:
        yield
    finally:
        store.sweep()


def open_store(given: str) -> Store:
    """The place that a path or URL names; a `file://` URL is a folder."""
    if given.startswith("file://"):
        return Folder(Path(given.removeprefix("file://")))
    return Remote(given) if is_url(given) else Folder(Path(given))


def _name_part() -> str:
    return f".stopdown-{secrets.token_hex(8)}.part"


def write_probe(store: Store) -> str:
    name = f"{_PROBE}{secrets.token_hex(8)}"
    store.write(name, b"stopdown")
    return name


def check_probe(store: Store, name: str, worker: str) -> None:
    """Refuse a worker whose files do not come to where they are looked for."""
    if name not in store.list_names():
        raise OutputError(
            f"{worker} wrote into {store.place}, and nothing came here.",
            expected="All workers write into one place: a shared disk, or object storage.",
            remedy="Name one with -o: a folder that every machine mounts, or s3://bucket/folder.",
        )
    store.remove(name)
