"""Checks of a whole source before anything is loaded: components, tokenizers, headers of weights."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

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
    DamagedFileError,
    StoredTensor,
    find_missing_shards,
    find_weights,
    read_header,
    read_shard_index,
)
from stopdown.sources.library_classes import (
    is_deprecated,
    list_pipeline_classes,
    list_pipeline_modules,
    makes_itself,
    needs_component,
)
from stopdown.sources.source import (
    OPTIONAL_COMPONENTS,
    PROCESSOR_FILES,
    PYTHON_NAME,
    TOKENIZER_FILES,
    Source,
    list_weight_files,
)
from stopdown.sources.source_problems import (
    MISSING,
    PICKLED,
    SourceProblem,
    make_problem,
    refuse_problems,
)


def verify_source(source: Source) -> None:
    """Check all files of a source before any is loaded; raise one `SourceError` for all problems."""
    if source.kind == "file":
        problems = list(check_weight_file(source.path, "the file"))
    else:
        problems = [*find_refusals(source), *find_damages(source)]
    refuse_problems(source.name, problems)


def verify_descriptions(source: Source) -> None:
    """Check the JSON files of a source, and raise `SourceError`; weights and folders may be missing."""
    found = list(find_refusals(source)) if source.kind != "component" else []
    for name in source.components:
        found += _check_configurations(source, name, source.path / name, may_lack=True)
    refuse_problems(source.name, found)


def find_refusals(source: Source) -> Iterator[SourceProblem]:
    """Yield the problems in `model_index.json` alone, such as custom code and unknown classes."""
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
        if not PYTHON_NAME.fullmatch(class_name):
            yield make_problem("class-name", **said)
        elif class_name.endswith("Pipeline"):
            yield make_problem("pipeline-inside", **said)
        elif is_deprecated(class_name):
            yield make_problem("deprecated-class", class_name=class_name)
        elif library in ("diffusers", "transformers") or library in list_pipeline_modules():
            if class_name.startswith(("Flax", "Onnx")):
                yield make_problem("foreign-library", **said)
        elif len(library) < 100 and any(path.exists() for path in beside):
            what = f"{index} asks for the component {name} from {library}.py"
            yield make_problem("code", what=what)
        else:
            yield make_problem("foreign-library", **said)


def find_damages(source: Source) -> Iterator[SourceProblem]:
    absent = list_absent(source)
    for name, (_, class_name) in source.components.items():
        if name in absent:
            yield make_problem("no-folder", name=name, path=source.path, class_name=class_name)
        for each in source.list_folders(name) if (source.path / name).is_dir() else ():
            yield from _check_configurations(source, name, each)
            if source.has_weights(name):
                yield from _check_weights(each, source)


def list_absent(source: Source) -> list[str]:
    """List the components whose folders are missing, except those that the pipeline runs without."""
    return [
        name
        for name in source.components
        if not (source.path / name).is_dir() and not _may_lack(source.pipeline_class, name)
    ]


def _may_lack(pipeline_class: str, name: str) -> bool:
    """Return whether a pipeline runs without the folder of a component that its index names."""
    if name in OPTIONAL_COMPONENTS:  # Stable Video Diffusion needs its image encoder
        return not needs_component(pipeline_class, name)
    return makes_itself(pipeline_class, name)


def find_missing(source: Source) -> list[SourceProblem]:
    """List problems with missing weights and folders; none for a folder that has only configurations."""
    if not any(list_weight_files(source).values()) and not any(source.path.glob("*/*.index*.json")):
        return []
    return [problem for problem in find_damages(source) if problem.rank == MISSING]


def _check_configurations(
    source: Source, name: str, folder: Path, *, may_lack: bool = False
) -> Iterator[SourceProblem]:
    class_name = source.components[name][1]
    yield from _check_side_files(folder)
    for path in sorted(folder.glob("[!.]*.json")):  # macOS puts ._config.json on foreign disks
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
    """Yield problems with vocabularies and templates that are too large or not regular files."""
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
    """Return the configuration files of a class without weights, of which a component needs one."""
    if class_name.endswith("Scheduler"):
        return ("scheduler_config.json",)
    if class_name.endswith(("Tokenizer", "TokenizerFast", "Backend")):
        return TOKENIZER_FILES
    if class_name.endswith("Guidance"):
        return ()
    return PROCESSOR_FILES


def _check_weights(folder: Path, source: Source) -> Iterator[SourceProblem]:
    variant, files = find_weights(folder, source.variant)
    indices = sorted(folder.glob("[!.]*.safetensors.index*.json"))
    if files:  # the index of another variant may be there without its shards
        indices = [index for index in indices if _read_variant(index) == variant]
    elif not indices:
        yield _describe_no_weights(folder, source)
    if files and not indices and (lost := _list_lost_shards([path.name for path in files])):
        named = f"The name of {files[0].name}"
        yield make_problem("no-shards", folder=folder, missing=list_some(lost, 5), index=named)
    for path in files:
        yield from check_weight_file(path, "the component")
    for index in indices:
        yield from _check_index(index, {path.name for path in files})


def _list_lost_shards(names: list[str]) -> list[str]:
    """List the shards that are missing by the numbers in the others' names; empty for a single file."""
    parts = [found for name in names if (found := _SHARD.fullmatch(name))]
    if len(parts) < len(names):
        return []
    begin, _, count, end = parts[0].groups()
    every = (f"{begin}-{number:05d}-of-{count}{end}" for number in range(1, int(count) + 1))
    return [name for name in every if name not in names]


_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")


def _read_variant(index: Path) -> str:
    """Return the variant of an index of shards: `fp16` for `model.safetensors.index.fp16.json`."""
    return index.name.partition(".index.")[2].removesuffix("json").removesuffix(".")


def _describe_no_weights(folder: Path, source: Source) -> SourceProblem:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in hub.PICKLES)
    if not pickles:
        return make_problem("no-weights", folder=folder)
    refused = hub.refuse_pickles(str(source.path), [f"{folder.name}/{name}" for name in pickles])
    return SourceProblem("pickles", PICKLED, refused.what, refused.expected, refused.remedy)


def check_weight_file(path: Path, owner: str) -> Iterator[SourceProblem]:
    try:
        read_header_tensors(path)
    except (DamagedFileError, OSError) as error:
        yield describe_damage(path, error, owner)


def read_header_tensors(path: Path) -> dict[str, StoredTensor]:
    """Read the names, dtypes and shapes of a file's tensors; imports torch for a GGUF file."""
    if path.suffix.lower() != ".gguf":
        return read_header(path)
    from stopdown.sources.weight_files import read_shapes

    return read_shapes(path)


def describe_damage(path: Path, error: Exception, owner: str = "the file") -> SourceProblem:
    """Describe a damaged weight file.

    Args:
        owner: component or file, as the message names it.
    """
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
