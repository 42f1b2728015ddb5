"""`measure_plan`: find how each component of a program can run in fp16, by running the program in fp32.

The program runs once; the arguments of its components' calls are kept (`call_recorder`), and exponents
are found for one component after the other (`exponents`). What cannot be captured or scaled falls back
to bf16 where that is native, else fp32, with the reason.

Not covered: larger activations in other calls. The plan is calibrated, not certified, and a run under it is
watched. Pipelines and checkpoints get certified plans (`certified`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stopdown.argument_types import check_ranges, check_residual
from stopdown.component_calls.components import (
    explain_run,
    find_component,
    find_components,
    find_device,
    read_precisions,
)
from stopdown.devices.device_choice import Device, choose_device
from stopdown.devices.format_support import probe_formats
from stopdown.interception.patches import Patches
from stopdown.module_calls.module_code import list_foreign_code
from stopdown.number_formats import FP16, format_figure, name_dtype
from stopdown.plans.call_recorder import (
    record_run,
)
from stopdown.plans.exponents import describe_unscaled, scale_component
from stopdown.plans.plan_files import read_class_versions, seal_plan
from stopdown.plans.precision import ComponentFacts, choose_precision
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.scaling import ComponentCall, cast_, read_headroom
from stopdown.scaling_records import describe_trial
from stopdown.weight_checks import find_quantised


def measure_plan(
    program: Any,
    run: Callable[[], Any],
    *,
    residual: str | None = None,
    ranges: str | None = None,
) -> Plan:
    """Find how each component that a run calls can run in fp16, by running it in fp32.

    Args:
        program: as `guard` takes it; its weights are cast to fp32 for the measurement, and back.
        run: runs the program once.
        residual: as of `make_plan`, but `native` by default: whoever calls a module may look at the
            dtypes of its parameters and outputs.
        ranges: `measured`, or bounds besides: `auto` where they cost nothing, `bound` wherever it can.

    Each component's exponents are tried before they are believed: bit for bit the same in fp32, and run
    once in fp16 as planned. The next strategy is taken if that fails: without an fp32 residual stream,
    as far as hooks show that fp16 does, bf16 or fp32; `reasons` say why, and `trial` how near it was.

    Raises:
        OptionError: the run calls no module of the program.

    Cost: the run in fp32, and for each component captures of seconds and about as many forwards again as
    calls were kept.
    """
    started = time.perf_counter()
    how = check_residual(residual), check_ranges(ranges)
    device, name = choose_device(find_device(program)), type(program).__name__
    stored = {name: _count_bytes(module) for name, module in find_components(program).items()}
    with Patches() as patches:
        _widen(program, patches)
        recorded = {name: calls for name, calls in record_run(program, run).items() if calls}
        found = {name: find_component(program, name) for name in recorded}
        modules = {name: module for name, module in found.items() if module is not None}
        if not modules:
            raise explain_run(f"The run called no module of the {name}.", "make_plan")
        made = [
            _plan_component(name, module, recorded[name], how, stored, device)
            for name, module in modules.items()
        ]
    return seal_made((name, "", name), made, started, device)


def seal_made(
    known: tuple[str, str, str],
    components: Sequence[ComponentPlan],
    started: float,
    device: Device,
) -> Plan:
    """Assemble a plan from its components' entries, and seal it with a checksum.

    Args:
        known: name of the source, its fingerprint and its pipeline's class.
        started: `time.perf_counter` when the planning began.
    """
    made = Plan(
        *known,
        precision=FP16.name,
        versions=read_class_versions(),
        components=tuple(components),
        device=str(device),
        elapsed_s=round(time.perf_counter() - started, 3),
    )
    return seal_plan(made)


def _count_bytes(module: torch.nn.Module) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tensor in module.parameters():
        name = name_dtype(tensor.dtype)
        counts[name] = counts.get(name, 0) + tensor.nbytes
    return counts


def _widen(pipe: Any, patches: Patches) -> None:
    """Cast a program's weights to fp32 for a measurement, until `patches` is undone; quantised ones are
    left alone.
    """
    for module in find_components(pipe).values():
        if not find_quantised(module) and set(read_precisions(module)) - {torch.float32}:
            patches.defer(cast_(module, torch.float32).undo)


def _plan_component(
    name: str,
    module: torch.nn.Module,
    calls: Sequence[ComponentCall],
    how: tuple[str, str],
    stored: Mapping[str, Mapping[str, int]],
    device: Device,
) -> ComponentPlan:
    """Find how one component can run in fp16, from its recorded calls; if it can't, fall back to bf16
    or fp32.

    Args:
        how: `residual` and `ranges` of `measure_plan`.
        stored: component → format → bytes of its weights.
    """
    weights, code = sample_weights(module), list_foreign_code(module)
    bare = ComponentPlan(name, type(module).__name__, weights, "fp32", code=code)
    if method := find_quantised(module):
        why = f"Its weights are quantised ({method}); they are left alone."
        return dataclasses.replace(bare, precision="as loaded", reasons=(why,))
    try:
        scaling, notes = scale_component(module, calls, *how)
    except Exception as error:  # whatever a model's code does: it falls back, and the plan says why
        why = describe_unscaled(error)
        return fall_back(bare, stored, why, device, _REFERENCE)
    return describe_scaling(bare, scaling, FP16.name, len(calls), notes)


_REFERENCE = "fp32 is the reference."


def fall_back(
    bare: ComponentPlan,
    stored: Mapping[str, Mapping[str, int]],
    why: str,
    device: Device | None,
    otherwise: str = "",
) -> ComponentPlan:
    """Return the entry of a component that can't run in fp16: in bf16 if its weights are stored so,
    else in fp32.

    It is in fp32 too if the device computes slowly in bf16.

    Args:
        bare: the entry without a precision.
        stored: component → format → bytes of its weights.
        why: the reason, in a sentence.
        otherwise: further reason if it is in fp32.
    """
    counts = stored.get(bare.component, stored.get("checkpoint", {}))
    facts = ComponentFacts(bare.component, (bare.component,), counts)
    precision, reason = "fp32", otherwise
    if facts.stored_mostly == "bf16":
        precision, reason = (
            choose_precision(facts, probe_formats(device)) if device else ("bf16", "")
        )
    return dataclasses.replace(
        bare, precision=precision, reasons=tuple(filter(None, (why, reason)))
    )


def describe_scaling(
    bare: ComponentPlan,
    scaling: Scaling,
    precision: str,
    calls: int,
    notes: tuple[str, ...] = (),
) -> ComponentPlan:
    """Return a component's plan entry with its exponents, and sentences that explain them to people.

    Args:
        bare: the entry without them.
        calls: number of measured calls; 0 if the exponents come from bounds.
        notes: further sentences.
    """
    if not scaling.range_note:  # no bounds were requested: everything would be uncertain
        scaling = dataclasses.replace(
            scaling, values=0, bounded=0, uncertain=(), measured_bits=None
        )
    headroom = read_headroom(scaling)
    scaling = dataclasses.replace(
        scaling,
        headroom_bits=round(headroom, 3) if math.isfinite(headroom) else None,
        uncertain=tuple(dict.fromkeys(scaling.uncertain)),
        measured_bits=None if scaling.measured_bits is None else round(scaling.measured_bits, 3),
    )
    said = [x for x in (scaling.range_note, scaling.note, *notes) if x]
    reasons = (*_list_reasons(scaling, calls), *said)
    return dataclasses.replace(
        bare, precision=precision, scaling=scaling, calls=calls, reasons=reasons
    )


def _list_reasons(scaling: Scaling, calls: int) -> list[str]:
    reasons = []
    if scaling.headroom_bits is not None:
        basis = f"In {calls} measured calls" if calls else "Proven from the weights"
        which = "fp16" if calls or not scaling.uncertain else "certified"
        factor = format_figure(2.0**scaling.headroom_bits)
        closest = scaling.tightest.replace(": (", " (")  # the component's own path is empty
        reasons.append(
            f"{basis}: no {which} activation comes within a factor of {factor} of fp16's maximum "
            f"({scaling.headroom_bits:.1f} bits of headroom). Closest: {closest}."
        )
    if scaling.exponents:
        reasons.append(f"To achieve this, {count_folds(scaling)}.")
    else:
        reasons.append("No weight had to be scaled.")
    if scaling.fp32_modules:
        share = f"{100 * scaling.fp32_flops:.1f} % of the matmul work"
        reasons.append(
            f"{', '.join(scaling.fp32_modules)} can't be scaled and stay in fp32: {share}."
        )
    if scaling.outputs:
        numbers = ", ".join(map(str, scaling.outputs))
        reasons.append(f"Its output {numbers} exceeds fp16's maximum and stays in fp32.")
    if scaling.stream is not None and scaling.stream.cast_output_down:
        share = f", except for {100 * scaling.fp32_flops:.1f} % of that work"
        reasons.append(
            f"Inside {', '.join(scaling.stream.cast_output_down)} sums are fp32, because nothing "
            "there can be scaled; matrix products run in "
            f"fp16{share if scaling.fp32_flops else ''}."
        )
    elif scaling.stream is not None:
        count = len(scaling.stream.cast_output_up)
        reasons.append(
            f"The residual stream stays in fp32 ({count} module{'s' * (count != 1)} "
            f"write{'s' * (count == 1)} to it); large matrix products run in fp16."
        )
    if scaling.trial is not None:
        tried = scaling.trial.calls or not scaling.trial.note
        reasons += [f"{describe_trial(scaling.trial).capitalize()}."] if tried else []
        reasons.append(scaling.trial.note)
    if scaling.pinned:
        reasons.append(
            "Left unchanged because there is no rule for them: "
            f"{', '.join(sorted(scaling.pinned))}."
        )
    return [reason for reason in reasons if reason]


def count_folds(scaling: Scaling) -> str:
    """Describe how many tensors a scaling scales, as `41 tensors are scaled by 2^-6 to 2^3`."""
    if not scaling.exponents:
        return "no tensor is scaled"
    tensors = {name.partition("[")[0] for name in scaling.exponents}
    low, high = min(scaling.exponents.values()), max(scaling.exponents.values())
    noun = "tensor is" if len(tensors) == 1 else "tensors are"
    span = f"2^{low}" if low == high else f"2^{low} to 2^{high}"
    return f"{len(tensors)} {noun} scaled by {span}"
