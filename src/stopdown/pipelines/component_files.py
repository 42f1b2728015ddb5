"""Detection and loading of components in single files without the rest of their pipeline.

Most such files are published for ComfyUI. The components are recognised by tensor names: Diffusers'
converter of each class gets the file's names and shapes without values, and the component is in the file if
all of its tensors come out. Programs add prefixes to names (`model.diffusion_model.`), which some
converters need, so names are tried with and without. Text encoders have the names of Transformers. If
Diffusers has no converter, or one for the published size only, `single_file_names` has the names.
Diffusers' own names need no converter.

Not covered: different weights of the same shapes; the `transformer_2` of a Wan is taken for `transformer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stopdown.component_calls.components import build_module, is_of_transformers, read_config
from stopdown.errors import SourceError
from stopdown.number_formats import list_some
from stopdown.pipelines.skeletons import build_empty_component
from stopdown.sources.component_classes import (
    describe_misfit,
    describing_failures,
    find_class,
    limited_building,
)
from stopdown.sources.lora_names import split_prefix
from stopdown.sources.single_file_names import find_arranged_shapes, take_apart
from stopdown.sources.source import Part, Source
from stopdown.sources.weight_files import read_shapes

_WHOLE = (
    ("model.diffusion_model.",),
    ("first_stage_model.", "vae."),
    ("cond_stage_model.", "conditioner.", "text_encoders."),
)
"""Prefixes in a whole checkpoint, which has names with one of each group."""

_WANTED = ("model.diffusion_model.", "vae.")
"""Prefixes that some converters of Diffusers require."""

_HEAD = re.compile(r"^((text_model|language_model|model)\.)+")
"""Prefix of an encoder's names, which depends on the version of Transformers."""


def find_file_components(path: Path, described: Source) -> tuple[Part, ...]:
    """Find the components in a single file; () if it is a whole checkpoint.

    Args:
        described: source with the configurations of the pipeline.

    Raises:
        SourceError: the file has none of its components.

    Cost: builds each component once without weights, unless the file is whole.
    """
    shapes = {name: entry.shape for name, entry in read_shapes(path).items()}
    if all(any(name.startswith(kind) for name in shapes) for kind in _WHOLE):
        return ()
    found, taken = [], set[frozenset[str]]()
    for name in described.components:
        if described.has_weights(name) and (described.described / name).is_dir():
            part = _find_part(described, name, shapes, taken)
            found += [part] if part else []
    if not found:
        raise SourceError(
            f"The file {path} holds no whole component of a {described.pipeline_class or 'model'} as "
            f"{described.described} describes it; its first tensor is {next(iter(shapes), 'missing')!r}.",
            expected="All tensors of a component are there, in the names and shapes that Diffusers and "
            "Transformers read.",
            remedy="Give a Diffusers folder of the same kind of model as config, with its weights or "
            "without.",
        )
    return tuple(found)


def _find_part(
    described: Source, name: str, shapes: Mapping[str, tuple[int, ...]], taken: set[frozenset[str]]
) -> Part | None:
    module = build_empty_component(described, name, torch.float32)
    laid_out = find_arranged_shapes(module)
    for part in _list_parts(name, shapes):
        seen = frozenset(original for original in shapes if original.startswith(part.prefix))
        found = rename_component_tensors(part, shapes)
        is_laid_out = bool(laid_out) and laid_out.items() <= found.items()
        if seen not in taken and (is_laid_out or _is_held(module, found)):
            taken.add(seen)
            return replace(part, laid_out=is_laid_out)
    return None


def _list_parts(name: str, shapes: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the possible locations of a component in a single file, each as a `Part`.

    They are the prefixes of the file's names, and none, combined with prefixes that converters may require.
    """
    found = {key.removesuffix(split_prefix(key)[2]): None for key in shapes}
    for prefix in {**found, "": None}:
        for wanted in ("", *_WANTED):
            yield Part(name, prefix, wanted)


def rename_component_tensors(part: Part, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Select the tensors with a part's prefix, and rename them as its class expects."""
    return {
        part.seen_as + name.removeprefix(part.prefix): value
        for name, value in tensors.items()
        if name.startswith(part.prefix)
    }


def _is_held(module: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether names and shapes include every tensor of a component, or one of each tied group."""
    wanted: Mapping[str, torch.Tensor] = module.state_dict(keep_vars=True)
    if is_of_transformers(type(module)):
        wanted = {_HEAD.sub("", name): x for name, x in wanted.items()}
        shapes = {_HEAD.sub("", name): shape for name, shape in shapes.items()}
    elif not wanted.keys() <= shapes.keys():
        shapes = _convert_shapes(module, shapes)
    found = {id(x) for name, x in wanted.items() if shapes.get(name) == tuple(x.shape)}
    return found >= {id(x) for x in wanted.values()}


def _convert_shapes(
    module: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Convert names and shapes with Diffusers' converter for a class; empty if it fails on the names."""
    from diffusers.loaders import single_file_model as single_file

    kind = single_file._get_single_file_loadable_mapping_class(type(module))
    if kind is None:
        return {}
    convert = single_file.SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        made = convert(checkpoint=empty, config=dict(module.config))
    except Exception:  # whatever it raises for the names of another model
        return {}
    return {name: tuple(x.shape) for name, x in made.items()}


def load_parts(source: Source, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Load the components of a single file in fp32.

    Args:
        tensors: tensors by their names in the file.
    """
    return {part.name: _load_part(source, part, tensors).eval() for part in source.parts}


def _load_part(source: Source, part: Part, tensors: Mapping[str, torch.Tensor]) -> Any:
    from accelerate import init_empty_weights

    library, class_name = source.components[part.name]
    kind, seen = find_class(library, class_name), rename_component_tensors(part, tensors)
    folder = source.described / part.name
    with describing_failures(source.path, class_name), limited_building():
        if part.laid_out or not (library == "transformers" or hasattr(kind, "from_single_file")):
            with init_empty_weights():
                module = build_module(kind, folder)
            own = take_apart(module, seen) if part.laid_out else seen
            module.load_state_dict(own, strict=True, assign=True)
            return module.float()
        if library == "transformers":
            config = read_config(kind, folder)
            module, report = kind.from_pretrained(
                None, config=config, state_dict=seen, dtype=torch.float32, output_loading_info=True
            )
            missing = sorted(map(str, report["missing_keys"]))
        else:
            module = kind.from_single_file(
                seen,
                config=str(source.described),
                subfolder=part.name,
                local_files_only=True,
                dtype=torch.float32,
            )
            missing = [name for name, x in module.named_parameters() if x.is_meta]
    if missing:
        raise describe_misfit(source.path, class_name, f"they lack {list_some(missing)}")
    return module
