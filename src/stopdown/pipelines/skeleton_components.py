"""A component without weights: its real class, parameters on fake tensors.

Only configurations are read, so a checkpoint of any size is built in seconds and in next to no
memory, and a folder without its weights will do. What runs on it has the shapes, dtypes and
lifetimes of the real thing, and no values.

**Does not catch** weights that do not fit their configuration: nothing of them is read.
"""

from __future__ import annotations

import functools

import torch

from stopdown.component_calls.components import build_module, find_kept_fp32
from stopdown.graph.capture import build_fake
from stopdown.number_formats import name_dtype
from stopdown.sources.component_classes import describing_failures, find_class, limited_building
from stopdown.sources.sources import Source


def build_empty_component(
    source: Source, name: str, dtype: torch.dtype, keep_fp32: bool = True
) -> torch.nn.Module:
    """One component of a source on fake tensors.

    Raises:
        SourceError: its configuration is missing or does not fit its class.
    """
    library, class_name = source.components[name]
    module_class = find_class(library, class_name)
    factory = functools.partial(build_module, module_class, source.described / name)
    failures = describing_failures(source.described / name, class_name, has_weights=False)
    with failures, limited_building():
        module = build_fake(factory, dtype)
    if keep_fp32:
        kept = find_kept_fp32(module_class, name_dtype(dtype))
        _widen(module, kept)
    return module


def build_component(source: Source, name: str) -> torch.nn.Module:
    """One component of a source from its configuration, under whatever mode the caller has set."""
    library, class_name = source.components[name]
    return build_module(find_class(library, class_name), source.described / name)


def _widen(module: torch.nn.Module, kept: tuple[str, ...]) -> None:
    """The parameters below these names in fp32; nobody else holds this module yet."""
    for name, parameter in list(module.named_parameters()):
        if parameter.is_floating_point() and any(part in kept for part in name.split(".")):
            path, _, leaf = name.rpartition(".")
            wide = torch.nn.Parameter(parameter.detach().to(torch.float32), requires_grad=False)
            module.get_submodule(path).register_parameter(leaf, wide)
