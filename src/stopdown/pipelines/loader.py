"""A source as a Diffusers pipeline, each component in its own precision.

Each component with weights is loaded by its own class, from safetensors only and without the
network, so that an error names it and progress counts its bytes. The classes keep in fp32 what
their authors pinned. Diffusers then builds the pipeline around the components.

**Catches** weights that lack tensors of the model, have others than it, are integers where it has
floats, or whose shapes do not fit it (Transformers would fill them at random); configurations of far
more than the weights, before memory is taken.
**Does not catch** wrong values.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from stopdown.environment import choose_device
from stopdown.errors import SourceError, StopdownError, take_first_line, take_one_line
from stopdown.graph.capture import name_parameters
from stopdown.mapped_weights import choose_folder
from stopdown.number_formats import FORMATS, list_some
from stopdown.patches import Patches
from stopdown.pipelines import hub
from stopdown.pipelines.components import cast_component_
from stopdown.pipelines.extras import put_extras
from stopdown.pipelines.headers import StoredTensor, find_weights, read_header
from stopdown.pipelines.hub import Progress
from stopdown.pipelines.library_messages import quiet_libraries
from stopdown.pipelines.mapped_components import map_component
from stopdown.pipelines.sources import (
    Source,
    list_weight_files,
    resolve_source,
    verify_descriptions,
)

Dtypes = torch.dtype | Mapping[str, torch.dtype]
"""One dtype, or component → dtype with `default` for the others (fp32 without it)."""

MOST_PARTS = 200_000
"""Modules and parameters that a component is built of; the largest published have some thousand."""


def load_pipeline(
    source: Source,
    *,
    torch_dtypes: Dtypes,
    progress: Progress | None = None,
    mapped: Path | None = None,
) -> Any:
    """The Diffusers pipeline of a source, on the CPU, in evaluation mode.

    Weights that are large beside the machine's memory lie in temporary files and are mapped.

    Args:
        source: what `resolve_source` gave, and `verify_source` let pass.
        torch_dtypes: dtype of each component.
        progress: called with the component, its bytes loaded so far and the bytes in all.
        mapped: map them in this folder, however small they are; not those of a single file.

    Raises:
        SourceError: the weights do not fit their model, or a single file cannot be identified.
        OutputError: they are mapped, and the disk is full.
    """
    with quiet_libraries():
        if source.kind == "file":
            pipe = _load_single_file(source, torch_dtypes, progress)
        else:
            pipe = _load_folder(source, torch_dtypes, progress, mapped)
        put_extras(pipe, source)
        return pipe


def complete_source(source: Source, *, progress: Progress | None = None) -> Source:
    """The source with its pipeline class and components, and with the folder that describes them.

    A single file holds weights only: its class and components come from a configuration elsewhere.

    Args:
        source: what `resolve_source` gave.
        progress: called with the bytes received.

    Raises:
        SourceError: a single file cannot be identified, or its configuration cannot be read.
    """
    if source.kind != "file":
        return source
    found = _find_configuration(source, progress)
    verify_descriptions(found)
    return dataclasses.replace(
        source,
        pipeline_class=found.pipeline_class,
        components=found.components,
        config=found.path,
    )


def _load_folder(
    source: Source, dtypes: Dtypes, progress: Progress | None, mapped: Path | None
) -> Any:
    sizes = {
        name: sum(path.stat().st_size for path in files)
        for name, files in list_weight_files(source).items()
    }
    for name, (library, class_name) in source.components.items():
        if (source.path / name).is_dir():
            find_class(library, class_name)  # before hours are spent on another
    components: dict[str, Any] = {}
    needed = count_bytes(source, dtypes)
    mapped = mapped or choose_folder(needed, choose_device("cpu").memory_bytes)
    done, total = 0, sum(sizes.values())
    for name, size in sizes.items():
        _report(progress, name, done, total)
        components[name] = _load_component(source, name, choose_dtype(dtypes, name), mapped)
        done += size
    _report(progress, "pipeline", done, total)
    return _build_pipeline(source, components)


def _report(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(f"loading {what}", done, total)


def choose_dtype(dtypes: Dtypes, name: str) -> torch.dtype:
    """The dtype of one component."""
    if isinstance(dtypes, torch.dtype):
        return dtypes
    return dtypes.get(name, dtypes.get("default", torch.float32))


def count_bytes(source: Source, dtypes: Dtypes) -> int:
    """Bytes of a folder's weights in these dtypes."""
    return sum(
        math.prod(entry.shape) * choose_dtype(dtypes, name).itemsize
        for name, files in list_weight_files(source).items()
        for path in files
        for entry in read_header(path).values()
    )


def _load_component(source: Source, name: str, dtype: torch.dtype, mapped: Path | None) -> Any:
    library, class_name = source.components[name]
    folder = source.path / name
    variant, files = find_weights(folder, source.variant)
    stored = {path: read_header(path) for path in files}
    tensors = {key: entry for header in stored.values() for key, entry in header.items()}
    module_class = find_class(library, class_name)
    with describing_failures(folder, class_name), limited_building(tensors.values()):
        if mapped is not None:
            module = map_component(module_class, folder, dtype, stored, mapped)
            if module is not None:
                return module
        model, report = module_class.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **({"variant": variant} if variant else {}),
        )
    _check_report(folder, model, report, tensors)
    _check_stored_dtypes(folder, model, tensors)
    return model.eval()


def find_class(library: str, class_name: str) -> Any:
    """The class that a model index names, from Diffusers or Transformers and nowhere else.

    Raises:
        SourceError: the installed version has no such class, or it cannot be a component.
    """
    if library not in ("diffusers", "transformers"):
        library = f"diffusers.pipelines.{library}"
    try:
        found = getattr(importlib.import_module(library), class_name)
    except (ImportError, AttributeError, RuntimeError) as error:
        package = library.partition(".")[0]
        version = importlib.import_module(package).__version__
        raise SourceError(
            f"model_index.json names the class {class_name!r} of {library}, which {package} {version} "
            f"does not have here: {take_first_line(error)}.",
            expected="Components are classes of the installed Diffusers and Transformers.",
            remedy=f"A newer version may know it: pip install -U {package}",
        ) from error
    if not isinstance(found, type) or not hasattr(found, "from_pretrained"):
        raise SourceError(
            f"model_index.json names {library}.{class_name}, which is no class of components.",
            expected="A component is a model, scheduler, tokenizer or processor.",
            remedy="Download or save the model again.",
        )
    return found


@contextmanager
def limited_building(stored: Iterable[StoredTensor] = ()) -> Iterator[None]:
    """No component of more parts than any has, or of far more values than are stored for it.

    Without it a configuration of a few bytes takes hours, or all memory: layers are built one by one,
    and Transformers fills what the weights lack.

    Args:
        stored: the tensors that it is loaded from; without them its values are not limited.

    Raises:
        SourceError: a limit is passed, while the component is built.
    """
    count, values = 0, 0
    # Each parameter is registered once without values and once with; 2 bits are the fewest of a value.
    most = 16 * sum(entry.size_bytes for entry in stored) + 2**24 if stored else math.inf

    def register(module: torch.nn.Module, name: str, part: Any) -> None:
        nonlocal count, values
        count += 1
        values += part.numel() if isinstance(part, torch.Tensor) else 0
        if count > MOST_PARTS or values > most:
            found = f"more than {MOST_PARTS} parts" if count > MOST_PARTS else f"{values} values"
            raise SourceError(
                f"A configuration describes {found}, found in {type(module).__name__}.",
                expected="A component has as many as its weights.",
                remedy="Download or save the model again, weights and config.json from one version.",
            )

    hooks = torch.nn.modules.module
    with Patches() as patches:
        patches.defer(hooks.register_module_parameter_registration_hook(register).remove)
        patches.defer(hooks.register_module_module_registration_hook(register).remove)
        yield


@contextmanager
def describing_failures(path: Path, class_name: str, *, has_weights: bool = True) -> Iterator[None]:
    """Whatever Diffusers and Transformers raise while they build from a model's files, as a SourceError.

    Args:
        has_weights: False where only configurations are read.

    Raises:
        SourceError: instead of any other exception.
    """
    try:
        yield
    except StopdownError:
        raise
    except ImportError as error:
        raise SourceError(
            f"{class_name} in {path} needs a library that is not here: {_shorten(error)}.",
            expected="Its config.json asks for it, as quantised weights do.",
            remedy="Install that library, or give a model whose weights are not quantised.",
        ) from error
    except Exception as error:  # no list is long enough for wrong configurations
        if has_weights:
            raise _describe_misfit(path, class_name, _shorten(error)) from error
        raise SourceError(
            f"{class_name} could not be built from {path}: {_shorten(error)}.",
            expected="The JSON files there describe it.",
            remedy="Download or save the model again.",
        ) from error


def _check_report(
    folder: Path, model: torch.nn.Module, report: dict[str, Any], stored: Iterable[str]
) -> None:
    missing = sorted(map(str, report.get("missing_keys") or ()))
    misfits = sorted(map(str, report.get("mismatched_keys") or ()))
    unknown = _find_unknown(model, {*map(str, report.get("unexpected_keys") or ())}, stored)
    found = [f"they lack {list_some(missing)}"] if missing else []
    found += [f"the shape is another in {list_some(misfits)}"] if misfits else []
    found += [f"the model has no place for {list_some(unknown)}"] if unknown else []
    if found:
        raise _describe_misfit(folder, type(model).__name__, "; ".join(found))


def _find_unknown(model: torch.nn.Module, unexpected: set[str], stored: Iterable[str]) -> list[str]:
    """Tensors of the weights that a model of this configuration should have and has not.

    Encoders are published with a whole of which they are a part: CLIP with its vision model, UMT5
    with its decoder. What such a part has to itself is no part of the model.
    """
    # Buffers that are computed anew; older versions stored them.
    unexpected = unexpected - {name for name, _ in model.named_buffers()}
    if type(model).__module__.startswith("transformers"):
        parts = {name.partition(".")[0] for name in {*stored} - unexpected}
        unexpected = {name for name in unexpected if name.partition(".")[0] in parts}
    return sorted(unexpected)


def _check_stored_dtypes(
    folder: Path, model: torch.nn.Module, tensors: Mapping[str, StoredTensor]
) -> None:
    """Refuse integers where a model has floats: they would be taken for values."""
    if getattr(model, "hf_quantizer", None) is not None:
        return
    floats = {name for name, x in name_parameters(model).items() if x.is_floating_point()}
    wrong = [name for name in floats & tensors.keys() if tensors[name].dtype not in FORMATS]
    if wrong:
        name = min(wrong)
        raise _describe_misfit(
            folder, type(model).__name__, f"{name} is stored as {tensors[name].dtype}"
        )


def _describe_misfit(path: Path, class_name: str, reason: str) -> SourceError:
    return SourceError(
        f"The weights in {path} do not fit their model: {reason}.",
        expected=f"Their configuration describes a {class_name}.",
        remedy="Download or save the model again, weights and config.json from one version.",
    )


def _shorten(error: Exception) -> str:
    if "meta tensor" in str(error):
        return "tensors of the model are missing from them"
    text = take_one_line(error).rstrip(".")
    return text if len(text) <= 400 else f"{text[:400]}…"


def _build_pipeline(source: Source, components: dict[str, Any]) -> Any:
    import diffusers

    absent: dict[str, Any] = {
        name: None for name in source.components if not (source.path / name).is_dir()
    }
    if "safety_checker" in absent:
        absent["requires_safety_checker"] = False
    pipeline_class = getattr(diffusers, source.pipeline_class)
    with describing_failures(source.path, source.pipeline_class, has_weights=False):
        return pipeline_class.from_pretrained(
            source.path, use_safetensors=True, local_files_only=True, **components, **absent
        )


def _load_single_file(source: Source, dtypes: Dtypes, progress: Progress | None) -> Any:
    import diffusers

    described = _find_configuration(source, progress)
    verify_descriptions(described)
    class_name = source.pipeline_class or described.pipeline_class
    pipeline_class = getattr(diffusers, class_name)
    if not hasattr(pipeline_class, "from_single_file"):
        raise SourceError(
            f"Diffusers cannot make a {class_name} from a single file.",
            expected="It can for Stable Diffusion, SDXL, SD3, Flux and some others.",
            remedy="Give the model's Diffusers folder or Hub id instead.",
        )
    size = source.path.stat().st_size
    _report(progress, source.path.name, 0, size)
    with describing_failures(source.path, class_name), limited_building():
        pipe = pipeline_class.from_single_file(
            str(source.path),
            config=str(described.path),
            local_files_only=True,
            dtype=_choose_common_dtype(dtypes),
        )
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            _check_filled(component, source.path)
            cast_component_(component, choose_dtype(dtypes, name)).eval()
    _report(progress, "pipeline", size, size)
    return pipe


def _choose_common_dtype(dtypes: Dtypes) -> torch.dtype:
    """The one dtype that Diffusers takes for a single file: fp32 when components differ."""
    found = {dtypes} if isinstance(dtypes, torch.dtype) else set(dtypes.values())
    return found.pop() if len(found) == 1 else torch.float32


def _check_filled(module: torch.nn.Module, path: Path) -> None:
    """Diffusers leaves parameters without values when a single file lacks them."""
    empty = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if empty:
        raise _describe_misfit(path, type(module).__name__, f"they lack {list_some(empty)}")


def _find_configuration(source: Source, progress: Progress | None) -> Source:
    """The Diffusers folder that describes a single file: configurations and tokenizers."""
    where = _identify_checkpoint(source) if source.config is None else source.config
    if Path(where).expanduser().is_dir():
        return resolve_source(Path(where))
    try:
        index = hub.download_index(str(where))
        described = resolve_source(index.parent)
        folders = dict.fromkeys(described.components, False)
        hub.download_snapshot(index, str(where), folders, with_weights=False, progress=progress)
    except SourceError as error:
        raise SourceError(
            f"The configuration of {source.path} could not be read from {where}.",
            expected=f"A single file holds weights only. {error.what}",
            remedy="Connect to the Hub, or give a Diffusers folder of the same kind of model as "
            "configuration (its weights are not read).",
        ) from error
    return described


def _identify_checkpoint(source: Source) -> str:
    """The Hub id that Diffusers takes the configuration from, by the names in the file."""
    from diffusers.loaders.single_file_utils import fetch_diffusers_config

    tensors = read_header(source.path)
    shapes = {name: SimpleNamespace(shape=tensor.shape) for name, tensor in tensors.items()}
    found: dict[str, str] = fetch_diffusers_config(shapes)
    # What Diffusers does not know, it takes for Stable Diffusion 1.
    is_fallback = "stable-diffusion-v1-5" in found["pretrained_model_name_or_path"]
    if is_fallback and not any(name.startswith("model.diffusion_model.") for name in tensors):
        raise SourceError(
            f"Diffusers does not know what model {source.path} is; its first tensor is "
            f"{next(iter(tensors), 'missing')!r}.",
            expected="A single file is a whole checkpoint, such as those of Stable Diffusion, "
            "SDXL, SD3 or Flux.",
            remedy="Give the model's Diffusers folder or Hub id instead.",
        )
    return found["pretrained_model_name_or_path"]
