"""Loading of a source as a Diffusers pipeline, each component in its own precision.

Each component with weights is loaded by its own class, from safetensors only and without network access, so
that errors name the component, and progress is counted in bytes. The classes keep in fp32 what their
authors require. Diffusers then builds the pipeline from the components.

**Catches** weights that lack tensors of the model, have other ones, are integers in place of floats, or
have the wrong shapes (Transformers would initialise them at random); and, before memory is allocated,
configurations that need far more values than the weights have.

Weights can be memory-mapped: the component is built empty and filled tensor by tensor. Tensors in their
stored format are mapped from the checkpoint's files, cast ones from temporary files. The operating system
can evict both, so that a model larger than memory can be measured, planned and run. If names, shapes or
dtypes are not those of the class (quantised weights, older layouts), the class loads them itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open

from stopdown.component_call_names import QUANT_METHOD
from stopdown.component_calls.components import (
    build_module,
    cast_component_,
    find_components,
    find_kept_fp32,
    holds_models,
    is_of_transformers,
    load_held,
    turn_on_tiling,
)
from stopdown.devices.device_choice import Device, choose_device
from stopdown.devices.device_memory import describing_out_of_memory
from stopdown.errors import SourceError
from stopdown.fold_names import name_parameters
from stopdown.interception.patches import Patches
from stopdown.mapped_weights import choose_folder, find_stored, map_copy, put_
from stopdown.number_formats import FORMATS, list_some, name_dtype
from stopdown.pipelines.component_files import find_file_components, load_parts
from stopdown.pipelines.loras_and_schedulers import put_extras
from stopdown.sources import hub
from stopdown.sources.component_classes import (
    describe_misfit,
    describing_failures,
    find_class,
    limited_building,
)
from stopdown.sources.descriptions import read_description
from stopdown.sources.headers import StoredTensor, find_weights, read_header
from stopdown.sources.hub import Progress
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.source import Source, list_weight_files
from stopdown.sources.source_checks import verify_descriptions
from stopdown.sources.source_problems import make_source_error
from stopdown.sources.sources import resolve_source
from stopdown.sources.weight_files import load_weights, open_weight_file, read_shapes

Dtypes = torch.dtype | Mapping[str, torch.dtype] | None
"""One dtype, or dtypes by component, with `default` for others (else fp32); None for the stored dtypes."""


def load_pipeline(
    source: Source,
    *,
    torch_dtypes: Dtypes,
    progress: Progress | None = None,
    mapped: Path | None = None,
) -> Any:
    """Load the Diffusers pipeline of a source on the CPU, in evaluation mode.

    Cast weights that are large compared to the machine's memory are mapped from temporary files.

    Args:
        torch_dtypes: dtype of each component; None to keep stored dtypes, with weights mapped from the
            checkpoint's own files if the class allows it.
        mapped: folder for temporary files into which all weights are mapped, whatever their size; ignored
            for a single file.
    """
    if source.parts:
        held = " and ".join(part.name for part in source.parts)
        kind = source.pipeline_class or "pipeline"
        raise make_source_error("parts", path=source.path, held=held, kind=kind, name=source.name)
    with quiet_libraries():
        if source.kind == "file":
            pipe = _load_single_file(source, torch_dtypes, progress)
        else:
            pipe = _load_folder(source, torch_dtypes, progress, mapped)
        put_extras(pipe, source)
        return pipe


def load_program(source: Source, *, torch_dtypes: Dtypes, progress: Progress | None = None) -> Any:
    """Load a pipeline, or the components of a file that has only some as attributes of an object.

    The arguments are those of `load_pipeline`.
    """
    if not source.parts:
        return load_pipeline(source, torch_dtypes=torch_dtypes, progress=progress)
    size = source.path.stat().st_size
    _report(progress, source.path.name, 0, size)
    with quiet_libraries():
        made = load_parts(source, load_weights(source.path))
    for name, module in made.items():
        if (dtype := choose_dtype(torch_dtypes, name)) is not None:
            cast_component_(module, dtype)
    _report(progress, source.path.name, size, size)
    return SimpleNamespace(**made)


def move_program(program: Any, device: Device) -> Any:
    """Move the weights of a module, program or pipeline to a device, and return it.

    Weights that are offloaded to files are read from there, one after the other.
    """
    modules = (
        [program] if isinstance(program, torch.nn.Module) else find_components(program).values()
    )
    with describing_out_of_memory():
        for module in modules:
            for tensor in module.parameters():
                if (stored := find_stored(tensor)) is not None:
                    put_(tensor, stored, device.torch_name)
            if device.type != "cpu":  # where they are loaded
                module.to(device.torch_name)
    return program


def complete_source(source: Source, *, progress: Progress | None = None) -> Source:
    """Return the source with its pipeline class, components and folder of configurations filled in.

    A single file has only weights, so these come from a configuration elsewhere, which may be downloaded.
    If the file has only some of the components, `parts` lists them.
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
        parts=find_file_components(source.path, found),
    )


def _load_folder(
    source: Source, dtypes: Dtypes, progress: Progress | None, mapped: Path | None
) -> Any:
    stored = list_weight_files(source)
    sizes = {name: sum(path.stat().st_size for path in files) for name, files in stored.items()}
    for name, (library, class_name) in source.components.items():
        if (source.path / name).is_dir():
            find_class(library, class_name)  # before hours are spent on another
    components: dict[str, Any] = {}
    cast = {name: _count_cast_bytes(x, choose_dtype(dtypes, name)) for name, x in stored.items()}
    found = choose_folder(sum(cast.values()), choose_device("cpu").memory_bytes)
    done, total = 0, sum(sizes.values())
    for name, size in sizes.items():
        _report(progress, name, done, total)
        folder = mapped or (found if cast[name] else None)
        components[name] = load_component(source, name, choose_dtype(dtypes, name), folder)
        done += size
    _report(progress, "pipeline", done, total)
    return _build_pipeline(source, components)


def _report(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress("load", f"loading {what}", done, total)


def choose_dtype(dtypes: Dtypes, name: str) -> torch.dtype | None:
    """Return the dtype for one component; None for the stored dtype."""
    if dtypes is None or isinstance(dtypes, torch.dtype):
        return dtypes
    return dtypes.get(name, dtypes.get("default", torch.float32))


def _count_cast_bytes(files: Iterable[Path], dtype: torch.dtype | None) -> int:
    """Count the bytes, after the cast, of weights that are cast to this dtype during loading.

    Weights already stored in it are not counted, as the class maps them from the file.
    """
    if dtype is None:
        return 0
    entries = (entry for path in files for entry in read_header(path).values())
    cast = (x for x in entries if x.dtype in FORMATS and x.dtype != name_dtype(dtype))
    return sum(math.prod(entry.shape) * dtype.itemsize for entry in cast)


def load_component(
    source: Source, name: str, dtype: torch.dtype | None = None, mapped: Path | None = None
) -> Any:
    module_class = find_class(*source.components[name])
    load = functools.partial(_load_from, wanted=source.variant, dtype=dtype, mapped=mapped)
    if holds_models(module_class):
        return load_held(module_class, source.path / name, load).eval()
    return load(module_class, source.path / name)


def _load_from(
    module_class: Any, folder: Path, wanted: str, dtype: torch.dtype | None, mapped: Path | None
) -> Any:
    class_name = module_class.__name__
    variant, files = find_weights(folder, wanted)
    stored = {path: read_header(path) for path in files}
    tensors = {key: entry for header in stored.values() for key, entry in header.items()}
    with describing_failures(folder, class_name), limited_building(tensors.values()):
        is_indexed = len(files) < 2 or any(folder.glob("*.safetensors.index*.json"))
        if carries_plan(folder) or not is_indexed:  # its class needs a plan or the index of shards
            module = _map_component(module_class, folder, None, stored)
            if module is None:
                raise describe_misfit(
                    folder, class_name, "their names or shapes aren't those of the class"
                )
            return module if dtype is None else cast_component_(module, dtype)
        if mapped is not None or dtype is None:
            module = _map_component(module_class, folder, dtype, stored, mapped)
            if module is not None:
                return module
        model, report = module_class.from_pretrained(
            folder,
            dtype=dtype or _find_common_dtype(entry.dtype for entry in tensors.values()),
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **({"variant": variant} if variant else {}),
        )
    missing = sorted(map(str, report.get("missing_keys") or ()))
    misfits = sorted(map(str, report.get("mismatched_keys") or ()))
    unknown = find_unknown(model, {*map(str, report.get("unexpected_keys") or ())}, tensors)
    found = [f"they lack {list_some(missing)}"] if missing else []
    found += [f"the shape is another in {list_some(misfits)}"] if misfits else []
    found += [f"the model has no place for {list_some(unknown)}"] if unknown else []
    if found:
        raise describe_misfit(folder, type(model).__name__, "; ".join(found))
    _check_stored_dtypes(folder, model, tensors)
    return turn_on_tiling(model).eval()


def _map_component(
    module_class: Any,
    config: Path,
    dtype: torch.dtype | None,
    stored: Mapping[Path, Mapping[str, StoredTensor]],
    folder: Path | None = None,
) -> torch.nn.Module | None:
    """Build a component with memory-mapped weights; None if its class must load it instead.

    Args:
        config: folder with its `config.json`.
        dtype: dtype of its weights, except those that its class keeps in fp32; None for stored dtypes.
        stored: tensors in each of its weight files.
        folder: folder for temporary files; None to map the checkpoint's files.
    """
    from accelerate import init_empty_weights

    files = {key: path for path, tensors in stored.items() for key in tensors}
    dtypes = {entry.dtype for tensors in stored.values() for entry in tensors.values()}
    description = read_description(config / "config.json")
    method = description.get("quantization_config") or {"quant_method": QUANT_METHOD}
    if not dtypes <= FORMATS.keys() or method.get("quant_method") != QUANT_METHOD:
        return None
    with init_empty_weights(include_buffers=False):
        module = build_module(module_class, config)
    tie: Any = getattr(module, "tie_weights", None)
    if tie is not None:
        tie()  # an empty parameter is registered anew under each of its names
    owners = list(module.state_dict(keep_vars=True).items())
    stored_as = {id(x): key for key, x in owners if key in files}
    if {id(x) for _, x in owners} != stored_as.keys() or files.keys() - {key for key, _ in owners}:
        return None
    shapes = {key: entry.shape for tensors in stored.values() for key, entry in tensors.items()}
    if any(shapes[stored_as[id(x)]] != tuple(x.shape) for _, x in owners):
        return None
    kept = () if dtype is None else find_kept_fp32(type(module), name_dtype(dtype))
    made: dict[int, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in stored}
        for key, empty in owners:
            if id(empty) not in made:
                is_kept = any(part in kept for part in key.split("."))
                known = stored_as[id(empty)]
                value = opened[files[known]].get_tensor(known)
                wanted = torch.float32 if is_kept else dtype
                made[id(empty)] = _map(value, wanted, folder, empty)
            _put(module, key, made[id(empty)])
    return module.eval()


def _map(
    stored: torch.Tensor, dtype: torch.dtype | None, folder: Path | None, empty: torch.Tensor
) -> torch.Tensor:
    mapped = stored
    if folder is not None:
        mapped = map_copy(stored, folder, dtype if stored.is_floating_point() else None)
    if isinstance(empty, torch.nn.Parameter):
        return torch.nn.Parameter(mapped, requires_grad=empty.requires_grad)
    return mapped


def _put(module: torch.nn.Module, key: str, tensor: torch.Tensor) -> None:
    path, _, name = key.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(tensor, torch.nn.Parameter):
        owner.register_parameter(name, tensor)
    else:
        owner.register_buffer(name, tensor)


def carries_plan(folder: Path) -> bool:
    """Return whether a component's configuration contains a plan to apply to its weights.

    Raises:
        SourceError: the plan's exponents are already folded into the weights.
    """
    method = read_description(folder / "config.json").get("quantization_config")
    if not isinstance(method, dict) or method.get("quant_method") != QUANT_METHOD:
        return False
    if method.get("folded"):
        raise SourceError(
            f"The weights in {folder} have exponents: they were saved from a model under a plan.",
            expected="Other precisions and plans begin with the weights of the original.",
            remedy="Load it by from_pretrained after `import stopdown`, or give the original.",
        )
    return True


def find_unknown(model: torch.nn.Module, unexpected: set[str], stored: Iterable[str]) -> list[str]:
    """List stored tensors for which a model has no parameter although it should have one.

    Encoders are often published inside a larger model, such as CLIP with its vision model, or UMT5 with its
    decoder. Tensors of such another part are ignored.

    Args:
        unexpected: stored tensors without a parameter.
        stored: names of all stored tensors.
    """
    # Buffers that are computed anew; older versions stored them.
    unexpected = unexpected - {name for name, _ in model.named_buffers()}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = {x for x in unexpected if not any(re.search(known, x) for known in ignored)}
    if is_of_transformers(type(model)):
        parts = {name.partition(".")[0] for name in {*stored} - unexpected}
        unexpected = {name for name in unexpected if name.partition(".")[0] in parts}
    return sorted(unexpected)


def _check_stored_dtypes(
    folder: Path, model: torch.nn.Module, tensors: Mapping[str, StoredTensor]
) -> None:
    """Refuse stored integers for a floating parameter, as they would be loaded as values."""
    if getattr(model, "hf_quantizer", None) is not None:
        return
    floats = {name for name, x in name_parameters(model).items() if x.is_floating_point()}
    wrong = [name for name in floats & tensors.keys() if tensors[name].dtype not in FORMATS]
    if wrong:
        name = min(wrong)
        raise describe_misfit(
            folder, type(model).__name__, f"{name} is stored as {tensors[name].dtype}"
        )


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
        raise make_source_error("no-single-file", class_name=class_name)
    size = source.path.stat().st_size
    _report(progress, source.path.name, 0, size)
    with describing_failures(source.path, class_name), limited_building(), Patches() as patches:
        _read_scales(source.path, patches)
        pipe = pipeline_class.from_single_file(
            str(source.path),
            config=str(described.path),
            local_files_only=True,
            dtype=_choose_common_dtype(dtypes, source.path),
        )
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            # Diffusers leaves parameters without values when a single file lacks them
            if empty := [n for n, parameter in component.named_parameters() if parameter.is_meta]:
                lack = f"they lack {list_some(empty)}"
                raise describe_misfit(source.path, type(component).__name__, lack)
            if (dtype := choose_dtype(dtypes, name)) is not None:
                cast_component_(component, dtype)
            component.eval()
    _report(progress, "pipeline", size, size)
    return pipe


def _read_scales(path: Path, patches: Patches) -> None:
    """Patch Diffusers to load a file's quantised weights dequantised; it would read codes as values."""
    import diffusers.loaders.single_file as loader

    is_its_own = loader.load_single_file_checkpoint.__module__.startswith("diffusers.")
    if is_its_own and open_weight_file(path).is_quantised:
        weights = load_weights(path)
        patches.set_attribute(loader, "load_single_file_checkpoint", lambda *_, **__: weights)


def _choose_common_dtype(dtypes: Dtypes, path: Path) -> torch.dtype:
    """Return the one dtype in which Diffusers must load a single file; fp32 if components differ."""
    if dtypes is None:
        return _find_common_dtype(entry.dtype for entry in read_shapes(path).values())
    found = {dtypes} if isinstance(dtypes, torch.dtype) else set(dtypes.values())
    return found.pop() if len(found) == 1 else torch.float32


def _find_common_dtype(stored: Iterable[str]) -> torch.dtype:
    """Return the 16-bit dtype in which all weights are stored, or else fp32."""
    found = {*stored} & FORMATS.keys()
    only = found.pop() if len(found) == 1 else ""
    return FORMATS[only].torch_dtype if only in ("fp16", "bf16") else torch.float32


def _find_configuration(source: Source, progress: Progress | None) -> Source:
    """Find the source with the configs and tokenizers for a single file; download them if necessary."""
    where = _identify_checkpoint(source) if source.config is None else source.config
    folder = Path(where).expanduser()
    if folder.is_dir():
        return _read_component(folder) or resolve_source(folder)
    try:
        index = hub.download_index(str(where))
        described = resolve_source(index.parent)
        folders = dict.fromkeys(described.components, False)
        hub.download_snapshot(index, str(where), folders, with_weights=False, progress=progress)
    except SourceError as error:
        said = {"path": source.path, "where": where, "error": error.what}
        raise make_source_error("no-description", **said) from error
    return described


def _read_component(folder: Path) -> Source | None:
    """Return a source for the folder of a single component; None for a pipeline's folder."""
    if (folder / "model_index.json").exists() or not (folder / "config.json").is_file():
        return None
    content, place = read_description(folder / "config.json"), folder.resolve()
    names = content.get("_class_name") or (content.get("architectures") or [""])[0]
    library = "diffusers" if "_class_name" in content else "transformers"
    return Source(
        str(folder), place.parent, "component", components={place.name: (library, str(names))}
    )


def _identify_checkpoint(source: Source) -> str:
    """Return the Hub id of the configuration that Diffusers infers from the tensors of a single file.

    Raises:
        SourceError: the kind of checkpoint is unknown.
    """
    from diffusers.loaders.single_file_utils import fetch_diffusers_config

    tensors = read_shapes(source.path)
    shapes = {name: SimpleNamespace(shape=tensor.shape) for name, tensor in tensors.items()}
    try:
        found: str = fetch_diffusers_config(shapes)["pretrained_model_name_or_path"]
    except Exception:  # sizes that no published model of this kind has
        found = ""
    # What Diffusers does not know, it takes for Stable Diffusion 1.
    is_fallback = "stable-diffusion-v1-5" in found
    if not found or (
        is_fallback and not any(name.startswith("model.diffusion_model.") for name in tensors)
    ):
        raise make_source_error(
            "unidentified", path=source.path, first=next(iter(tensors), "missing")
        )
    return found
