"""Resolution of a SOURCE to a model, before anything of it is loaded.

A SOURCE is the name of a bundled model, a Diffusers folder, a single `.safetensors` file or a Hub
id. `resolve_source` finds the model (and downloads it), and `verify_source` reports all problems with its
files. Neither imports torch or Diffusers, and nothing that was downloaded is executed.

**Catches** unknown models and pipeline classes, missing folders and configurations, missing, truncated and
damaged weights, pickles, adapters beside weights, and configurations that request code or implausible sizes
(`descriptions`).
**Does not catch** weights that fit the file but not the model; `load_pipeline` reports those.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from stopdown.devices.environment import read_version
from stopdown.errors import OptionError, SourceError, make_printable
from stopdown.sources import hub
from stopdown.sources.descriptions import (
    read_description,
)
from stopdown.sources.headers import (
    WEIGHT_FILES,
    read_header_bytes,
    read_samples,
)
from stopdown.sources.hub import Progress
from stopdown.sources.source import PYTHON_NAME, Source, list_weight_files, narrow_source
from stopdown.sources.source_checks import (
    check_weight_file,
    find_damages,
    find_refusals,
    list_absent,
    read_header_tensors,
)
from stopdown.sources.source_problems import (
    make_source_error,
    refuse_problems,
)

BUNDLED_FOLDER = Path(__file__).parent.parent / "models"


def resolve_source(
    source: str | Path,
    *,
    revision: str | None = None,
    config: str | Path | None = None,
    variant: str | None = None,
    cache_dir: str | Path | None = None,
    leave: Collection[str] = (),
    progress: Progress | None = None,
    with_weights: bool = True,
) -> Source:
    """Resolve a SOURCE to its model; one on the Hub is downloaded first.

    A bundled name wins over a folder of the same name, which can be written `./name`.

    Args:
        source: bundled name, folder, `.safetensors` file or Hub id.
        revision: branch, tag or commit of a Hub id.
        config: for a single file, a Diffusers folder or Hub id with its configurations.
        variant: variant of the weights, such as `fp16`.
        cache_dir: folder of the Hub's files, as for `from_pretrained`; None for the client's own.
        leave: components of a Hub id whose weights aren't downloaded.
        progress: called with the stage (`download`), the item, bytes done and bytes in total (0 if
            unknown).
        with_weights: False to download no weights of a Hub id.

    Raises:
        SourceError: there is no such model, its index is refused, or the libraries that load it are too
            old.
        OptionError: a revision or a config was given that does not apply to this kind of source.

    Examples:
        >>> source = stopdown.resolve_source("shapes")
        >>> source.kind, source.pipeline_class
        ('bundled', 'CogVideoXPipeline')
    """
    check_libraries()
    if not isinstance(source, (str, Path)):
        raise make_source_error("no-name", kind=type(source).__name__)
    refuse_ignored(source, revision, config)
    cache = None if cache_dir is None else Path(cache_dir)
    found = _resolve(source, revision, variant or "", cache, leave, progress, with_weights)
    if found.kind == "file":
        found = replace(found, config=config)
    if variant is None:
        return found
    found = replace(found, variant=variant)
    is_here = with_weights or found.kind != "hub"
    if is_here and any(list_weight_files(found).values()) and not _has_variant(found):
        raise make_source_error("no-variant", name=text_of(source), variant=variant)
    return found


def text_of(source: str | Path) -> str:
    """Return a SOURCE for display, truncated to 300 characters."""
    text = str(source)
    return text if len(text) <= 300 else f"{text[:300]}…"


NEEDED = {
    "diffusers": "0.42",
    "transformers": "5.0",
    "accelerate": "1.0",
    "huggingface-hub": "1.0",
}
"""Oldest library versions that can load checkpoints. The extra `pipelines` installs them."""


def check_libraries() -> None:
    """Raise `SourceError` if libraries in `NEEDED` are missing or too old to load checkpoints."""
    from packaging.version import Version

    here = {name: read_version(name) for name in NEEDED}
    wrong = [
        f"{name} is {here[name] or 'missing'}"
        for name, least in NEEDED.items()
        if Version(here[name] or "0") < Version(least)
    ]
    if wrong:
        needed = ", ".join(f"{name} {least}" for name, least in NEEDED.items())
        raise make_source_error("libraries", found=", ".join(wrong), needed=needed)


def _resolve(
    source: str | Path,
    revision: str | None,
    variant: str,
    cache: Path | None,
    leave: Collection[str],
    progress: Progress | None,
    with_weights: bool,
) -> Source:
    text = str(source)
    if isinstance(source, str) and text in list_bundled():
        return _read_folder(text, BUNDLED_FOLDER / text, "bundled")
    path = _find_path(source)
    if os.path.exists(path) and make_printable(str(path.absolute())) != str(path.absolute()):
        raise make_source_error("no-text", path=text)
    if os.path.isdir(path):  # unlike Path's, this is False for a name that is too long
        return _read_folder(text, path, "folder")
    if os.path.exists(path):
        return _read_file(text, path)
    if isinstance(source, str) and is_hub_id(text):
        index = hub.download_index(text, revision=revision, cache=cache)
        found = replace(_read_folder(text, index.parent, "hub"), variant=variant)
        refuse_problems(text, list(find_refusals(found)))
        folders = {name: has and name not in leave for name, has in _list_folders(found).items()}
        wanted = narrow_source(found, [name for name in found.components if name not in leave])
        if not list_absent(found) and is_complete(wanted):
            return found  # in the cache already, at this commit
        hub.download_snapshot(
            index,
            text,
            folders,
            variant=variant,
            with_weights=with_weights,
            progress=progress,
        )
        return found
    raise _describe_unknown(text)


def is_complete(source: Source) -> bool:
    """Return whether all files of a Diffusers folder or Hub id are on this computer."""
    return not any(find_damages(source)) and _has_variant(source)


def count_download(source: Source) -> int:
    """Count the bytes of a Hub id that must still be downloaded; 0 for other sources and offline."""
    if source.kind != "hub" or is_complete(source):
        return 0
    index = source.path / "model_index.json"
    return hub.count_missing_bytes(
        index, source.name, _list_folders(source), variant=source.variant
    )


def read_remote_headers(source: Source) -> hub.Headers:
    """Read the headers of a Hub id's weights without a download; empty for other sources and offline."""
    if source.kind != "hub":
        return ()
    names = tuple(name for name, has in _list_folders(source).items() if has)
    return hub.fetch_headers(source.name, source.revision, names, source.variant)


def _list_folders(source: Source) -> dict[str, bool]:
    """Return whether each component has weights, by component name."""
    return {name: source.has_weights(name) for name in source.components}


KINDS = {
    "bundled": "a bundled model",
    "folder": "a Diffusers folder",
    "file": "a file",
    "hub": "a Hub id",
}
"""Kinds of a SOURCE, with a phrase for each."""


def find_kind(source: str | Path) -> str:
    """Return the kind in `KINDS` of a SOURCE, as `resolve_source` reads it; unknown names are Hub ids."""
    path = _find_path(source)
    if isinstance(source, str) and source in list_bundled():
        return "bundled"
    return "folder" if os.path.isdir(path) else "file" if os.path.exists(path) else "hub"


def refuse_ignored(
    source: str | Path, revision: str | None = None, config: str | Path | None = None
) -> None:
    """Refuse a revision or a config that does not apply to this kind of source."""
    kind = find_kind(source)
    if revision is not None and kind != "hub":
        raise OptionError(
            f'revision="{revision}" was given, and {text_of(source)} is {KINDS[kind]}.',
            expected="Only models on the Hub have branches, tags and commits.",
            remedy="Leave `revision` out.",
        )
    if config is not None and kind != "file":
        raise OptionError(
            f'config="{config}" was given, and {text_of(source)} is {KINDS[kind]}.',
            expected="It names the configs of a single .safetensors file; other sources have their own.",
            remedy="Leave `config` out.",
        )


def _find_path(source: str | Path) -> Path:
    return Path(os.path.expanduser(source))  # Path's own raises for ~nobody


def list_bundled() -> list[str]:
    """List the names of the models that come with the package."""
    return sorted(index.parent.name for index in BUNDLED_FOLDER.glob("*/model_index.json"))


def is_hub_id(text: str) -> bool:
    """Return whether a text is a repository, `owner/name`, and not a missing file or folder."""
    return hub.HUB_ID.fullmatch(text) is not None and not _looks_like_path(text)


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "~", "/")) or text.endswith((*WEIGHT_FILES, *hub.PICKLES))


_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
"""Address of a model's page on the Hub, with its id."""


def _describe_unknown(text: str) -> SourceError:
    text, bundled = text_of(text), list_bundled()
    if page := _PAGE.match(text):
        near = [page[1]]
    elif _looks_like_path(text) or "/" in text or "\\" in text:
        return make_source_error("no-path", path=text)
    else:
        near = difflib.get_close_matches(text, bundled, n=1)
    remedy = f"Did you mean {near[0]}?" if near else "For example: owner/name or ./folder."
    known = ", ".join(bundled) or "none is installed"
    return make_source_error("unknown", name=text, known=known, remedy=remedy)


def _has_variant(source: Source) -> bool:
    files = [path for paths in list_weight_files(source).values() for path in paths]
    return not source.variant or any(f".{source.variant}." in path.name for path in files)


def _read_file(name: str, path: Path) -> Source:
    if path.suffix.lower() in hub.PICKLES:
        raise hub.refuse_pickles("SOURCE", [str(path)])
    if path.suffix.lower() not in WEIGHT_FILES:
        raise make_source_error("no-weight-file", path=path)
    return Source(name, path, "file")


def _read_folder(name: str, path: Path, kind: Literal["bundled", "folder", "hub"]) -> Source:
    index = path / "model_index.json"
    if not index.exists() and not index.is_symlink():
        raise _describe_plain_folder(path)
    content = read_description(index)
    for key in filter(lambda key: _is_component(key, content[key]), content):
        if not PYTHON_NAME.fullmatch(key):
            raise make_source_error("component-name", index=index, key=key)
    components = {
        key: (str(value[0]), str(value[1]))
        for key, value in content.items()
        if _is_component(key, value)
    }
    revision = path.name if kind == "hub" else ""
    class_name = content.get("_class_name")
    return Source(
        name, path, kind, class_name if isinstance(class_name, str) else "", components, revision
    )


def _is_component(key: str, value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return not key.startswith("_") and is_pair and all(isinstance(part, str) for part in value)


def _describe_plain_folder(path: Path) -> SourceError:
    inner = sorted(path.glob("*/model_index.json")) or sorted(
        path.glob("snapshots/*/model_index.json"), key=lambda index: -index.lstat().st_mtime
    )  # of the Hub's cache
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if inner:
        remedy = f"Did you mean {inner[0].parent}?"
    elif (path / "config.json").is_file():
        remedy = f"This looks like one component of a pipeline. Did you mean {path.parent}?"
    elif files:
        remedy = f"For a single file write {path / files[0]}."
    else:
        remedy = "Save a pipeline there with pipe.save_pretrained(folder), or give another folder."
    return make_source_error("plain-folder", path=path, remedy=remedy)


def read_stored_dtypes(source: Source) -> dict[str, dict[str, int]]:
    """Count the stored bytes by component and dtype, from the headers of the weights alone.

    A single file is one component, `checkpoint`. If a Hub id's weights are not downloaded yet, the headers
    are read from the Hub.
    """
    found = list_weight_files(source)
    if source.kind == "hub" and not all(found.values()):
        return hub.count_dtypes(read_remote_headers(source))
    stored: dict[str, dict[str, int]] = {}
    for name, files in found.items():
        counts: Counter[str] = Counter()
        for path in files:
            refuse_problems(source.name, list(check_weight_file(path, name)))
            for tensor in read_header_tensors(path).values():
                counts[tensor.dtype] += tensor.size_bytes
        stored[name] = dict(counts)
    return stored


def fingerprint(source: Source) -> str:
    """Compute a SHA-256 over the headers, sizes and samples of all weights, their configs, and LoRAs.

    A copy in another folder, or saved by another version of the libraries, has the same hash. Another
    checkpoint of the same shape has another, even if only one tensor differs; so has an edited config.

    Cost: reads 64 KiB of each weight file and 64 bytes of each tensor, and all of each LoRA.
    """
    digest = hashlib.sha256()
    for name, files in sorted(list_weight_files(source).items()):
        for path in files:
            label = f"{name}/{path.name if name != 'checkpoint' else ''}\0{path.stat().st_size}\0"
            digest.update(label.encode())
            digest.update(read_header_bytes(path))
            digest.update(read_samples(path))
        for folder in source.list_folders(name) if source.kind != "file" else ():
            if (folder / "config.json").is_file():
                digest.update(_normalise(read_description(folder / "config.json")))
    for lora, weight in source.loras:
        with Path(lora).expanduser().open("rb") as file:  # whole: it is small
            digest.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()} {weight}".encode())
    return digest.hexdigest()


def _normalise(config: dict[str, Any]) -> bytes:
    """Serialise a config canonically, without versions, locations and the saved dtype."""
    said = {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key not in ("transformers_version", "torch_dtype", "dtype")
    }
    return json.dumps(said, sort_keys=True).encode()
