"""The components of a pipeline and the calls through which a run uses them.

A pipeline calls a handful of components: text encoder, transformer or UNet, VAE encode, VAE decode.
A `Callee` is one such call: the object, the method, and the name it has in records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stopdown.number_formats import name_dtype

_ENCODERS = ("text_encoder", "image_encoder")
_LAST = ("safety_checker",)


@dataclass(frozen=True)
class Callee:
    """One call that a pipeline makes.

    Attributes:
        component: name in records: `transformer`, `vae.decode`.
        owner: the object whose method is called.
        method: `forward`, `encode` or `decode`.
        stage: `encode`, `denoise` or `decode`.
    """

    component: str
    owner: torch.nn.Module
    method: str
    stage: str


def find_components(pipe: Any) -> dict[str, torch.nn.Module]:
    """The modules of a pipeline by name."""
    return {
        name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)
    }


def is_autoencoder(module: Any) -> bool:
    """Whether a module, or a module class, is used through `encode` and `decode`."""
    return callable(getattr(module, "encode", None)) and callable(getattr(module, "decode", None))


def list_calls(name: str, module: Any) -> tuple[str, ...]:
    """What a component is called as: its name, or `vae.encode` and `vae.decode`.

    Args:
        module: it, or its class.
    """
    return (f"{name}.encode", f"{name}.decode") if is_autoencoder(module) else (name,)


def find_callees(pipe: Any) -> tuple[Callee, ...]:
    """Every call that the pipeline makes, in the order of its components."""
    callees: list[Callee] = []
    for name, module in find_components(pipe).items():
        if is_autoencoder(module):
            callees.append(Callee(f"{name}.encode", module, "encode", "encode"))
            callees.append(Callee(f"{name}.decode", module, "decode", "decode"))
        else:
            callees.append(Callee(name, module, "forward", find_stage(name)))
    return tuple(callees)


def find_stage(component: str) -> str:
    """Which stage of a run a component belongs to: `encode`, `denoise` or `decode`."""
    if component.endswith(".encode") or component.startswith(_ENCODERS):
        return "encode"
    return "decode" if component.endswith(".decode") or component in _LAST else "denoise"


def find_kept_fp32(module_class: type, precision: str) -> tuple[str, ...]:
    """Parts of a class that its authors keep in fp32 when it is loaded in a precision.

    Transformers keeps `_keep_in_fp32_modules` in fp16 only, and `_keep_in_fp32_modules_strict` in
    bf16 too; Diffusers knows the first name alone, for both.
    """
    if precision == "fp32":
        return ()
    plain = getattr(module_class, "_keep_in_fp32_modules", None) or []
    strict = getattr(module_class, "_keep_in_fp32_modules_strict", None) or []
    is_foreign = module_class.__module__.startswith("transformers")
    return tuple(dict.fromkeys(strict if is_foreign and precision == "bf16" else [*plain, *strict]))


def read_precisions(module: torch.nn.Module) -> tuple[torch.dtype, ...]:
    """Floating dtypes of a module's parameters, the one with most values first."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return tuple(sorted(sizes, key=lambda dtype: -sizes[dtype]))


def cast_component_(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The module itself with its floating weights in `dtype`, as if it had been loaded so.

    What its authors keep in fp32 is in fp32, and what is not a weight stays as it is.
    """
    kept = find_kept_fp32(type(module), name_dtype(dtype))
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            is_kept = any(part in kept for part in name.split("."))
            tensor.data = tensor.data.to(torch.float32 if is_kept else dtype)
    return module


def find_blocks(
    module: torch.nn.Module, kinds: tuple[type[torch.nn.Module], ...] = (torch.nn.ModuleList,)
) -> tuple[str, ...]:
    """Paths of the members of a component's outermost lists of modules.

    Args:
        kinds: what counts as a list.
    """
    lists = [path for path, part in module.named_modules() if isinstance(part, kinds)]
    outer = [p for p in lists if not any(_is_below(p, other) for other in lists)]
    return tuple(
        f"{path}.{name}" if path else name
        for path in outer
        for name, _ in module.get_submodule(path).named_children()
    )


def _is_below(path: str, other: str) -> bool:
    return path.startswith(f"{other}.") if other else bool(path)
