"""Check one call: whether what a component returned, and what it was given, is finite.

Of each output the smallest and the largest value are found on the device and read once; NaN and Inf
travel, so the output of a call is the only cut that is needed to know that they exist. Where the authors
of a class clamp its values at fp16's maximum (T5, CogView3-Plus, Flux), the outputs of those
modules are bounded as well, because a clamp hides an overflow; they are read with the same transfer, and
so are the arguments, and those of every block where that is asked for (`activation_maxima`).

**Catches** NaN and +-Inf in any floating tensor or array that a component returns, and in tensors it is
called with; in fp16, values that a clamp at the maximum changed.
**Does not catch** values that a softmax inside the component made finite, or a result that is finite and
wrong for another reason; the finished frames are looked at by `frame_faults`.
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
    """What one call showed.

    Attributes:
        is_finite: no value that it returned is NaN or Inf.
        clamped: modules that clamped what was not finite, and operations that hid it
            (`tanh()`) where the result is finite.
        inputs: arguments that were not finite; a mask may hold -Inf.
        is_seen: it returned tensors that could be looked at.
        maxima: path, dtype and largest magnitude of each block's output; NaN and Inf are infinite.
        limited: name, limit and largest magnitude of each argument that has a limit.
        headroom_bits: least between a finite output in fp16 and fp16's maximum; None without one.
        beside: operations that hid something where the result shows something else that is not finite.
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
        """Whether the only findings are operations that made finite values of Inf."""
        return self.is_finite and bool(self.clamped) and all(map(is_operation, self.clamped))


def is_operation(path: str) -> bool:
    """Return whether a path names an operation and not a module."""
    return path.endswith("()")


def check_call(notes: Notes, output: Any) -> CallCheck:
    """Check the values of a call's output and arguments.

    Args:
        notes: the bounds of its modules and arguments; they are forgotten.

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
    """List the floating values in a call's output as readable tensors.

    Parts of complex tensors and arrays are among them; numbers if there is nothing else.
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
    return [torch.tensor(numbers, dtype=torch.float64)] if numbers else found


def is_opaque(output: Any) -> bool:
    """Return whether an output holds an unreadable part: a generator, a function, a sparse tensor."""
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
