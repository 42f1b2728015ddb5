"""Download of models from the Hub with its own client: only files that are needed and cannot run code.

`model_index.json` is downloaded and checked first. Then come the configurations, tokenizers and safetensors
of the components that it names. Pickles, Python files, weights in a second precision and single-file
checkpoints beside the folders are not downloaded. The client itself resumes partial files, caches complete
ones, and reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.

**Catches** a Hub that does not answer, files that differ from their hashes, and answers that would make the
client write a file outside of its cache.
**Does not catch** a file that was downloaded by a run that was killed before it checked the hash, and a
server that never stops sending.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import logging
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from stopdown.errors import SourceError, StopdownError
from stopdown.number_formats import find_format, format_bytes
from stopdown.sources.headers import RESCALED_ENTRY, choose_weights
from stopdown.sources.source_problems import make_source_error

Progress = Callable[[str, str, int, int], None]
"""Callback for progress: the stage (`download`, `load`, `measure`…), the item, and the done and total
amounts. The total is 0 if unknown. Downloads and loading are counted in bytes."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PLAN_BESIDE = "stopdown.json"
"""File name of a plan that is published with a model."""

SIDE_FILES = (".json", ".txt", ".model", ".jinja", ".vocab", ".spm", ".tiktoken")
"""Suffixes of a component's files other than weights."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def download_index(repo: str, *, revision: str | None = None, cache: Path | None = None) -> Path:
    """Download a repository's `model_index.json` and return its path in the client's cache.

    Args:
        cache: another folder for the cache, as `from_pretrained(cache_dir=...)` takes it.
    """
    import huggingface_hub

    with _asking(repo, revision):
        index = Path(
            huggingface_hub.hf_hub_download(
                repo, filename="model_index.json", revision=revision, cache_dir=cache
            )
        )
    _check_files([index], repo)
    return index


def download_snapshot(
    index: Path,
    repo: str,
    folders: dict[str, bool],
    *,
    variant: str = "",
    with_weights: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Download the files of the given components and return the folder of the repository's snapshot.

    Args:
        index: path of the downloaded `model_index.json`, in whose cache the files are put.
        folders: whether each component has weights, by name.
        with_weights: False to download only configurations and tokenizers.

    Raises:
        SourceError: the disk has too little space for the missing files, or the Hub refuses them.
    """
    import huggingface_hub

    commit = index.parent.name
    files = _list_files(repo, commit)
    if files is None:
        return index.parent
    chosen = choose_files(
        list(files), folders, repo=repo, variant=variant, with_weights=with_weights
    )
    absent = [index.parent / name for name in chosen if not (index.parent / name).exists()]
    needed, free = _count_missing(files, chosen, index.parent), shutil.disk_usage(index.parent).free
    if needed > free:
        said = {"needed": format_bytes(needed), "free": format_bytes(free)}
        raise make_source_error("no-room", repo=repo, folder=index.parent.parent.parent, **said)
    before = 0
    for names in _order_files(files, chosen):
        with _asking(repo, None):
            huggingface_hub.snapshot_download(
                repo,
                revision=commit,
                cache_dir=index.parents[3],
                allow_patterns=[glob.escape(name) for name in names],
                tqdm_class=_make_bar_class(progress, before, needed),
            )
        came = [index.parent / name for name in names if index.parent / name in absent]
        _check_files(came, repo)
        before += sum(path.stat().st_size for path in came)
    return index.parent


def _order_files(files: Mapping[str, Any], chosen: Sequence[str]) -> list[list[str]]:
    """Group the files in download order: small files, then each component's weights, the smallest first."""
    weights = dict[str, list[str]]()
    for name in chosen:
        folder = name.rpartition("/")[0] if name.endswith(".safetensors") else ""
        weights.setdefault(folder, []).append(name)
    small = weights.pop("", [])
    sizes = {folder: sum(files[x].size for x in names) for folder, names in weights.items()}
    return [small, *(weights[folder] for folder in sorted(weights, key=sizes.__getitem__))]


def count_missing_bytes(
    index: Path, repo: str, folders: dict[str, bool], *, variant: str = ""
) -> int:
    """Count the bytes that `download_snapshot` has yet to download; 0 if the Hub cannot be asked."""
    files = _list_files(repo, index.parent.name)
    if files is None:
        return 0
    chosen = choose_files(list(files), folders, repo=repo, variant=variant)
    return _count_missing(files, chosen, index.parent)


def _count_missing(files: Mapping[str, Any], names: Iterable[str], snapshot: Path) -> int:
    """Count the bytes of these files that are missing from the cache.

    Files that were cached for another commit aren't missing, and of a partial download that can be
    continued, only the rest is.
    """
    blobs = snapshot.parent.parent / "blobs"
    missing = 0
    for name in names:
        file = files.get(name)
        if file is None or (snapshot / name).exists():
            continue
        blob = file.lfs.sha256 if file.lfs is not None else file.blob_id
        if not (blobs / blob).exists():
            begun = blobs / f"{blob}.incomplete"  # newer clients use other names, and begin again
            missing += max(file.size - (begun.stat().st_size if begun.exists() else 0), 0)
    return missing


def download_component(repo: str, folder: str = "", *, revision: str | None = None) -> Path:
    """Download a Transformers model from a repository or a folder of it; return the snapshot's path."""
    import huggingface_hub

    place = f"{folder}/" if folder else ""
    names = [f"*{ending}" for ending in SIDE_FILES] + ["model*.safetensors"]
    with _asking(repo, revision):
        found = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=["model_index.json", *(f"{place}{name}" for name in names)],
            ignore_patterns=[] if folder else ["*/*"],
            tqdm_class=_make_bar_class(None),
        )
    root = Path(found)
    _check_files([path for path in (root / folder).glob("*") if path.is_file()], repo)
    return root


def _check_files(paths: list[Path], repo: str) -> None:
    """Compare downloaded files with their hashes on the Hub; delete a file that differs and raise an error.

    The name of a file's blob in the cache is its hash.

    Cost: each file is read once.
    """
    for path in paths:
        blob = path.resolve()
        if path.is_file() and _compute_hash(blob) not in (None, blob.name):
            path.unlink()
            blob.unlink(missing_ok=True)
            said = {"path": path.name, "hub": _read_endpoint(), "repo": repo, "blob": blob.name}
            raise make_source_error("other-hash", **said)


def _compute_hash(blob: Path) -> str | None:
    """Compute a cached file's hash, of the type of its name (Git or SHA-256); None if that is no hash."""
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        return None
    digest = hashlib.sha256() if len(blob.name) == 64 else hashlib.sha1(usedforsecurity=False)
    if len(blob.name) == 40:
        digest.update(f"blob {blob.stat().st_size}\0".encode())
    with blob.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


@contextmanager
def _asking(repo: str, revision: str | None) -> Iterator[None]:
    """Convert errors of requests to the Hub in the block to a `SourceError`, and limit waiting times."""
    try:
        with _careful_client():
            yield
    except StopdownError:
        raise
    except Exception as error:
        raise describe_hub_failure(error, repo, revision) from error


MOST_UNANSWERED = 3
"""Number of successive requests without an answer after which the Hub counts as unreachable."""


@contextmanager
def _careful_client() -> Iterator[None]:
    """Limit the waiting times of the Hub's client in the block, and check file names in its answers.

    By itself the client waits without limit when it lists files, and uses an ETag as a file name. Without a
    connection it retries for half a minute; in the block it tries twice, then uses the cache.
    """
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import _http

    before = _http._GLOBAL_CLIENT_FACTORY
    waits = (
        threading.local()
    )  # of this thread's last request: since when, and how many before it in vain

    is_unreachable = False

    def hurry(request: Any) -> None:
        most, now = _read_patience(), time.monotonic()
        is_silence = (
            now - getattr(waits, "since", now) >= most
        )  # and not a connection that is refused
        waits.vain = getattr(waits, "vain", 0) + is_silence
        waits.since = now
        if waits.vain == MOST_UNANSWERED:
            said = {"hub": _read_endpoint(), "most": MOST_UNANSWERED, "patience": f"{most:g}"}
            raise make_source_error("silence", **said)
        limits = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {
            name: min(limits.get(name) or most, most)
            for name in ("connect", "read", "write", "pool")
        }

    def look(response: Any) -> None:
        waits.vain, waits.since = 0, math.inf
        for name in ("ETag", "X-Linked-ETag", "X-Repo-Commit"):
            _check_name(name, response.headers.get(name))

    def make_client() -> Any:
        client: Any = before()
        send = client.send

        def send_twice(request: Any, **named: Any) -> Any:
            nonlocal is_unreachable
            try:
                return send(request, **named)
            except Exception as error:
                if (
                    type(error).__name__ != "ConnectError"
                ):  # of httpx, or of what the client has instead
                    raise
                if is_unreachable:
                    raise OfflineModeIsEnabled("There is no connection.") from error
                is_unreachable = True
                raise

        client.send = send_twice
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], hurry],
            "response": [look, *hooks["response"]],
        }
        return client

    huggingface_hub.set_client_factory(make_client)
    try:
        with _without_retries():
            yield
    finally:
        huggingface_hub.set_client_factory(before)


def _is_no_retry(record: logging.LogRecord) -> bool:
    return not re.search(r"thrown while requesting|Retrying in", record.getMessage())


@contextmanager
def _without_retries() -> Iterator[None]:
    """Drop the client's log lines about retries in the block; a final failure is still reported."""
    handlers = list(logging.getLogger("huggingface_hub").handlers)
    for handler in handlers:
        handler.addFilter(_is_no_retry)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_no_retry)


def _read_patience() -> float:
    """Return the seconds for which the client waits for a part of an answer."""
    from huggingface_hub import constants

    return float(max(constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT))


def _check_name(header: str, text: str | None) -> None:
    """Refuse a header that the client would use as a file name if it is not a valid one."""
    name = (text or "").removeprefix("W/").strip('"')
    if text and (re.search(r"[/\\\x00-\x1f]", name) or name in ("", ".", "..") or len(name) > 128):
        raise make_source_error("bad-name", hub=_read_endpoint(), header=header, text=text[:100])


Headers = Sequence[tuple[str, Any]]
"""Pairs of a component and the header of one of its weight files, as parsed by `huggingface_hub`."""


def fetch_headers(repo: str, commit: str, folders: tuple[str, ...], variant: str = "") -> Headers:
    """Read the headers of weight files without downloading them; empty if the Hub is unreachable.

    Each header is fetched by an HTTP range request, and cached in the process, as commits do not change.
    """
    try:
        return _fetch_headers(repo, commit, folders, variant)
    except _UnreachableError:
        return ()


class _UnreachableError(Exception):
    """Raised if the Hub is unreachable; unlike a return value, it is not cached, so that calls retry."""


@functools.lru_cache(maxsize=4)
def _fetch_headers(repo: str, commit: str, folders: tuple[str, ...], variant: str) -> Headers:
    import huggingface_hub

    headers = []
    files = _list_files(repo, commit)
    if files is None:
        raise _UnreachableError
    for folder in folders:
        inside = [
            PurePosixPath(name) for name in files if str(PurePosixPath(name).parent) == folder
        ]
        weights = [path.name for path in inside if path.suffix == ".safetensors"]
        _, chosen = choose_weights(weights, variant)
        for name in chosen:
            with _asking(repo, commit):
                header = huggingface_hub.HfApi().parse_safetensors_file_metadata(
                    repo, f"{folder}/{name}", revision=commit
                )
            headers.append((folder, header))
    return headers


def count_dtypes(headers: Headers) -> dict[str, dict[str, int]]:
    """Count the stored bytes of each dtype, by component."""
    stored: dict[str, dict[str, int]] = {}
    for folder, header in headers:
        counts = stored.setdefault(folder, {})
        for tensor in header.tensors.values():
            found = find_format(tensor.dtype)
            start, end = tensor.data_offsets
            label = found.name if found else tensor.dtype
            counts[label] = counts.get(label, 0) + end - start
    return stored


def find_rescaled(headers: Headers) -> dict[str, str]:
    """Return, by component, the statement in its metadata that its weights are rescaled; "" without one."""
    said: dict[str, str] = {}
    for folder, header in headers:
        said[folder] = said.get(folder) or str((header.metadata or {}).get(RESCALED_ENTRY, ""))
    return said


def choose_files(
    files: list[str],
    folders: dict[str, bool],
    *,
    repo: str,
    variant: str = "",
    with_weights: bool = True,
) -> list[str]:
    """Choose the files of a repository to download for the given components.

    Raises:
        SourceError: a component has weights only as pickles.
    """
    chosen = ["model_index.json", *(name for name in files if name == PLAN_BESIDE)]
    refused = []
    for folder, has_weights in folders.items():
        inside = [name for name in files if str(PurePosixPath(name).parent) == folder]
        chosen += [name for name in inside if name.endswith(SIDE_FILES)]
        if not (has_weights and with_weights):
            continue
        weights = [PurePosixPath(name).name for name in inside if name.endswith(".safetensors")]
        _, kept = choose_weights(weights, variant)
        chosen += [f"{folder}/{name}" for name in kept]
        if not kept:
            refused += [name for name in inside if name.endswith(PICKLES)]
    if refused:
        raise refuse_pickles(repo, refused)
    return chosen


def refuse_pickles(place: str, files: list[str]) -> SourceError:
    """Return the error for weights that exist only as pickles.

    Args:
        place: repository or folder.
    """
    return SourceError(
        f"The weights {', '.join(files)} of {place} are stored as pickles.",
        expected="Only safetensors are read: loading a pickle can run any program in it.",
        remedy=explain_conversion(place),
    )


def explain_conversion(place: str) -> str:
    """Return the instructions for converting pickled weights."""
    script = (
        "from diffusers import DiffusionPipeline as P; "
        f"P.from_pretrained({place!r}, use_safetensors=False).save_pretrained('converted')"
    )
    return (
        "Ask its author for safetensors, or, if you trust the file, convert it once with plain "
        f'Diffusers: python -c "{script}", and give the folder converted.'
    )


def describe_hub_failure(error: Exception, repo: str, revision: str | None) -> SourceError:
    from huggingface_hub import errors

    kinds: dict[type[Exception], str] = {  # the first that fits: some are kinds of others
        errors.GatedRepoError: "gated",
        errors.RevisionNotFoundError: "no-revision",
        errors.RepositoryNotFoundError: "no-repository",
        errors.LocalEntryNotFoundError: "",
        errors.EntryNotFoundError: "no-index",
    }
    name = next((name for kind, name in kinds.items() if isinstance(error, kind)), "")
    if not name:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return make_source_error("offline", repo=repo)
        cause, hub = _find_root_cause(error), _read_endpoint()
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403):
            return make_source_error("refused-by-hub", repo=repo, hub=hub, status=status)
        reason = " ".join(str(cause).split()) or type(cause).__name__
        return make_source_error("no-download", repo=repo, hub=hub, reason=reason[:300].rstrip("."))
    return make_source_error(name, repo=repo, hub=_read_endpoint(), revision=revision)


def _find_root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _read_endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _list_files(repo: str, commit: str) -> dict[str, Any] | None:
    """List all files of a repository at a commit, with size and hash; None if the Hub is unreachable."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    try:
        with _careful_client():
            tree = huggingface_hub.HfApi().list_repo_tree(repo, revision=commit, recursive=True)
            return {x.path: x for x in tree if isinstance(x, huggingface_hub.hf_api.RepoFile)}
    except StopdownError:
        raise
    except Exception as error:
        failure = describe_hub_failure(error, repo, commit)
        if _find_root_cause(error).__class__.__module__.startswith("http"):
            return None  # no connection: what is in the cache may be enough
        raise failure from error


def _make_bar_class(progress: Progress | None, before: int = 0, needed: int = 0) -> Any:
    """Make a progress bar class that draws nothing and reports received bytes.

    Args:
        before: bytes that were downloaded before this bar's.
        needed: bytes to download in total.
    """
    from huggingface_hub.utils import tqdm

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total = kwargs.get("total")

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if progress is not None and self.counts_bytes:
                total = max(needed, before + int(self.total or 0))
                progress("download", "downloading", before + int(self.n), total)

    return ReportingBar
