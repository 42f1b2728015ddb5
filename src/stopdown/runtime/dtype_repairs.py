"""Repair a call that fails as its operands have different dtypes: cast the inputs of layers, and repeat it.

**Catches** linears, convolutions, layer and group norms that receive another floating dtype than their
weight's.

**Does not catch** products of two activations of different dtypes, compiled code, calls that compute
gradients, calls of several processes, and calls that write into their arguments, a cache or their module,
which can't be repeated. The program's own error is then raised, with a note.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stopdown.component_call_names import name_module_path
from stopdown.component_calls.components import read_precisions
from stopdown.diagnosis.texts import REFUSALS
from stopdown.errors import take_first_line
from stopdown.interception.arguments import count_writes
from stopdown.interception.module_paths import OWN_ATTRIBUTES
from stopdown.interception.randomness import save_random
from stopdown.module_calls.mixed_dtypes import NO_OPERANDS, find_operands
from stopdown.module_calls.step_caches import clear_caches
from stopdown.number_formats import name_dtype
from stopdown.numerics import iterate_tensors
from stopdown.records import Operands, Repair
from stopdown.runtime.fault_texts import Fault
from stopdown.runtime.repairs import cast_inputs, is_cast_of_inputs


def add_note(error: BaseException, text: str) -> None:
    """Add a sentence of Stopdown's to an error, to be shown below its traceback; a repeated one isn't
    added.
    """
    note = f"Stopdown: {text}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def describe_refusal(error: Exception, component: str, module: torch.nn.Module) -> str:
    """Describe the module in which a call failed on operands of different dtypes, and how to fix it,
    for a note.

    Args:
        component: name of the call.
    """
    names = {id(part): (path, part) for path, part in module.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    path, part = ([names[id(x)] for x in running if id(x) in names] or [("", module)])[-1]
    formats = " and ".join(name_dtype(x) for x in read_precisions(part))
    return (
        f"{name_module_path(component, path)}{f', whose weights are {formats},' if formats else ''} "
        "rejected operands of different dtypes. If you run a script, use stopdown run --precision fp32. In "
        "Python, cast with stopdown.mend."
    )


def repair_refusal(
    fault: Fault, error: Exception, device: torch.device
) -> tuple[object, Repair | None] | None:
    """Repeat a call that failed on operands of different dtypes, with casts of its layers' inputs.

    Args:
        device: that computes the call.

    Returns:
        The output and the repair, which is None if another thread has added the casts in the meantime; None
        if no casts help.
    """
    begun, guarded = time.perf_counter(), fault.guarded
    state, latest, module = guarded.state, guarded.latest, guarded.module
    if latest.call is None:
        return None
    given = (latest.call.args, latest.call.kwargs)
    if not all(map(_is_plain, pytree.tree_leaves(given))):
        return None
    restore_now = save_random(device, pytree.tree_leaves(given))
    before = state.applied

    def repeat() -> object:
        latest.restore()
        return fault.call.proceed()

    try:
        if any(map(is_cast_of_inputs, before)):
            with contextlib.suppress(*REFUSALS):
                return repeat(), None
        operands = _find_operands(repeat, module, given)
        if operands != NO_OPERANDS:
            state.put_on((*before, cast_inputs(operands)))
            clear_caches(module)
            return repeat(), _describe(fault, error, operands, time.perf_counter() - begun)
    except Exception:  # another operation refuses too: the first error is the program's own
        state.put_on(before)
    restore_now()
    return None


def _find_operands(repeat: Callable[[], object], module: torch.nn.Module, given: Any) -> Operands:
    """Find, by repeating a failed call, the casts that give each operation's operands one dtype.

    If the repeat changes its arguments or the module, restore their tensors and return no casts.
    """
    tensors = [*module.buffers(), *iterate_tensors(given)]
    values = [x.clone() for x in tensors]
    marks = _mark(module, given)
    operands = find_operands(repeat, module)
    if _mark(module, given) == marks:
        return operands
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
    return NO_OPERANDS


def _is_plain(value: object) -> bool:
    """Return whether an argument holds no state between calls, unlike a cache."""
    kinds = (
        torch.Tensor,
        torch.Generator,
        torch.dtype,
        torch.device,
        Number,
        Enum,
        str,
        bytes,
        tuple,
    )
    return value is None or isinstance(value, kinds) or callable(value)


def _mark(module: torch.nn.Module, given: Any) -> list[tuple[object, ...]]:
    """Return a key that changes if a call writes to tensors, module attributes or containers among its
    arguments.
    """
    tensors = [*module.buffers(), *iterate_tensors(given)]
    marks: list[tuple[object, ...]] = [(id(x), count_writes(x)) for x in tensors]
    for part in module.modules():
        marks += [
            (name, id(x), _measure(x))
            for name, x in vars(part).items()
            if name not in OWN_ATTRIBUTES
        ]
    return [*marks, (_measure(given),)]


def _measure(value: object) -> object:
    """Return the nesting and lengths of containers as tuples, to notice that one was filled; other
    values become 0.
    """
    if isinstance(value, Mapping):
        return tuple(map(_measure, value.values()))
    return tuple(map(_measure, value)) if isinstance(value, list | tuple | deque) else 0


def _describe(fault: Fault, error: Exception, operands: Operands, elapsed_s: float) -> Repair:
    wide = (name.rpartition(".")[0] for name in operands.fp32_parameters)
    paths = tuple(dict.fromkeys((*operands.cast_inputs, *wide)))
    is_one = len(paths) == 1
    return Repair(
        component=fault.component,
        module_path=name_module_path(fault.component, paths[0]),
        kind="dtypes",
        step=fault.step,
        evidence=f'`{fault.component}` stopped{fault.place}: "{take_first_line(error)}".',
        action="cast-inputs",
        reason=f"{paths[0] or 'It'} got an input whose dtype differs from that of its weight."
        if is_one
        else f"{len(paths)} layers got inputs whose dtype differs from that of their weights. The first is "
        f"{paths[0]}.",
        replays=1,
        elapsed_s=elapsed_s,
    )
