"""Decide after each component call whether its output and its arguments are finite, with one read of
the device.

The smallest and the largest value of each output are computed on the device and read at once. NaN and Inf
propagate, so checking the output is enough to detect them. If the authors of a class clamp its activations
at fp16's maximum (T5, CogView3-Plus, Flux), the outputs of those modules are checked as well, because a
clamp hides an overflow. Their ranges are read in the same transfer, and so are those of the arguments and,
on request, of every block (`activation_maxima`).

**Catches** NaN and ±Inf in any floating tensor or array that a component returns or receives; in fp16,
values that a clamp at the maximum changed.

**Does not catch** values that a softmax inside the component made finite, or a result that is finite and
wrong for another reason; `frame_faults` checks the finished frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stopdown.module_calls.call import find_meant
from stopdown.numerics import bound_values, headroom_bits, is_readable, iterate_leaves
from stopdown.runtime.activation_maxima import CLAMPED_FROM, Notes


@dataclass(frozen=True)
class CallCheck:
    """The result of checking one call.

    Attributes:
        is_finite: whether no returned value is NaN or Inf.
        clamped: paths of modules that clamped an overflow, and if the output is finite, operations that
            hid one (`tanh()`).
        inputs: names of arguments with NaN or Inf; -Inf is allowed in masks.
        is_seen: whether the output contained tensors that could be checked.
        host_reads: number of reads of device values.
        maxima: path, dtype and largest magnitude of each block's output; Inf for NaN and Inf.
        limited: name, limit and largest magnitude of each argument with a limit.
        headroom_bits: log2(65504 / largest magnitude) of the finite fp16 outputs; None without any.
        beside: if the output isn't finite, operations that hid values as well.
    """

    is_finite: bool = True
    clamped: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    is_seen: bool = True
    host_reads: int = 0
    maxima: tuple[tuple[str, torch.dtype, float], ...] = ()
    limited: tuple[tuple[str, float, float], ...] = ()
    headroom_bits: float | None = None
    beside: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether the run can go on with the output."""
        return self.is_finite and not self.clamped

    @property
    def is_hidden(self) -> bool:
        """Whether the only findings are operations that turned Inf into finite values."""
        return self.is_finite and bool(self.clamped) and all(map(is_operation, self.clamped))


def is_operation(path: str) -> bool:
    """Return whether an entry of `CallCheck.clamped` names an operation (`tanh()`), not a module."""
    return path.endswith("()")


def check_call(notes: Notes, output: Any) -> CallCheck:
    """Check whether the values of a call's output and arguments are finite, and whether a clamp hid an
    overflow.

    Args:
        notes: recorded ranges of the component's modules and arguments; they are cleared.

    Cost: two operations, one for each note, and one host read.
    """
    outputs = list_readable(output)
    bounds = bound_values(outputs, notes.bounds)
    if bounds is None:
        return CallCheck(is_seen=False)
    values = iter(bounds.tolist())
    pairs = zip(values, values, strict=True)  # low and high in turns
    ends = [(output.dtype, *next(pairs)) for output in outputs]
    is_finite = all([_is_finite(low, high) for _, low, high in ends])
    clamped = [
        path  # the output of a module that clamps, where NaN stays; or what `nan_to_num()` is given
        for path, _ in notes.clamping
        if (_end if is_operation(path) else _amax)(*next(pairs)) >= CLAMPED_FROM
    ]
    beside = () if is_finite else tuple(filter(is_operation, clamped))
    if not is_finite:  # what shows is not hidden
        clamped = [path for path in clamped if not is_operation(path)]
    maxima = [(path, dtype, _end(*next(pairs))) for path, dtype, _ in notes.blocks]
    given = [(name, limit, *next(pairs)) for name, limit, _ in notes.inputs]
    spoilt = [x for x, _, *ends in given if not all(find_meant(x, end) for end in ends)]
    limited = [(n, limit, _amax(*bound)) for n, limit, *bound in given if limit is not None]
    largest = max((_amax(*end) for dtype, *end in ends if dtype == torch.float16), default=0.0)
    room = headroom_bits(largest, torch.float16) if is_finite and largest > 0 else None
    notes.clear()
    return CallCheck(
        is_finite,
        tuple(clamped),
        tuple(dict.fromkeys(spoilt)),
        bool(outputs),
        1,
        tuple(maxima),
        tuple(limited),
        room,
        beside,
    )


def list_readable(output: Any) -> list[torch.Tensor]:
    """List the floating values in a call's output as real tensors that can be checked.

    Complex tensors and NumPy arrays are converted; Python floats are included only if there is nothing
    else.
    """
    found = list[torch.Tensor]()
    for leaf in iterate_leaves(output, (torch.Tensor, np.ndarray)):
        if isinstance(leaf, np.ndarray):
            if leaf.dtype in (np.float16, np.float32, np.float64) and leaf.size:
                found.append(torch.from_numpy(np.ascontiguousarray(leaf)))
            continue
        tensor = leaf.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if is_readable(tensor):
            found.append(tensor)
    numbers = [] if found else list(iterate_leaves(output, (float,)))
    return [torch.tensor(numbers, dtype=torch.float64, device="cpu")] if numbers else found


def is_opaque(output: Any) -> bool:
    """Return whether part of an output can't be checked for NaN: a generator, a function, a sparse
    tensor.
    """
    plain = (torch.Tensor, np.ndarray, bool, int, float, str, bytes, type(None))
    if isinstance(output, torch.Tensor):
        return output.layout is not torch.strided
    if isinstance(output, (list, tuple, set, dict)):
        return any(map(is_opaque, output.values() if isinstance(output, dict) else output))
    return not isinstance(output, plain) and not any(True for _ in iterate_leaves(output, plain))


def _is_finite(low: float, high: float) -> bool:
    return math.isfinite(low) and math.isfinite(high)


def _amax(low: float, high: float) -> float:
    return max(-low, high)


def _end(low: float, high: float) -> float:
    return _amax(low, high) if math.isfinite(_amax(low, high)) else math.inf
