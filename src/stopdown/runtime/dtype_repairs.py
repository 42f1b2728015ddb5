"""Answer a call that refuses operands of two dtypes: cast what reaches its layers, run the call again.

**Catches** linears, convolutions, layer and group norms that get another floating dtype than their
weight has.
**Does not catch** products of two values of different dtypes, compiled code, calls that compute gradients,
and calls that several ranks make together. The error is then the program's own, with a note.
"""

from __future__ import annotations

import time
import traceback

import torch

from stopdown.call_names import name_module_path
from stopdown.diagnosis import explain_text
from stopdown.errors import take_first_line
from stopdown.graph.mixed_dtypes import NO_OPERANDS, find_operands
from stopdown.number_formats import name_dtype
from stopdown.pipelines.components import read_precisions
from stopdown.pipelines.step_caches import clear_caches
from stopdown.records import Operands, Repair
from stopdown.runtime.fault_texts import Fault
from stopdown.runtime.repairs import Adjustment

REFUSALS = (RuntimeError, TypeError, ValueError)
"""What torch, and kernels that are called in its place, raise at operands of two dtypes."""


def is_refusal(error: Exception) -> bool:
    """Whether an error says that the operands of one operation have different dtypes."""
    return explain_text(f"{type(error).__name__}: {error}").fault == "dtype-mismatch"


def add_note(error: Exception, component: str, module: torch.nn.Module) -> None:
    """Let a traceback end with the module that refused, and what helps; a second call does nothing."""
    note = f"Stopdown: {_describe_refusal(error, component, module)}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _describe_refusal(error: Exception, component: str, module: torch.nn.Module) -> str:
    """Which module refused its operands, the innermost of the traceback, and what helps."""
    names = {id(part): (path, part) for path, part in module.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    path, part = ([names[id(x)] for x in running if id(x) in names] or [("", module)])[-1]
    formats = " and ".join(name_dtype(x) for x in read_precisions(part))
    return (
        f"{name_module_path(component, path)}{f', whose weights are {formats},' if formats else ''} "
        "refused operands of two dtypes. Run a script with stopdown run --precision fp32, or cast what "
        "differs with stopdown.mend in Python."
    )


def repair_refusal(fault: Fault, error: Exception) -> tuple[object, Repair] | None:
    """The output of a refused call, made again with casts in front of its layers; None where none helps."""
    begun, state = time.perf_counter(), fault.guarded.state
    before = state.applied
    fault.guarded.latest.restore()
    operands = find_operands(fault.repeat, fault.guarded.module)
    if operands == NO_OPERANDS:
        return None
    state.put_on((*before, Adjustment("cast-inputs", fault.precision, operands=operands)))
    fault.guarded.latest.restore()
    clear_caches(fault.guarded.module)
    try:
        output = fault.repeat()
    except Exception:  # another operation refuses too: the first error is the program's own
        state.put_on(before)
        return None
    return output, _describe(fault, error, operands, time.perf_counter() - begun)


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
        reason=f"{paths[0]} got another dtype than its weight has."
        if is_one
        else f"{len(paths)} layers got another dtype than their weights have, the first is {paths[0]}.",
        replays=1,
        elapsed_s=elapsed_s,
    )
