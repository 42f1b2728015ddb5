"""Tell a fault of the model from a fault of the session that runs it.

A model that overflows does so every time: the same weights and arguments give the same result. When a call
gave NaN, or a finished picture is black, its weights are compared with those at its first call, and
the call is run again on the same arguments.

**Catches** weights that changed since the first call; weights that were others during the call and are back
since; a call whose result is another one when it is run again.
**Does not catch** weights that were wrong from the start, and what `weight_history` does not; a fault that
comes every time (`culprit` computes the operation elsewhere); arguments that a component changed in place.
Runs on several ranks are not examined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from stopdown.interception.randomness import save_random
from stopdown.numerics import bound_values, iterate_tensors
from stopdown.records import Finding
from stopdown.runtime.guarded_call import GuardedCall
from stopdown.runtime.weight_history import WeightHistory

_LEAST_DIFFERENCE = 0.1
"""Share of a result by which two runs differ when something is wrong. Sums in another order, as some
kernels take them, differ by less than 0.01 in 16 bits.
"""

_MOST_NAMES = 3

WRONG_PICTURES = ("black-frames", "grey-frames", "flat-frames", "noise-frames")
"""Findings of finished pictures after which the calls are examined."""


def describe_changed(
    history: WeightHistory, module: torch.nn.Module, changed: list[str]
) -> Finding:
    who = (
        "The program itself wrote to them."
        if history.were_written(module, changed)
        else "Unless the program did that itself (it fused an adapter, or wrote to `.data`), something in "
        "this session overwrote them."
    )
    return Finding(
        "weights-changed",
        changed[0],
        f"{_name_weights(history, changed)} differ from what they were at the first call. {who}",
        "Load the model again in a new process. If that is right with the same seed, it was this session "
        "and not the model: run it without offload.",
    )


def _name_weights(history: WeightHistory, names: list[str]) -> str:
    named = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
    return f"{len(names)} of {len(history)} weights ({named})"


_LATE = (
    "Run without offload, or with use_stream=False. Update the program that moves the weights. "
    "`stopdown generate SOURCE PROMPT` in a new process shows whether the model is right."
)


def examine_fault(
    history: WeightHistory,
    module: torch.nn.Module,
    during: list[str],
    outputs: tuple[Any, Any],
) -> Finding | None:
    """What of a fault is the session's; None when the call gives the same result again.

    Args:
        during: weights that were found changed right after the call.
        outputs: what the call gave, and what it gave when it was run again.

    Cost: a pass over all weights and over the outputs.
    """
    changed = history.find_changed(module, whole=True)
    if changed:
        return describe_changed(history, module, changed)
    if not _differ(*outputs):
        return None
    if during:
        return Finding(
            "weights-late",
            during[0],
            f"{_name_weights(history, during)} had other values while the call ran, and now have those of "
            "the first call again: they were copied too late, or were overwritten for that time. The "
            "repeated call gave a different result.",
            _LATE,
        )
    return describe_difference(module)


def describe_difference(module: torch.nn.Module) -> Finding:
    hooks = ("_hf_hook", "_diffusers_hook")
    likely = (
        "Its weights are offloaded, so the likely cause is a copy that came too late"
        if any(hasattr(part, hook) for part in module.modules() for hook in hooks)
        else "The cause is a race condition, an unreliable kernel or faulty memory"
    )
    return Finding(
        "results-differ",
        "",
        "The same call, repeated with the same arguments and weights, gave different values. "
        f"{likely}, not the model.",
        _LATE,
    )


def _differ(first: Any, second: Any) -> bool:
    """Whether two results of one call differ by more than rounding.

    Cost: a few passes and two host reads a tensor.
    """
    pairs = zip(_floats(first), _floats(second), strict=False)
    return any(_differ_by_more(a, b) for a, b in pairs if a.shape == b.shape)


def _floats(value: Any) -> list[torch.Tensor]:
    return [x.detach() for x in iterate_tensors(value) if x.is_floating_point() and not x.is_meta]


def _differ_by_more(first: torch.Tensor, second: torch.Tensor) -> bool:
    good = [torch.isfinite(x) for x in (first, second)]
    if bool(good[0].all()) != bool(good[1].all()):
        return True
    both = good[0] & good[1]
    a, b = (torch.where(both, x.float(), 0.0).flatten() for x in (first, second))
    return bool((a - b).norm() > _LEAST_DIFFERENCE * torch.maximum(a.norm(), b.norm()))


def examine_calls(calls: Iterable[GuardedCall], pipe: Any) -> Iterator[Finding]:
    """What of a finished picture that is wrong is the session's: a finding for each component.

    Cost: the latest call of each once more, and a pass over all weights.
    """
    for call in calls:
        if call.latest.repeat is None:
            continue
        changed = call.state.weights.find_changed(call.module, whole=True)
        fault = describe_changed(call.state.weights, call.module, changed) if changed else None
        if fault is None and _gives_another(call, pipe):
            fault = describe_difference(call.module)
        if fault is not None:
            yield dataclasses.replace(fault, module_path=call.name)
    free = getattr(pipe, "maybe_free_model_hooks", None)
    if free is not None:  # weights that are offloaded wait again where they did
        free()


def _gives_another(call: GuardedCall, pipe: Any) -> bool:
    """Whether the latest call gives values of another range when it is run again.

    Of a finished call no more than the smallest and largest value of each tensor are kept.
    """
    latest, repeat = call.latest, call.latest.repeat
    if latest.call is None or repeat is None or repeat.has_changed or not repeat.ends:
        return False
    restore = save_random(call.find_device(pipe), latest.call.kwargs)
    latest.restore()
    try:
        with torch.no_grad():
            output = repeat.repeat()
    except Exception:  # what it needs is gone since: nothing can be said
        return False
    finally:
        call.state.notes.clear()
        restore()
    bounds = bound_values(_floats(output))
    now = bounds.tolist() if bounds is not None else []
    width = max((abs(x) for x in (*now, *repeat.ends)), default=0.0)
    return len(now) == len(repeat.ends) and any(
        abs(a - b) > _LEAST_DIFFERENCE * width for a, b in zip(now, repeat.ends, strict=True)
    )
