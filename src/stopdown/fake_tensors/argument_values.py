"""Values of fake tensors that don't depend on weights, computed along with the fake ones.

Positions, masks and lengths follow from a call's arguments alone. Code on fake tensors that reads their
values gets them, and sizes that depend on them are computed.

**Catches** functions of PyTorch and methods of tensors, on tensors up to a size.
**Does not catch** values that depend on weights: a mask of such values counts as full if a size depends on
it; if code reads a number from them, it fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stopdown.numerics import iterate_tensors
from stopdown.operations import read_calls

LARGEST_KNOWN = 1 << 18
"""Most elements of a tensor whose values are computed; a mask of 512 by 512 tokens fits."""


class ArgumentValues(TorchFunctionMode):
    """A function mode in which fake tensors have values if these don't depend on weights.

    Positions, masks and lengths follow from a call's arguments. `set_known` attaches the arguments' values,
    and functions compute on these, so that code can read the results.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_function(func)
        if name in read_calls().asks:
            answer = _answer(func, args, kwargs)
            return func(*args, **kwargs) if answer is _UNANSWERED else answer
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        if name in INDEXING:
            args = (args[0], read_index(args[1]), *args[2:])
        known = _compute(func, args, kwargs)
        output = _run(func, args, kwargs)
        note_known(output, known)
        written = find_written(name, args, kwargs)
        if known is None and isinstance(written, FakeTensor):
            set_known(written, None)
        return output


def set_known(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
    tensor.stopdown_known = values  # type: ignore[attr-defined]


def find_known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's values, for a fake one those attached to it.

    Return None if they depend on weights, or if there are more than `LARGEST_KNOWN`.
    """
    if not (isinstance(tensor, FakeTensor) or tensor.is_meta):
        return tensor if tensor.numel() <= LARGEST_KNOWN else None
    found: torch.Tensor | None = getattr(tensor, "stopdown_known", None)
    return found


def find_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a real tensor itself, whatever its size, or the values attached to a fake one, if any."""
    return find_known(tensor) if isinstance(tensor, FakeTensor) else tensor


def note_known(output: Any, known: Any) -> None:
    """Attach the values that were computed for a function's fake outputs, and remove outdated ones."""
    values = list_direct(known)
    for at, tensor in enumerate(list_direct(output)):
        if not isinstance(tensor, FakeTensor):
            continue  # real tensors hold their own values
        if at < len(values) and values[at].shape == tensor.shape:
            set_known(tensor, values[at])
        elif hasattr(tensor, "stopdown_known"):
            set_known(tensor, None)


def name_function(func: Any) -> str:
    """Return the short name of a torch function: `linear`, `add`, `to`."""
    name = getattr(func, "__name__", str(func))
    return read_calls().called.get(name, name)


def list_direct(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in list_direct(item)]
    return []


def find_written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the tensor that a function writes into; None if it makes a new one."""
    if isinstance(out := kwargs.get("out"), torch.Tensor):
        return out
    is_own = name.endswith("_") and not name.startswith("__")
    is_operator = name == "__setitem__" or (name.startswith("__i") and name.endswith("__"))
    if (is_own or is_operator) and name not in ("__index__", "__int__", "__invert__"):
        return next((x for x in args if isinstance(x, torch.Tensor)), None)
    return None


def move_to_cpu(_: torch.device) -> torch.device:
    return torch.device("cpu")


_UNANSWERED = object()


def _answer(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operation that reads a fake tensor's values, such as `item()`, on its known values.

    Return `_UNANSWERED` if they are unknown.
    """
    tensors = list(iterate_tensors((args, kwargs)))
    if not any(isinstance(x, FakeTensor) for x in tensors):
        return _UNANSWERED
    values = [find_known(x) for x in tensors]
    if any(x is None for x in values):
        return _UNANSWERED
    given = iter(values)
    real = pytree.tree_map_only(torch.Tensor, lambda _: next(given), (args, kwargs))
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        return func(*real[0], **real[1])


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a function's result from known values of its fake arguments.

    Return None if values are unknown or too many, or if the function fails; () if its result is None.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    real: list[Any] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if at and name_function(func) == "to":  # of the second it takes the dtype alone
                with unset_fake_temporarily():
                    leaf = torch.empty((), dtype=leaf.dtype)
            leaf = find_known(leaf) if isinstance(leaf, FakeTensor) else leaf
            if leaf is None or leaf.numel() > LARGEST_KNOWN:
                return None
        real.append(move_to_cpu(leaf) if isinstance(leaf, torch.device) else leaf)
    if (
        not any(isinstance(x, torch.Tensor) for x in leaves)
        and name_function(func) not in read_calls().makes
    ):
        return None
    real_args, real_kwargs = pytree.tree_unflatten(real, spec)
    if _is_large(real_args, real_kwargs):
        return None
    try:
        with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
            values = func(*real_args, **real_kwargs)
    except Exception:
        return None  # the fake run says what is wrong
    if values is None:
        return ()  # written into what is known
    small = [x for x in list_direct(values) if x.numel() <= LARGEST_KNOWN]
    return values if small and len(small) == len(list_direct(values)) else None


def read_index(index: Any) -> Any:
    """Replace fake integers in an index by their values, as in `x[:, :lengths[0]]`.

    An unknown value becomes 0, or an open end of a slice.
    """
    if isinstance(index, (tuple, list)):
        return type(index)(read_index(x) for x in index)
    if isinstance(index, slice):
        return slice(*(_read_number(x, None) for x in (index.start, index.stop, index.step)))
    return _read_number(index, 0)


def _read_number(value: Any, otherwise: int | None) -> Any:
    """Return the value of a fake integer scalar, or `otherwise` if it depends on weights.

    Other values are returned unchanged.
    """
    if not isinstance(value, FakeTensor) or value.dim() or value.dtype not in _WHOLE:
        return value
    known = find_known(value)
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        return otherwise if known is None else int(known)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function on fake tensors, even if its result's size depends on values: `nonzero`, `x[mask]`.

    For the size, values that depend on weights count as 0, or True if boolean.
    """
    try:
        return func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as refused:
        error = refused
    fakes = [x for x in iterate_tensors((args, kwargs)) if isinstance(x, FakeTensor)]
    if sum(x.numel() for x in fakes) > _LARGEST_STAND_IN:
        raise error
    try:
        with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
            real = pytree.tree_map_only(FakeTensor, _fill, (args, kwargs))
            made = func(*real[0], **real[1])
    except Exception:
        raise error from None
    if not list_direct(made):
        raise error  # a number that depends on weights: what the code does with it is unknown
    mode = fakes[0].fake_mode
    return pytree.tree_map_only(torch.Tensor, mode.from_tensor, made)


def _fill(tensor: FakeTensor) -> torch.Tensor:
    known = find_known(tensor)
    if known is not None:
        return known
    value = 1 if tensor.dtype == torch.bool else 0
    return torch.full((), value, dtype=tensor.dtype).expand(tuple(tensor.shape))


INDEXING = ("__getitem__", "__setitem__")
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LARGEST_STAND_IN = 1 << 26
"""Most elements of fake arguments that are filled with values to find the size of a result."""


def _is_large(args: Any, kwargs: Any) -> bool:
    """Return whether a call's integers, as sizes, make a tensor too large to compute its values."""
    sizes = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, int)]
    return math.prod(max(1, abs(x)) for x in sizes) > 64 * LARGEST_KNOWN
