"""A component whose weights lie in files: built empty, filled tensor by tensor.

As they are stored they lie in the checkpoint's own files, cast to another dtype in temporary ones. The
component takes no memory that the system could not take back. So a model larger than memory can be
measured, planned and run.

**Does not catch** weights whose names, shapes or dtypes are not the class's own (quantised ones, files of
older layouts): the class loads those itself, or says what is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stopdown.component_call_names import QUANT_METHOD
from stopdown.component_calls.components import build_module, find_kept_fp32
from stopdown.mapped_weights import map_copy
from stopdown.number_formats import FORMATS, name_dtype
from stopdown.sources.descriptions import read_description
from stopdown.sources.headers import StoredTensor


def map_component(
    module_class: Any,
    config: Path,
    dtype: torch.dtype | None,
    stored: Mapping[Path, Mapping[str, StoredTensor]],
    folder: Path | None = None,
) -> torch.nn.Module | None:
    """Build a component with mapped weights; None if its class has to load it.

    Args:
        dtype: of its weights; its authors may keep some in fp32. None leaves each as it is stored.
        folder: for the temporary files; None maps those of the checkpoint.
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
