"""Files that hold components without the rest of their pipeline, as most are published for ComfyUI.

Which ones, the names say. Diffusers' own converter of each class is given the file's names and shapes
without values; a component is in the file when every tensor of it comes out. Programs put prefixes before
the names (`model.diffusion_model.`), and some converters need one: both are tried. Text encoders have the
names of Transformers. Where Diffusers has no converter, or one for the published size alone,
`single_file_names` says which names a component has. Diffusers' own names need no converter.

Not covered: other weights of the same shapes: `transformer_2` of a Wan is taken for `transformer`.
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
"""A whole checkpoint has names of each of these kinds."""

_WANTED = ("model.diffusion_model.", "vae.")
"""Prefixes without which a converter of Diffusers finds nothing."""

_HEAD = re.compile(r"^((text_model|language_model|model)\.)+")
"""What versions of Transformers put before the names of one encoder, or leave away."""


def find_file_components(path: Path, described: Source) -> tuple[Part, ...]:
    """Find the components in a file; () for a whole checkpoint.

    Cost: each component built once without weights, unless the file is whole.
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
    """Yield candidate parts: each prefix in the file, or none, with each that converters want."""
    found = {key.removesuffix(split_prefix(key)[2]): None for key in shapes}
    for prefix in {**found, "": None}:
        for wanted in ("", *_WANTED):
            yield Part(name, prefix, wanted)


def rename_component_tensors(part: Part, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors under a part's prefix, by the names that its class loads."""
    return {
        part.seen_as + name.removeprefix(part.prefix): value
        for name, value in tensors.items()
        if name.startswith(part.prefix)
    }


def _is_held(module: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Check whether these names and shapes give every tensor of a component, or one of each tied group."""
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
    """Return names and shapes from Diffusers' converter of a class; empty if it does not know the names."""
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
    """Load the components of a file in fp32, from tensors by their names in the file."""
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
