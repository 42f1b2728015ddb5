"""Where a model comes from: found, checked and described before anything of it is loaded.

A SOURCE is the name of a bundled model, a Diffusers folder, a single `.safetensors` file or a Hub
id. `resolve_source` finds it (and downloads it), `verify_source` reports everything that is wrong
with it. Neither imports torch or Diffusers, and nothing that was downloaded is executed.

**Catches** unknown models and pipeline classes, missing folders and configurations, missing, cut
off and damaged weights, pickles, adapters beside weights, and what `descriptions` finds: configurations
that ask for code, or for more than a model has.
**Does not catch** weights that fit the file but not the model: `load_pipeline` reports those.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stopdown.devices.environment import read_version
from stopdown.errors import OptionError, SourceError, make_printable
from stopdown.files.json_files import MOST_BYTES, UnreadableError
from stopdown.number_formats import list_some
from stopdown.sources import hub
from stopdown.sources.descriptions import (
    BUILT_IN,
    find_excess,
    find_kernels,
    list_custom_code,
    read_description,
    read_table,
)
from stopdown.sources.headers import (
    WEIGHT_FILES,
    DamagedFileError,
    StoredTensor,
    find_missing_shards,
    find_weights,
    read_header,
    read_header_bytes,
    read_samples,
    read_shard_index,
)
from stopdown.sources.hub import Progress
from stopdown.sources.source_problems import (
    MISSING,
    PICKLED,
    SourceProblem,
    make_problem,
    make_source_error,
    refuse_problems,
)

BUNDLED_FOLDER = Path(__file__).parent.parent / "models"
OPTIONAL_COMPONENTS = ("safety_checker", "feature_extractor", "image_encoder")
"""Components that a pipeline may be published without, although its index names them."""


@dataclass(frozen=True)
class Part:
    """A component that a single file holds without the rest of its pipeline.

    Attributes:
        prefix: what the names of its tensors begin with in the file; "" where nothing is in front.
        seen_as: what Diffusers' converter of this class wants there instead.
        laid_out: `single_file_names` has its names, so no converter is asked.
    """

    name: str
    prefix: str = ""
    seen_as: str = ""
    laid_out: bool = False


@dataclass(frozen=True)
class Source:
    """A model that was found, as its `model_index.json` describes it.

    Attributes:
        name: as it was asked for.
        path: folder, or single file.
        kind: where it comes from; `component` where it describes a file with one component, by the folder
            of that component alone.
        pipeline_class: name of its Diffusers class; empty for a single file.
        components: name → (library, class); empty for a single file.
        revision: commit on the Hub; empty otherwise.
        config: of a single file: Diffusers folder or Hub id with its configurations; None for the one
            that Diffusers knows for this kind of checkpoint.
        variant: of the weights, where a component has it: `fp16`; "" for those without one.
        loras: files or Hub ids with their weights, put on when it is loaded.
        scheduler: class that takes the place of its own; "" for its own.
        parts: of a single file without the whole pipeline: what it holds, once `complete_source` looked.
    """

    name: str
    path: Path
    kind: Literal["bundled", "folder", "hub", "file", "component"]
    pipeline_class: str = ""
    components: dict[str, tuple[str, str]] = field(default_factory=dict)
    revision: str = ""
    config: str | Path | None = None
    variant: str = ""
    loras: tuple[tuple[str, float], ...] = ()
    scheduler: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def described(self) -> Path:
        """Folder of its configurations; of a single file, once `complete_source` has found it."""
        return Path(self.config) if self.kind == "file" and self.config else self.path

    def list_folders(self, name: str) -> list[Path]:
        """List the folders of a component: `controlnet_1` is a further one of `controlnet`."""
        found, number = [self.described / name], 1
        while (key := f"{name}_{number}") not in self.components and (
            self.described / key
        ).is_dir():
            found.append(self.described / key)
            number += 1
        return found

    def has_weights(self, name: str) -> bool:
        """Return whether a component is a model, and not a tokenizer, processor or scheduler.

        This follows from its library and class, and for other classes from the content of its folder.
        """
        library, class_name = self.components[name]
        endings = _SIDE_OF_TRANSFORMERS if library == "transformers" else _SIDE
        if any(map(class_name.endswith, endings)):
            return False
        folder = self.described / name
        has_model = not folder.is_dir() or any(map(_is_of_model, os.listdir(folder)))
        return has_model or not any((folder / x).exists() for x in _SIDE_CONFIGURATIONS)


_SIDE = ("Scheduler", "Processor", "Guidance")
_SIDE_OF_TRANSFORMERS = (
    *("Tokenizer", "TokenizerFast", "Processor", "Extractor", "ImageProcessorFast"),
    *("ImageProcessorPil", "Backend"),  # transformers 5 names generic tokenizers by what runs them
)
"""Endings of classes without weights. A `Tokenizer` of Diffusers is a model that turns sound into codes."""

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "spiece.model")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SIDE_CONFIGURATIONS = (*_TOKENIZER_FILES, *_PROCESSOR_FILES, "scheduler_config.json")


def _is_of_model(file_name: str) -> bool:
    """Check whether a file belongs to a model: its configuration, weights or their index."""
    is_weights = file_name.endswith((*WEIGHT_FILES, *hub.PICKLES, ".index.json"))
    return is_weights or file_name == "config.json"


_NAME = re.compile(r"[A-Za-z]\w{,99}", re.ASCII)
"""Components and classes are Python's names; a system's names of files end at 255 bytes."""


def resolve_source(
    source: str | Path,
    *,
    revision: str | None = None,
    config: str | Path | None = None,
    variant: str | None = None,
    progress: Progress | None = None,
    with_weights: bool = True,
) -> Source:
    """Resolve a SOURCE to its model; one on the Hub is downloaded first.

    A bundled name wins over a folder of the same name, which can be written `./name`.

    Args:
        source: bundled name, folder, `.safetensors` file or Hub id.
        revision: branch, tag or commit of a Hub id.
        config: for a single file, a Diffusers folder or Hub id with its configurations.
        variant: of the weights: `fp16`.
        progress: called with the stage (`download`), the item, bytes done and bytes in all (0 if unknown).
        with_weights: False leaves the weights of a Hub id where they are.

    Raises:
        SourceError: there is no such model, its description is refused at once, or the libraries that load
            it are too old.
        OptionError: a revision or a config was given that says nothing about this source.
    """
    check_libraries()
    if not isinstance(source, (str, Path)):
        raise make_source_error("no-name", kind=type(source).__name__)
    refuse_ignored(source, revision, config)
    found = _resolve(source, revision, variant or "", progress, with_weights)
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
"""The least versions that load a checkpoint. The extra `pipelines` brings them."""


def check_libraries() -> None:
    """Refuse an environment whose libraries suffice only for the guard and ComfyUI's nodes."""
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
        index = hub.download_index(text, revision=revision)
        found = replace(_read_folder(text, index.parent, "hub"), variant=variant)
        refuse_problems(text, list(_find_refusals(found)))
        if is_complete(found):
            return found  # in the cache already, at this commit
        hub.download_snapshot(
            index,
            text,
            _list_folders(found),
            variant=variant,
            with_weights=with_weights,
            progress=progress,
        )
        return found
    raise _describe_unknown(text)


def is_complete(source: Source) -> bool:
    """Return whether all files of a Diffusers folder or Hub id are on this computer."""
    return not any(_find_damages(source)) and _has_variant(source)


def count_download(source: Source) -> int:
    """Count the bytes of a Hub id that are not yet on this computer; 0 for other sources and offline."""
    if source.kind != "hub" or is_complete(source):
        return 0
    index = source.path / "model_index.json"
    return hub.count_missing_bytes(
        index, source.name, _list_folders(source), variant=source.variant
    )


def read_remote_headers(source: Source) -> hub.Headers:
    """Read the headers of a Hub id's weights, which stay there; empty for other sources and offline."""
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
"""What a SOURCE can be, in words."""


def find_kind(source: str | Path) -> str:
    """Return the kind in `KINDS` of a SOURCE, as `resolve_source` reads it; unknown names are Hub ids."""
    path = _find_path(source)
    if isinstance(source, str) and source in list_bundled():
        return "bundled"
    return "folder" if os.path.isdir(path) else "file" if os.path.exists(path) else "hub"


def refuse_ignored(
    source: str | Path, revision: str | None = None, config: str | Path | None = None
) -> None:
    """Refuse options without meaning for this kind of source."""
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


def _describe_unknown(text: str) -> SourceError:
    text = text_of(text)
    if _looks_like_path(text) or "/" in text or "\\" in text:
        return make_source_error("no-path", path=text)
    bundled = list_bundled()
    near = difflib.get_close_matches(text, bundled, n=1)
    remedy = f"Did you mean {near[0]}?" if near else "Write for example owner/name, or ./folder."
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
        if not _NAME.fullmatch(key):
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
    inner = sorted(index.parent.name for index in path.glob("*/model_index.json"))
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if inner:
        remedy = f"Did you mean {path / inner[0]}?"
    elif (path / "config.json").is_file():
        remedy = f"This looks like one component of a pipeline. Did you mean {path.parent}?"
    elif files:
        remedy = f"For a single file write {path / files[0]}."
    else:
        remedy = "Save a pipeline there with pipe.save_pretrained(folder), or give another folder."
    return make_source_error("plain-folder", path=path, remedy=remedy)


def verify_source(source: Source) -> None:
    """Check a whole source before loading any of it."""
    if source.kind == "file":
        problems = list(_check_weight_file(source.path, "the file"))
    else:
        problems = [*_find_refusals(source), *_find_damages(source)]
    refuse_problems(source.name, problems)


def verify_descriptions(source: Source) -> None:
    """Check the JSON files of a source; weights and folders may be missing."""
    found = list(_find_refusals(source)) if source.kind != "component" else []
    for name in source.components:
        found += _check_configurations(source, name, source.path / name, may_lack=True)
    refuse_problems(source.name, found)


def _find_refusals(source: Source) -> Iterator[SourceProblem]:
    """Yield the problems in `model_index.json` alone: foreign code and unknown classes."""
    index = source.path / "model_index.json"
    content = read_description(index)
    if isinstance(content.get("_class_name"), list) or content.get("trust_remote_code"):
        yield make_problem("code", what=f"{index} requires a pipeline class of its own")
    elif source.pipeline_class not in list_pipeline_classes():
        known = list_pipeline_classes()
        near = difflib.get_close_matches(source.pipeline_class, known, n=1, cutoff=0.0)
        nearest, class_name = near[0] if near else "none", source.pipeline_class
        yield make_problem("unknown-class", index=index, class_name=class_name, nearest=nearest)
    for name, (library, class_name) in source.components.items():
        said = {"index": index, "name": name, "library": library, "class_name": class_name}
        beside = (folder / f"{library}.py" for folder in (source.path / name, source.path))
        if not _NAME.fullmatch(class_name):
            yield make_problem("class-name", **said)
        elif class_name.endswith("Pipeline"):
            yield make_problem("pipeline-inside", **said)
        elif is_deprecated(class_name):
            yield make_problem("deprecated-class", class_name=class_name)
        elif library in ("diffusers", "transformers") or library in _list_pipeline_modules():
            if class_name.startswith(("Flax", "Onnx")):
                yield make_problem("foreign-library", **said)
        elif len(library) < 100 and any(path.exists() for path in beside):
            what = f"{index} asks for the component {name} from {library}.py"
            yield make_problem("code", what=what)
        else:
            yield make_problem("foreign-library", **said)


def list_pipeline_classes() -> tuple[str, ...]:
    """List the names of the pipeline classes of the installed Diffusers without importing it."""
    return list_library_classes(r"Pipeline\w*")


@functools.cache
def list_library_classes(ending: str) -> tuple[str, ...]:
    """List the classes of the installed Diffusers with this ending, a pattern, without importing it."""
    text = (_find_diffusers() / "__init__.py").read_text(encoding="utf-8")
    names = set(re.findall(rf'"([A-Z]\w*{ending})"', text))
    return tuple(sorted(name for name in names if not name.startswith(("Flax", "Onnx"))))


@functools.cache
def _list_pipeline_modules() -> frozenset[str]:
    folder = _find_diffusers() / "pipelines"
    return frozenset(path.name for path in folder.iterdir() if path.is_dir())


def list_modules_with(class_name: str) -> list[str]:
    """List the pipeline modules of Diffusers that define or import a class, judged by their texts."""
    return [
        name
        for name in sorted(_list_pipeline_modules())
        if (path := _find_diffusers() / "pipelines" / name / "__init__.py").is_file()
        and re.search(rf"\b{re.escape(class_name)}\b", path.read_text(encoding="utf-8"))
    ]


@functools.cache
def is_deprecated(class_name: str) -> bool:
    """Return whether Diffusers has a class in deprecated pipelines alone: it loads none from there."""
    folder = _find_diffusers() / "pipelines" / "deprecated"
    texts = (path.read_text(encoding="utf-8") for path in folder.glob("*/__init__.py"))
    found = any(re.search(rf'"{re.escape(class_name)}"', text) for text in texts)
    return (
        found and not list_modules_with(class_name) and class_name not in list_library_classes("")
    )


def _find_diffusers() -> Path:
    found = importlib.util.find_spec("diffusers")
    if found is None or not found.submodule_search_locations:
        raise SourceError("Diffusers is not installed.", remedy="Type: pip install diffusers")
    return Path(next(iter(found.submodule_search_locations)))


def _find_damages(source: Source) -> Iterator[SourceProblem]:
    for name, (_, class_name) in source.components.items():
        folder = source.path / name
        if folder.is_dir():
            for each in source.list_folders(name):
                yield from _check_configurations(source, name, each)
                if source.has_weights(name):
                    yield from _check_weights(each, source)
        elif name not in OPTIONAL_COMPONENTS and not _makes_itself(source.pipeline_class, name):
            yield make_problem("no-folder", name=name, path=source.path, class_name=class_name)


def _makes_itself(pipeline_class: str, name: str) -> bool:
    """Return whether a pipeline makes a component itself, as LongCat does its scheduler.

    Its index names the component, and `save_pretrained` writes no folder for it.
    """
    import diffusers

    kind: Any = getattr(diffusers, pipeline_class, None)
    argument = inspect.signature(kind.__init__).parameters.get(name) if kind else None
    has_default = argument is not None and argument.default is not inspect.Parameter.empty
    return has_default and name not in kind._optional_components


def find_missing(source: Source) -> list[SourceProblem]:
    """List the problems of missing weights and folders; empty for a folder of configurations alone."""
    if not any(list_weight_files(source).values()) and not any(source.path.glob("*/*.index*.json")):
        return []
    return [problem for problem in _find_damages(source) if problem.rank == MISSING]


def _check_configurations(
    source: Source, name: str, folder: Path, *, may_lack: bool = False
) -> Iterator[SourceProblem]:
    class_name = source.components[name][1]
    yield from _check_side_files(folder)
    for path in sorted(folder.glob("*.json")):
        if path.name == "adapter_config.json":
            yield make_problem("adapter", path=path)
        elif not path.name.endswith(".index.json"):
            yield from _check_configuration(path)
    wanted = ("config.json",) if source.has_weights(name) else _name_configuration(class_name)
    if wanted and not may_lack and not any(map(os.path.lexists, (folder / x for x in wanted))):
        yield make_problem(
            "no-configuration", folder=folder, wanted=wanted[0], class_name=class_name
        )


def _check_side_files(folder: Path) -> Iterator[SourceProblem]:
    """Yield problems of vocabularies and templates that are too large or not regular files."""
    for path in sorted(folder.rglob("*")):
        is_plain = path.is_file() and path.stat().st_size <= MOST_BYTES
        if not is_plain and not path.is_dir() and path.suffix not in (".json", ".safetensors"):
            what = f"has {path.stat().st_size} bytes" if path.is_file() else "is no regular file"
            if path.suffix in hub.SIDE_FILES or not path.is_file():
                yield make_problem("side-file", path=path, what=what, most=MOST_BYTES)


def _check_configuration(path: Path) -> Iterator[SourceProblem]:
    try:
        content = read_table(path)
    except UnreadableError as error:
        yield make_problem("configuration", path=path, error=error)
        return
    if "config" not in path.name:
        return  # vocabularies name tokens, not choices
    for where in list_custom_code(content):
        yield make_problem("code", what=f"{path} requires classes of its own ({where})")
    for where in find_kernels(content):
        yield make_problem("kernel", path=path, where=where, known=", ".join(BUILT_IN))
    for what, most in find_excess(content):
        yield make_problem("excess", path=path, what=what, most=most)


def _name_configuration(class_name: str) -> tuple[str, ...]:
    """Return the files for a component of this class without weights; one of them is enough."""
    if class_name.endswith("Scheduler"):
        return ("scheduler_config.json",)
    if class_name.endswith(("Tokenizer", "TokenizerFast", "Backend")):
        return _TOKENIZER_FILES
    if class_name.endswith("Guidance"):
        return ()
    return _PROCESSOR_FILES


def _check_weights(folder: Path, source: Source) -> Iterator[SourceProblem]:
    _, files = find_weights(folder, source.variant)
    indices = sorted(folder.glob("*.safetensors.index*.json"))
    if not files and not indices:
        yield _describe_no_weights(folder, source)
    for path in files:
        yield from _check_weight_file(path, "the component")
    for index in indices:
        yield from _check_index(index, {path.name for path in files})


def _describe_no_weights(folder: Path, source: Source) -> SourceProblem:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in hub.PICKLES)
    if not pickles:
        return make_problem("no-weights", folder=folder)
    refused = hub.refuse_pickles(str(source.path), [f"{folder.name}/{name}" for name in pickles])
    return SourceProblem("pickles", PICKLED, refused.what, refused.expected, refused.remedy)


def _check_weight_file(path: Path, owner: str) -> Iterator[SourceProblem]:
    try:
        _read_tensors(path)
    except (DamagedFileError, OSError) as error:
        yield describe_damage(path, error, owner)


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a file; for a GGUF file, import torch to read its weights."""
    if path.suffix.lower() != ".gguf":
        return read_header(path)
    from stopdown.sources.weight_files import read_shapes

    return read_shapes(path)


def describe_damage(path: Path, error: Exception, owner: str = "the file") -> SourceProblem:
    """Describe a damaged weight file, whose `owner` is part of the message."""
    kind = "GGUF" if path.suffix.lower() == ".gguf" else "safetensors"
    said = {"path": path, "error": error, "kind": kind, "owner": owner}
    return make_problem("weights", **said, real_path=os.path.realpath(path))


def _check_index(index: Path, files: set[str]) -> Iterator[SourceProblem]:
    try:
        shards = read_shard_index(index)
    except DamagedFileError as error:
        yield make_problem("index", index=index, error=error)
        return
    if any("-of-" not in name for name in files):
        return  # the weights are in one file, which comes first
    missing = find_missing_shards(index, shards)
    if missing:
        listed = list_some(missing, 5)
        yield make_problem("no-shards", folder=index.parent, missing=listed, index=index.name)


def list_weight_files(source: Source) -> dict[str, list[Path]]:
    """List the safetensors files of each component with weights; a single file is `checkpoint`."""
    if source.kind == "file":
        return {"checkpoint": [source.path]}
    return {
        name: [
            path
            for folder in source.list_folders(name)
            for path in find_weights(folder, source.variant)[1]
        ]
        for name in source.components
        if source.has_weights(name) and (source.path / name).is_dir()
    }


def read_stored_dtypes(source: Source) -> dict[str, dict[str, int]]:
    """Count the stored bytes by component and dtype, from the headers of the weights alone.

    A single file is one component, `checkpoint`. Of a Hub id whose weights are not here yet, the headers
    are read there.
    """
    found = list_weight_files(source)
    if source.kind == "hub" and not all(found.values()):
        return hub.count_dtypes(read_remote_headers(source))
    stored: dict[str, dict[str, int]] = {}
    for name, files in found.items():
        counts: Counter[str] = Counter()
        for path in files:
            refuse_problems(source.name, list(_check_weight_file(path, name)))
            for tensor in _read_tensors(path).values():
                counts[tensor.dtype] += tensor.size_bytes
        stored[name] = dict(counts)
    return stored


def narrow_source(source: Source, names: Collection[str]) -> Source:
    """Return the source with only these components, or all of them without names."""
    if not names:
        return source
    return replace(source, components={name: source.components[name] for name in names})


def fingerprint(source: Source) -> str:
    """Compute a SHA-256 over the headers, sizes and samples of all weights, and over their configs.

    The hash is equal for a copy in another folder, or saved by another version of the libraries. It
    differs for another checkpoint of the same shape, and after a config was edited.
    Cost: 64 KiB read from each file.
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
