"""Convert component outputs to tensors and plain data for a journal's files, and back; compute digests
of arguments.

A structure is a tree of plain values in which tensors are numbered. Strides and devices are stored, so that
the same kernels compute with restored tensors as before. The only classes are those of model outputs and
of autoencoders' latent distributions; they are looked up among loaded modules, so a file can't cause an
import or run code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stopdown.number_formats import name_dtype

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class PackingError(Exception):
    """Raised if a value can't be stored in a file, or a file's structure is invalid."""


def pack(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Convert a value to a structure for JSON and a list of its tensors, as contiguous CPU copies.

    Raises:
        PackingError: it contains an object of unknown class.

    Cost: a host copy of every tensor.
    """
    tensors: list[torch.Tensor] = []
    return _pack(value, tensors, {}), tensors


def _pack(value: Any, tensors: list[torch.Tensor], seen: dict[int, Any]) -> Any:
    def pack_pairs(pairs: Any) -> list[Any]:
        return [[name, _pack(item, tensors, seen)] for name, item in pairs]

    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return {"plain": value}
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, tensors, seen)
    if kind in (list, tuple):
        return {kind.__name__: [_pack(item, tensors, seen) for item in value]}
    if kind is dict and all(isinstance(key, str) for key in value):
        return {"dict": pack_pairs(value.items())}
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _is_output(kind):
        fields = [entry.name for entry in dataclasses.fields(value)]
        return {"output": name, "fields": pack_pairs((x, getattr(value, x)) for x in fields)}
    if _is_distribution(kind):
        return {"distribution": name, "fields": pack_pairs(vars(value).items())}
    raise PackingError(f"it returns a {kind.__qualname__}")


def _pack_tensor(value: torch.Tensor, tensors: list[torch.Tensor], seen: dict[int, Any]) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
        raise PackingError(f"it returns a {type(value).__qualname__} of layout {value.layout}")
    if id(value) not in seen:
        node = {"tensor": len(tensors), "strides": list(value.stride()), "on": str(value.device)}
        seen[id(value)] = node
        copied = torch.empty(value.shape, dtype=value.dtype)  # contiguous, also for a single row
        tensors.append(copied.copy_(value.detach()))
    return seen[id(value)]


def unpack(structure: Any, tensors: list[torch.Tensor]) -> Any:
    made: dict[int, torch.Tensor] = {}
    try:
        return _unpack(structure, tensors, made)
    except PackingError:
        raise
    except Exception as error:  # what classes of outputs make of fields that are not theirs
        raise PackingError(f"its structure is not right: {error}") from error


def _unpack(node: dict[str, Any], tensors: list[torch.Tensor], made: dict[int, Any]) -> Any:
    def unpack_pairs(pairs: Any) -> dict[str, Any]:
        return {str(name): _unpack(item, tensors, made) for name, item in pairs}

    if "plain" in node:
        return node["plain"]
    if "tensor" in node:
        number = node["tensor"]
        if number not in made:
            made[number] = _place(tensors[number], node["strides"], node["on"])
        return made[number]
    for kind in (list, tuple):
        if kind.__name__ in node:
            return kind(_unpack(item, tensors, made) for item in node[kind.__name__])
    if "dict" in node:
        return unpack_pairs(node["dict"])
    fields = unpack_pairs(node["fields"])
    if "output" in node:
        return _find_class(node["output"], _is_output)(**fields)
    found = _find_class(node["distribution"], _is_distribution)
    value = found.__new__(found)
    vars(value).update(fields)
    return value


def _place(tensor: torch.Tensor, strides: list[int], device: str) -> torch.Tensor:
    """Copy a stored tensor to a device with the strides that it had."""
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)
    into = made
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:  # expanded: one value stands for all
            into, tensor = into.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    into.copy_(tensor)
    return made


def _is_output(kind: type) -> bool:
    """Return whether a class is one of Diffusers' or Transformers' model outputs."""
    return issubclass(kind, OrderedDict) and dataclasses.is_dataclass(kind)


def _is_distribution(kind: type) -> bool:
    """Return whether a class is an autoencoder's latent distribution, by `sample` and `mode`."""
    is_plain = kind.__new__ is object.__new__ and kind.__setattr__ is object.__setattr__
    return is_plain and all(callable(getattr(kind, name, None)) for name in ("sample", "mode"))


def _find_class(name: str, is_known: Callable[[type], bool]) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not is_known(found):
        raise PackingError(f"its structure names {name}, which is no output")
    return found


def digest_call(component: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Compute the SHA-256 of a call: the component's name and all arguments, with tensors' bytes.

    Objects of unknown classes contribute their class and the tensors in their attributes.

    Cost: a host copy of every tensor.
    """
    digest = hashlib.sha256(component.encode())
    for part in _iterate_bytes((args, dict(sorted(kwargs.items())))):
        digest.update(part)
    return digest.hexdigest()


def _iterate_bytes(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield f"{name_dtype(value.dtype)}{tuple(value.shape)}".encode()
        yield view_bytes(value).numpy()
    elif isinstance(value, torch.Generator):
        yield view_bytes(value.get_state()).numpy()
    elif isinstance(value, _PLAIN):
        yield f"{type(value).__name__}={value!r};".encode()
    elif isinstance(value, dict):
        yield f"{type(value).__qualname__}{{".encode()
        for key, item in value.items():
            yield f"{key}:".encode()
            yield from _iterate_bytes(item)
        yield b"}"
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__qualname__}[".encode()
        for item in value:
            yield from _iterate_bytes(item)
        yield b"]"
    else:
        yield f"<{type(value).__module__}.{type(value).__qualname__}>".encode()
        if not isinstance(value, torch.nn.Module) and hasattr(value, "__dict__"):
            held = vars(value).items()
            yield from _iterate_bytes({k: v for k, v in held if isinstance(v, torch.Tensor)})


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's bytes on the CPU as `[n]` uint8; a copy is made only if necessary."""
    dense = tensor.detach().to("cpu").contiguous()
    # `view` wants a stride of 1, which a contiguous tensor with a single value need not have.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
