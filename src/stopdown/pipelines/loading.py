"""A source as a Diffusers pipeline, each component in its own precision.

Each component with weights is loaded by its own class, from safetensors only and without the
network, so that an error names it and progress counts its bytes. The classes keep in fp32 what
their authors pinned. Diffusers then builds the pipeline around the components.

**Catches** weights that lack tensors of the model, or whose shapes do not fit it (Transformers
would fill them at random).
**Does not catch** wrong values.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from stopdown.errors import SourceError
from stopdown.formats import list_some
from stopdown.pipelines import hub
from stopdown.pipelines.components import cast_component_
from stopdown.pipelines.headers import find_weights, read_header
from stopdown.pipelines.hub import Progress
from stopdown.pipelines.quiet import quiet_libraries
from stopdown.pipelines.sources import Source, list_weight_files, resolve_source, verify_index

Dtypes = torch.dtype | Mapping[str, torch.dtype]
"""One dtype, or component → dtype with `default` for the others (fp32 without it)."""

LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)
"""What Diffusers and Transformers raise for weights and configurations that do not fit."""


def load_pipeline(
    source: Source,
    *,
    torch_dtypes: Dtypes,
    config: str | Path | None = None,
    progress: Progress | None = None,
) -> Any:
    """The Diffusers pipeline of a source, on the CPU, in evaluation mode.

    Args:
        source: what `resolve_source` gave, and `verify_source` let pass.
        torch_dtypes: dtype of each component.
        config: for a single file, the Diffusers folder or Hub id of its configuration; without it
            the one that Diffusers knows for this kind of checkpoint is downloaded.
        progress: called with the component, its bytes loaded so far and the bytes in all.

    Raises:
        SourceError: the weights do not fit their model, or a single file cannot be identified.
    """
    with quiet_libraries():
        if source.kind == "file":
            return _load_single_file(source, torch_dtypes, config, progress)
        return _load_folder(source, torch_dtypes, progress)


def complete_source(
    source: Source, *, config: str | Path | None = None, progress: Progress | None = None
) -> tuple[Source, Path]:
    """The source with its pipeline class and components, and the folder that describes them.

    A single file holds weights only: its class and components come from a configuration elsewhere.

    Args:
        source: what `resolve_source` gave.
        config: for a single file, as in `load_pipeline`.
        progress: called with the bytes received.

    Raises:
        SourceError: a single file cannot be identified, or its configuration cannot be read.
    """
    if source.kind != "file":
        return source, source.path
    found = _find_configuration(source, config, progress)
    verify_index(found)
    return dataclasses.replace(
        source, pipeline_class=found.pipeline_class, components=found.components
    ), found.path


def _load_folder(source: Source, dtypes: Dtypes, progress: Progress | None) -> Any:
    sizes = {
        name: sum(path.stat().st_size for path in files)
        for name, files in list_weight_files(source).items()
    }
    components: dict[str, Any] = {}
    done, total = 0, sum(sizes.values())
    for name, size in sizes.items():
        _report(progress, name, done, total)
        components[name] = _load_component(source, name, choose_dtype(dtypes, name))
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


def _load_component(source: Source, name: str, dtype: torch.dtype) -> Any:
    library, class_name = source.components[name]
    folder = source.path / name
    variant, _ = find_weights(folder)
    try:
        model, report = find_class(library, class_name).from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **({"variant": variant} if variant else {}),
        )
    except LOADING_ERRORS as error:
        raise _describe_misfit(folder, class_name, _shorten(error)) from error
    _check_report(folder, class_name, report)
    return model.eval()


def find_class(library: str, class_name: str) -> Any:
    """The class that a model index names, from Diffusers or Transformers and nowhere else."""
    if library not in ("diffusers", "transformers"):
        library = f"diffusers.pipelines.{library}"
    return getattr(importlib.import_module(library), class_name)


def _check_report(folder: Path, class_name: str, report: dict[str, Any]) -> None:
    missing = sorted(map(str, report.get("missing_keys") or ()))
    misfits = sorted(map(str, report.get("mismatched_keys") or ()))
    if missing or misfits:
        found = [f"they lack {list_some(missing)}"] if missing else []
        found += [f"the shape is another in {list_some(misfits)}"] if misfits else []
        raise _describe_misfit(folder, class_name, "; ".join(found))


def _describe_misfit(path: Path, class_name: str, reason: str) -> SourceError:
    return SourceError(
        f"The weights in {path} do not fit their model: {reason}.",
        expected=f"Their configuration describes a {class_name}.",
        remedy="Download or save the model again, weights and config.json from one version.",
    )


def _shorten(error: Exception) -> str:
    if "meta tensor" in str(error):
        return "tensors of the model are missing from them"
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}…"


def _build_pipeline(source: Source, components: dict[str, Any]) -> Any:
    import diffusers

    absent: dict[str, Any] = {
        name: None for name in source.components if not (source.path / name).is_dir()
    }
    if "safety_checker" in absent:
        absent["requires_safety_checker"] = False
    pipeline_class = getattr(diffusers, source.pipeline_class)
    try:
        return pipeline_class.from_pretrained(
            source.path, use_safetensors=True, local_files_only=True, **components, **absent
        )
    except LOADING_ERRORS as error:
        raise SourceError(
            f"{source.pipeline_class} could not be built from {source.path}: {_shorten(error)}.",
            expected="model_index.json and the folders beside it fit the pipeline class.",
            remedy="Download or save the model again.",
        ) from error


def _load_single_file(
    source: Source, dtypes: Dtypes, config: str | Path | None, progress: Progress | None
) -> Any:
    import diffusers
    from diffusers.loaders.single_file_utils import SingleFileComponentError

    described = _find_configuration(source, config, progress)
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
    try:
        pipe = pipeline_class.from_single_file(
            str(source.path),
            config=str(described.path),
            local_files_only=True,
            dtype=_choose_common_dtype(dtypes),
        )
    except (SingleFileComponentError, *LOADING_ERRORS) as error:
        raise _describe_misfit(source.path, class_name, _shorten(error)) from error
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


def _find_configuration(
    source: Source, config: str | Path | None, progress: Progress | None
) -> Source:
    """The Diffusers folder that describes a single file: configurations and tokenizers."""
    where = config if config is not None else _identify_checkpoint(source)
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
