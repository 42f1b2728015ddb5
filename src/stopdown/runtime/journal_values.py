"""Convert component outputs to bytes for a journal's files, and back; compute digests of arguments.

The bytes are those of `torch.save`, and a SHA-256 at their end: tensors return with their strides and
devices, so that the same kernels compute with them as before. PyTorch's restricted unpickler reads them.
The only classes that a file may name are those of model outputs and of autoencoders' latent distributions;
they are looked up among loaded modules, so a file can't cause an import or run code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import io
import pickle
import sys
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torch.utils import _pytree as pytree

from stopdown.numerics import iterate_leaves

_SEAL_BYTES = hashlib.sha256().digest_size


class PackingError(Exception):
    """Raised if a value can't be stored in a file, or a file's content is invalid."""


def pack(value: Any, purpose: str = "") -> bytes:
    """Convert a value, which may contain tensors and model outputs, to the content of a file.

    Args:
        purpose: what the file is for; `unpack` needs the same.

    Raises:
        PackingError: it contains an object of unknown class.

    Cost: a host copy of every tensor.
    """
    file = io.BytesIO()
    pickling: Any = SimpleNamespace(__name__=__name__, Pickler=_Pickler)
    try:
        torch.save(value, file, pickle_module=pickling)
        content = file.getvalue()
        _find_named(content)
    except Exception as error:  # whatever a class raises that can't be pickled
        raise PackingError(f"it can't be pickled: {error}") from error
    return content + hmac.digest(purpose.encode(), content, "sha256")


def unpack(sealed: bytes, kind: Any = Any, purpose: str = "") -> Any:
    """Convert a file's content to the value again, of this type; nothing in it is executed.

    Raises:
        PackingError: it is damaged, for another purpose, or contains anything else than `pack` writes.
    """
    content = sealed[:-_SEAL_BYTES]
    if hmac.digest(purpose.encode(), content, "sha256") != sealed[-_SEAL_BYTES:]:
        raise PackingError("it is damaged, or was made with other arguments")
    try:
        with safe_globals(_find_named(content)):
            return msgspec.convert(torch.load(io.BytesIO(content), weights_only=True), kind)
    except Exception as error:  # also what classes of outputs make of fields that are not theirs
        raise PackingError("its structure isn't right") from error


class _Pickler(pickle.Pickler):
    """Pickles model outputs by their fields, and tensors without the storage behind them if that is much
    larger.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OrderedDict) and dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return type(value), tuple(getattr(value, field.name) for field in fields)
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return NotImplemented
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


def _find_named(content: bytes) -> list[Any]:
    """Find what a file names, other than PyTorch's own for tensors: `_spread`, and classes of outputs.

    Raises:
        ValueError: it names something else, or a class that isn't loaded.
    """
    found = []
    for name in get_unsafe_globals_in_checkpoint(io.BytesIO(content)):
        module, _, own_name = name.rpartition(".")
        named = getattr(sys.modules.get(module), "__dict__", {}).get(own_name)
        if named is not _spread and not (isinstance(named, type) and _is_output(named)):
            raise ValueError(f"{name} is no output of a model")
        found.append(named)
    return found


def _is_output(kind: type) -> bool:
    """Return whether a class is one of Diffusers' or Transformers' model outputs, or an autoencoder's
    latent distribution, which has `sample` and `mode`.
    """
    if issubclass(kind, OrderedDict):
        return dataclasses.is_dataclass(kind)
    is_plain = kind.__new__ is object.__new__ and kind.__setattr__ is object.__setattr__
    return is_plain and all(callable(getattr(kind, name, None)) for name in ("sample", "mode"))


def digest_call(whose: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Compute the SHA-256 of a call: whose call it is, and all arguments, with tensors' bytes.

    Objects of unknown classes contribute their attributes.

    Cost: a host copy of every tensor.
    """
    plain = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
    given = args, dict(sorted(kwargs.items()))
    digest = hashlib.sha256(f"{whose} {pytree.tree_structure(given)}".encode())
    for leaf in iterate_leaves(given, (torch.Tensor, torch.Generator, *plain)):
        value = leaf.get_state() if isinstance(leaf, torch.Generator) else leaf
        if isinstance(value, torch.Tensor):
            dense = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(dense.flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(f"{type(value).__name__}={value!r};".encode())
    return digest.hexdigest()
