"""What the guards of several ranks decide together: whether a call failed, where it began, what is tried.

Each rank checks its own output. One all_reduce a call makes what one rank saw known to all before any of
them decides, so all of them run the call again, in step, and put the same repair on. Where a fault began is
looked for on every rank; the earliest operation is the culprit, and its rank tells the others.

**Catches** faults of one rank alone; ranks that began from other noise.
**Does not catch** ranks whose finite values differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from stopdown.component_calls.call import ComponentCall
from stopdown.component_calls.components import find_components, read_precisions
from stopdown.devices.environment import describe_machine
from stopdown.errors import InputError
from stopdown.number_formats import name_dtype
from stopdown.numerics import count_non_finite, iterate_tensors
from stopdown.parallel.ranks import Ranks, find_group
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import Plan
from stopdown.runtime.call_check import CallCheck
from stopdown.runtime.culprit import Culprit
from stopdown.runtime.fault_texts import Fault, name_fault

_SAMPLE, _TOLERANCE = 1024, 0.01
"""Values of the noise that are compared, and how far they may lie apart: sums may round otherwise."""


def find_ranks(pipe: Any) -> Ranks | None:
    """The ranks over which calls of a pipeline are spread; None for a process alone, which pays nothing."""
    group = find_group(pipe)
    return None if group is None else Ranks(*group)


def agree_on_check(ranks: Ranks, check: CallCheck) -> CallCheck:
    """What a call showed on any rank.

    Cost: one all_reduce of three integers; names are gathered only when one of them is set.
    """
    seen = (not check.is_finite, bool(check.clamped), bool(check.inputs))
    is_bad, is_clamped, is_spoilt = ranks.agree(*seen)
    if not (is_bad or is_clamped or is_spoilt):
        return check
    named = ranks.gather((check.clamped, check.inputs))
    return dataclasses.replace(
        check,
        is_finite=not is_bad,
        clamped=tuple(dict.fromkeys(name for clamped, _ in named for name in clamped)),
        inputs=tuple(dict.fromkeys(name for _, inputs in named for name in inputs)),
    )


def agree_on_fault(ranks: Ranks, fault: Fault) -> Fault:
    """A fault in the words of the first rank that has it."""
    outputs = [x for x in iterate_tensors(fault.output) if x.is_floating_point()]
    is_mine = bool(fault.check.clamped) or any(sum(count_non_finite(x)) for x in outputs)
    told = ranks.gather(name_fault(fault) if is_mine and not fault.check.is_good else "")
    having = [number for number, text in enumerate(told) if text]
    if not having:
        return fault
    found = told[having[0]]
    if len(having) < ranks.count:
        found += f" It was so on rank{'s' * (len(having) > 1)} {', '.join(map(str, having))} alone."
    return dataclasses.replace(fault, found=found)


def agree_on_culprit(ranks: Ranks, culprit: Culprit) -> Culprit:
    """Where a fault began: the earliest operation that any rank found."""
    found = ranks.gather(culprit)
    return min(found, key=lambda one: (one.kind == "intermittent", one.order))


def refuse_other_runs(ranks: Ranks, pipe: Any, plan: Plan | None) -> None:
    """Refuse ranks with another plan, model, precision or version than rank 0; compared once.

    Raises:
        InputError: on every rank; it names each difference.
    """
    described: dict[str, Any] = {"plan": plan.seal if plan is not None else None}
    described |= {"pipeline": type(pipe).__name__, "versions": describe_machine()["versions"]}
    for name, module in find_components(pipe).items():
        precisions = [name_dtype(dtype) for dtype in read_precisions(module)]
        described |= {
            f"{name}'s precision": precisions,
            f"{name}'s weights": sample_weights(module),
        }
    ranks.refuse_differences(
        "plan or model", described, "Start every rank with the same files, options and packages."
    )


def refuse_other_noise(ranks: Ranks, call: ComponentCall) -> None:
    """Refuse ranks whose first step begins from something else than that of rank 0.

    Raises:
        InputError: on every rank; it names those that differ.
    """
    tensors = (
        x
        for x in iterate_tensors((call.args, call.kwargs))
        if x.is_floating_point() and x.dim() > 1
    )
    values = next(tensors, torch.zeros(1)).detach().flatten()
    mine = values[:: max(1, values.numel() // _SAMPLE)][:_SAMPLE].float().cpu()
    first, *others = ranks.gather(mine)
    reach = float(first.abs().max()) * _TOLERANCE
    differing = [
        number
        for number, other in enumerate(others, 1)
        if other.shape != first.shape or float((other - first).abs().max()) > reach
    ]
    if differing:
        error = InputError(
            f"Rank{'s' * (len(differing) > 1)} {', '.join(map(str, differing))} of {ranks.count} began "
            "from other noise than rank 0.",
            expected="Ranks that make one output together begin from the same values.",
            remedy="Give each rank a generator of the same seed: torch.Generator().manual_seed(0).",
        )
        raise ranks.told_by_first(error)
