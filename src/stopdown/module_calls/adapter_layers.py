"""Recognise layers that PEFT puts around others (LoRA, DoRA), by their attributes: no PEFT is imported."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

_ROLES = {"lora_magnitude_vector": "magnitude"}


def is_adapter_layer(module: object) -> bool:
    """Return whether a module is a PEFT layer that wraps another."""
    known = ("adapter_layer_names", "get_base_layer")
    return isinstance(module, torch.nn.Module) and all(hasattr(type(module), x) for x in known)


def unwrap_name(name: str) -> str:
    """Return the name that a parameter or module would have without PEFT: `proj.base_layer.weight` →
    `proj.weight`.
    """
    return f"{name}.".replace(".base_layer.", ".").removesuffix(".")


def list_adapter_names(layer: Any) -> set[str]:
    """Return the names of the adapters in a PEFT layer, in use or not."""
    kinds = getattr(layer, "adapter_layer_names", ())
    return {name for kind in kinds for name in getattr(layer, kind, {})}


def find_role_tensors(layer: Any, name: str) -> dict[str, torch.Tensor]:
    """Map the roles of an adapter's tensors in a PEFT layer, such as `lora_B` or `magnitude`, to the
    tensors.

    Args:
        name: of the adapter.
    """
    found: dict[str, torch.Tensor] = {}
    for kind in layer.adapter_layer_names:
        holder = getattr(layer, kind, {})
        if name not in holder:
            continue
        part, role = holder[name], _ROLES.get(kind, kind)
        if isinstance(part, torch.nn.Module):
            tensors = part.named_parameters()
            found |= {role if key == "weight" else f"{role}.{key}": x for key, x in tensors}
        else:
            found[role] = part
    return found


def list_adapter_layers(module: torch.nn.Module) -> list[Any]:
    """List the layers of a module that PEFT has wrapped."""
    return [layer for layer in module.modules() if is_adapter_layer(layer)]


def is_read_by_libraries(*others: str) -> bool:
    """Return whether a state dict is read by libraries that neither save it nor make a model of it.

    Called by a state dict pre-hook of a module.

    Args:
        others: further packages that may read it.
    """
    caller = _name_module(sys._getframe(3))
    known = ("accelerate", "diffusers.loaders", "peft", *others)
    return any(f"{caller}.".startswith(f"{name}.") for name in known)


def find_reader() -> str:
    """Return the name of the Python module that reads a state dict; called by a pre-hook of any part."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _name_module(frame).startswith("torch.nn.modules."):
        frame = frame.f_back
    return _name_module(frame)


def _name_module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
