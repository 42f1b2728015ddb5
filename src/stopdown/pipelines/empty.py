"""A pipeline without weights: real classes, real tokenizers and scheduler, parameters on fake tensors.

Only configurations are read, so a checkpoint of any size is built in seconds and in next to no
memory, and a folder without its weights will do. What runs on it has the shapes, dtypes and
lifetimes of the real thing, and no values.

**Does not catch** weights that do not fit their configuration: nothing of them is read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stopdown.capture import build_fake
from stopdown.errors import SourceError
from stopdown.formats import name_dtype
from stopdown.pipelines.components import find_kept_fp32
from stopdown.pipelines.loading import (
    LOADING_ERRORS,
    Dtypes,
    build_pipeline,
    choose_dtype,
    find_class,
)
from stopdown.pipelines.quiet import quiet_libraries
from stopdown.pipelines.sources import Source, has_weights


def build_empty_pipeline(source: Source, *, torch_dtypes: Dtypes, keep_fp32: bool = True) -> Any:
    """The Diffusers pipeline of a source with every module on fake tensors, in evaluation mode.

    Args:
        source: what `resolve_source` or `complete_source` gave; its weights need not be there.
        torch_dtypes: dtype of each component.
        keep_fp32: leave in fp32 what the classes' authors keep there, as loading does; False for
            components that a plan rescales.

    Raises:
        SourceError: a configuration does not fit its class.
    """
    with quiet_libraries():
        components = {
            name: build_empty_component(source, name, choose_dtype(torch_dtypes, name), keep_fp32)
            for name, (_, class_name) in source.components.items()
            if has_weights(class_name) and (source.path / name).is_dir()
        }
        return build_pipeline(source, components)


def build_empty_component(
    source: Source, name: str, dtype: torch.dtype, keep_fp32: bool = True
) -> torch.nn.Module:
    """One component of a source on fake tensors.

    Raises:
        SourceError: its configuration is missing or does not fit its class.
    """
    library, class_name = source.components[name]
    module_class = find_class(library, class_name)
    factory = functools.partial(_build, module_class, source.path / name)
    try:
        module = build_fake(factory, dtype)
    except (*LOADING_ERRORS, json.JSONDecodeError) as error:
        raise SourceError(
            f"{class_name} could not be built from {source.path / name}: {error}.",
            expected="config.json there describes it.",
            remedy="Download or save the model again.",
        ) from error
    if keep_fp32:
        kept = find_kept_fp32(module_class, name_dtype(dtype))
        _widen(module, kept)
    return module


def _build(module_class: Any, folder: Path) -> torch.nn.Module:
    if module_class.__module__.startswith("transformers"):
        config = module_class.config_class.from_pretrained(folder, local_files_only=True)
        built: torch.nn.Module = module_class(config)
        return built
    config = module_class.load_config(folder, local_files_only=True)
    built = module_class.from_config(config)
    return built


def _widen(module: torch.nn.Module, kept: tuple[str, ...]) -> None:
    """The parameters below these names in fp32; nobody else holds this module yet."""
    for name, parameter in list(module.named_parameters()):
        if parameter.is_floating_point() and any(part in kept for part in name.split(".")):
            path, _, leaf = name.rpartition(".")
            wide = torch.nn.Parameter(parameter.detach().to(torch.float32), requires_grad=False)
            module.get_submodule(path).register_parameter(leaf, wide)


def count_weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters and buffers, tied ones once."""
    found: Mapping[int, torch.Tensor] = {
        id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())
