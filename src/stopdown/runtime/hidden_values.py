"""Notice operations that turn Inf into finite values during a call, and so hide an overflow from the
output's check.

An overflow in fp16 is Inf. `tanh`, `where(isfinite(x), x, 0)`, `nan_to_num`, a division by it, a cast to
integers and others turn Inf into finite values, which are wrong and which a check of the output misses. So
these functions of PyTorch are replaced during a guarded call: each yields one flag for its inputs, which is
read along with the output's range. Where a mask's -Inf is usual (`where`, `clamp`), only +Inf counts. In a
component that computes in fp16, tensors in fp32 are checked as well, because an overflow of an fp16 product
may be Inf in fp32 after a cast, after a plan's multiply, or in an fp32 residual stream.

**Catches** Inf in the inputs of `FUNCTIONS`: functions of `torch`, methods of tensors, the operators `/`
`//` `**` `<` `<=` `>` `>=`, `x[mask] = 0`, indices of largest values (`argmax`, `topk`); NaN in the inputs
of those that don't propagate it (`where`, `nan_to_num`, `x > 0`), or that is cast to integers or 8 bits.

**Does not catch** functions that code has imported by name (`from torch import tanh`), parts of fused
operations (PyTorch's attention on a CPU turns a NaN query into 0 where there are few keys), -Inf in the
inputs of `relu`, `exp`, `logaddexp` or `softmax`, and compiled code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from stopdown.interception.patches import CHANGING, Patches
from stopdown.interception.tracing import is_traced
from stopdown.runtime.activation_maxima import CLAMPED_FROM

Note = Callable[[str, torch.Tensor], object]
"""A function that receives an operation's name and a tensor that is infinite or large if it hid a value."""

_FIRST, _BOTH, _SECOND = (0,), (0, 1), (1,)

FUNCTIONS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("tanh", "sigmoid", "atan", "arctan", "erf", "rsqrt", "reciprocal"), _FIRST),
    **dict.fromkeys(("clamp", "clip", "clamp_max", "hardtanh", "nan_to_num"), _FIRST),
    **dict.fromkeys(
        ("relu6", "hardsigmoid", "masked_fill", "masked_scatter", "__setitem__"), _FIRST
    ),
    **dict.fromkeys(
        ("index_put", "threshold", "elu", "selu", "celu", "softplus", "logsigmoid"), _FIRST
    ),
    **dict.fromkeys(("argmax", "argmin", "argsort", "sort", "topk", "bucketize", "amin"), _FIRST),
    **dict.fromkeys(("isfinite", "isinf", "isposinf", "isnan", "nansum", "nanmean"), _FIRST),
    **dict.fromkeys(("pow", "__pow__", "float_power"), _FIRST),
    **dict.fromkeys(("int", "long", "short", "to", "type"), _FIRST),
    **dict.fromkeys(("atan2", "arctan2", "minimum", "maximum", "min", "fmin", "fmax"), _BOTH),
    **dict.fromkeys(("heaviside", "gt", "lt", "ge", "le"), _BOTH),
    **dict.fromkeys(("__gt__", "__lt__", "__ge__", "__le__"), _BOTH),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _SECOND),
    **dict.fromkeys(("floor_divide", "__floordiv__"), _SECOND),
    "where": (0, 1, 2),
}
"""Function or method → positions of the arguments whose infinities it hides."""

_ELSEWHERE = (
    *((functional, name, name) for name in ("hardtanh", "relu6", "hardsigmoid", "threshold")),
    *((functional, name, name) for name in ("elu", "selu", "celu", "softplus", "logsigmoid")),
    *((torch.special, "expit", "sigmoid"), (torch.special, "erf", "erf")),
)
"""Other places of these functions: Python module, name there, and the name in `FUNCTIONS`."""

_MASKED = (
    *("where", "clamp", "clip", "clamp_max", "minimum", "maximum", "nan_to_num"),
    *("masked_fill", "masked_scatter", "index_put", "__setitem__", "min", "amin", "fmin", "fmax"),
    *("argmax", "argmin", "argsort", "sort", "topk", "bucketize"),
    *("isfinite", "isinf", "isposinf", "isnan"),
    *("heaviside", "gt", "lt", "ge", "le", "__gt__", "__lt__", "__ge__", "__le__"),
)
_POWERS = ("pow", "__pow__", "float_power")
_CASTS = ("to", "type")
_WHOLE_NAMES = ("int", "long", "short")
_WHOLE = {
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}
_NAN_TOO = (
    *("nan_to_num", "nansum", "nanmean", "where", "masked_fill", "masked_scatter", "index_put"),
    *("__setitem__", "isfinite", "isnan", "fmin", "fmax", "heaviside"),
    *("argmax", "argmin", "argsort", "sort", "topk", "bucketize"),
    *("gt", "lt", "ge", "le", "__gt__", "__lt__", "__ge__", "__le__"),
)
"""Functions that don't return NaN for NaN."""
_LEAST_BOUND = -1e4
"""A clamp's limit below this value belongs to a mask."""


class _Thread(threading.local):
    note: Note | None = None
    is_wide: bool = False


_thread = _Thread()
_patches = Patches()
_watchers = 0


@contextlib.contextmanager
def noting_hidden(note: Note, *, is_wide: bool = False) -> Iterator[None]:
    """Call `note` for each operation of this thread inside the block that may turn Inf into a finite value.

    Args:
        note: receives the operation's name and a flag tensor, large or infinite if it hid a value.
        is_wide: watch tensors of any floating dtype, not only fp16.
    """
    global _watchers
    with CHANGING:
        if not _watchers:
            _put_on()
        _watchers += 1
    before = _thread.note, _thread.is_wide
    _thread.note, _thread.is_wide = note, is_wide
    try:
        yield
    finally:
        _thread.note, _thread.is_wide = before
        with CHANGING:
            _watchers -= 1
            if not _watchers:
                _patches.undo()


def load_compiler() -> None:
    """Import PyTorch's compiler while none of PyTorch's functions is replaced by a watched one.

    At its import the compiler stores the functions in a table. If replaced ones were in it, the graphs of
    code that is compiled later would break. Dispatch modes import the compiler, so call this before one is
    used.
    """
    with CHANGING:
        if "torch._dynamo" in sys.modules:
            return
        _patches.undo()
        try:
            importlib.import_module("torch._dynamo")
        finally:
            if _watchers:
                _put_on()


def _put_on() -> None:
    for name in FUNCTIONS:
        if callable(vars(torch).get(name)):  # torch.int is a dtype
            _patches.set_attribute(torch, name, _watch(getattr(torch, name), name))
        for method in (name, f"{name}_"):
            if (function := getattr(torch.Tensor, method, None)) is not None:
                _patches.set_class_attribute(torch.Tensor, method, _watch(function, name))
    for module, name, known in _ELSEWHERE:
        _patches.set_attribute(module, name, _watch(getattr(module, name), known))


@functools.cache
def _watch(original: Any, name: str) -> Any:
    """Wrap a PyTorch function so that its inputs are checked for Inf; cached, so that compiled code
    stays valid.

    Args:
        name: the function's name in `FUNCTIONS`.
    """
    positions, is_masked = FUNCTIONS[name], name in _MASKED

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        note = _thread.note
        if note is not None and not is_traced():
            given = args if len(args) > positions[-1] else (*args, *kwargs.values())
            found = [given[i] for i in positions if i < len(given) and _is_watched(given[i])]
            if found and _hides(name, args, kwargs):
                _thread.note = None  # what looks at it is not looked at
                try:
                    for tensor in found:
                        _look(tensor, note, _read_bounds(args, kwargs), is_masked, name)
                finally:
                    _thread.note = note
        return original(*args, **kwargs)

    return call


def _hides(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation of this name, with these arguments, turns Inf into finite values."""
    if name in _CASTS:
        given = (*args[1:], *kwargs.values())
        return not _WHOLE.isdisjoint(x for x in given if isinstance(x, torch.dtype))
    if name in _POWERS:
        return min(_read_bounds(args, kwargs), default=0.0) < 0
    if name == "__setitem__":
        return isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
    if name == "index_put":
        places = args[1] if len(args) > 1 else kwargs.get("indices", ())
        return any(x is not None and x.dtype == torch.bool for x in places)
    return True


def _is_watched(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        return False
    is_wide = _thread.is_wide and value.is_floating_point() and value.itemsize > 1
    return is_wide or value.dtype == torch.float16


def _read_bounds(args: Any, kwargs: Mapping[str, Any]) -> list[float]:
    return [float(x) for x in (*args[1:], *kwargs.values()) if isinstance(x, int | float)]


def _look(
    tensor: torch.Tensor, note: Note, bounds: list[float], is_masked: bool, name: str
) -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return
    is_half = tensor.dtype == torch.float16
    if is_half and name == "nan_to_num" and any(abs(x) >= CLAMPED_FROM for x in bounds):
        note(name, tensor)  # NaN is one of an overflow as well
        return
    is_mask = is_masked and not (bounds and min(bounds) > _LEAST_BOUND and name != "where")
    values = tensor.detach()
    if name in (*_CASTS, *_WHOLE_NAMES):  # NaN has no whole number
        hit = ~torch.isfinite(values).all()
        if not is_half:  # -Inf is a logarithm of 0 there, as in T5's relative positions
            hit = (values.isnan() | torch.isposinf(values)).any()
    elif name in _NAN_TOO:
        hit = (values.isnan() | ((torch.isposinf if is_mask else torch.isinf)(values))).any()
    else:
        hit = (torch.isposinf if is_mask else torch.isinf)(values).any()
    note(name, hit * (2 * CLAMPED_FROM))
