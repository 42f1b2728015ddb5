"""Convert component outputs to bytes for a journal's files, and back; compute digests of arguments.

The bytes are those of `torch.save`: tensors return with their strides and devices, so that the same kernels
compute with them as before. PyTorch's restricted unpickler reads them; of the functions that a file may
name, it calls only PyTorch's own for tensors and two of this module. The only classes are those of model
outputs and of autoencoders' latent distributions; they are looked up among loaded modules, so a file can't
cause an import or run code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from stopdown.number_formats import name_dtype

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class PackingError(Exception):
    """Raised if a value can't be stored in a file, or a file's content is invalid."""


def pack(value: Any) -> bytes:
    """Convert a value, which may contain tensors and model outputs, to the content of a file.

    Raises:
        PackingError: it contains an object of unknown class.

    Cost: a host copy of every tensor.
    """
    file = io.BytesIO()
    pickling: Any = SimpleNamespace(__name__=__name__, Pickler=_Pickler)
    try:
        torch.save(value, file, pickle_module=pickling)
    except RuntimeError as error:  # a cycle, or two views of the same bytes in different dtypes
        raise PackingError(f"it can't be pickled: {error}") from error
    file.seek(0)
    with safe_globals([_spread, _make]):
        if unknown := get_unsafe_globals_in_checkpoint(file):
            raise PackingError(f"it returns {unknown[0]} itself")
    return file.getvalue()


def unpack(content: bytes) -> Any:
    """Convert a file's content to the value again; nothing in it is executed.

    Raises:
        PackingError: it is damaged, or contains anything else than `pack` writes.
    """
    try:
        with safe_globals([_spread, _make]):
            return torch.load(io.BytesIO(content), weights_only=True)
    except PackingError:
        raise
    except Exception as error:  # also what classes of outputs make of fields that are not theirs
        raise PackingError("its structure is not right") from error


class _Pickler(pickle.Pickler):
    """Pickles tensors and, by the names of their classes, outputs; refuses other objects."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return _reduce_tensor(value)
        if _is_output(kind):
            fields = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
            return _make, (kind.__module__, kind.__qualname__, fields)
        if _is_distribution(kind):
            return _make, (kind.__module__, kind.__qualname__, vars(value))
        is_named = isinstance(value, type) or inspect.isroutine(value)
        if is_named or kind in (torch.dtype, torch.device, torch.Size, OrderedDict):
            return NotImplemented  # parts of a pickled tensor; `pack` finds other names
        raise PackingError(f"it returns a {kind.__qualname__}")


def _reduce_tensor(value: torch.Tensor) -> Any:
    """Return how to pickle a tensor: with its storage, or, if that is much larger, its own values alone."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
        raise PackingError(f"it returns a {type(value).__qualname__} of layout {value.layout}")
    tensor, strides = value.detach(), value.stride()
    # Along a dimension that was expanded, one value stands for all.
    own = tensor[tuple(slice(None if stride else 1) for stride in strides)]
    if 2 * own.nbytes >= tensor.untyped_storage().nbytes():
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    dense = own.clone(memory_format=torch.contiguous_format)
    return _spread, (dense, tuple(tensor.shape), strides)


def _spread(dense: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Give a tensor these strides, and expand it to this shape."""
    made = torch.empty_strided(dense.shape, strides, dtype=dense.dtype, device=dense.device)
    return made.copy_(dense).as_strided(shape, strides)


def _make(module: str, path: str, fields: dict[str, Any]) -> Any:
    """Make a model output or a latent distribution of these fields, if its class is loaded."""
    kind: Any = sys.modules.get(module)
    for part in path.split("."):
        kind = getattr(kind, "__dict__", {}).get(part)  # `getattr` would load parts of lazy modules
    if isinstance(kind, type) and _is_output(kind):
        return kind(**fields)
    if isinstance(kind, type) and _is_distribution(kind):
        made: Any = object.__new__(kind)
        vars(made).update(fields)
        return made
    raise PackingError(f"its structure names {module}.{path}, which is no output")


def _is_output(kind: type) -> bool:
    """Return whether a class is one of Diffusers' or Transformers' model outputs."""
    return issubclass(kind, OrderedDict) and dataclasses.is_dataclass(kind)


def _is_distribution(kind: type) -> bool:
    """Return whether a class is an autoencoder's latent distribution, by `sample` and `mode`."""
    is_plain = kind.__new__ is object.__new__ and kind.__setattr__ is object.__setattr__
    return is_plain and all(callable(getattr(kind, name, None)) for name in ("sample", "mode"))


def digest_call(whose: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Compute the SHA-256 of a call: whose call it is, and all arguments, with tensors' bytes.

    Objects of unknown classes contribute their class and the tensors in their attributes.

    Cost: a host copy of every tensor.
    """
    digest = hashlib.sha256(whose.encode())
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
