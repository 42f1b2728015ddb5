"""`measure_plan`: how each component of a checkpoint can run in fp16, found by running it in fp32.

The pipeline runs on a few prompts in fp32; the arguments of every component's calls are kept
(`call_recorder`), and exponents are found for one component after the other (`exponents`). What cannot
be captured or scaled falls back to bf16 where that is native, else fp32, with the reason.

Not covered: larger values under other prompts, sizes and steps: the plan is calibrated, not certified,
and a run under it is watched.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stopdown.argument_types import check_ranges, check_residual
from stopdown.component_calls.components import (
    explain_run,
    find_component,
    find_components,
    find_device,
    read_precisions,
    runs_by_call,
)
from stopdown.devices.device_choice import Device, choose_device, name_device
from stopdown.devices.format_support import probe_formats
from stopdown.errors import OptionError
from stopdown.interception.patches import Patches
from stopdown.memory.smaller_requests import choose_size
from stopdown.module_calls.module_code import list_foreign_code
from stopdown.number_formats import FP16, format_figure, name_dtype
from stopdown.pipelines.class_selection import select_class
from stopdown.pipelines.drawn_inputs import draw_inputs
from stopdown.pipelines.loader import (
    complete_source,
    load_program,
    move_program,
)
from stopdown.pipelines.requests import (
    Request,
    build_arguments,
    check_request,
    list_needed_fields,
    list_prompts,
)
from stopdown.plans.call_recorder import (
    PROMPTS,
    list_part_calls,
    play_calls,
    record_calls,
    record_run,
)
from stopdown.plans.exponents import describe_unscaled, scale_component
from stopdown.plans.plan_files import read_class_versions, seal_plan
from stopdown.plans.precision import ComponentFacts, choose_precision
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.scaling import ComponentCall, cast_, read_headroom
from stopdown.scaling_records import describe_trial
from stopdown.sources.hub import Progress
from stopdown.sources.source import Source
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import fingerprint, read_stored_dtypes, resolve_source
from stopdown.weight_checks import find_quantised

STEPS = 4
"""Denoising steps of a measured run, where a request names none."""


@dataclass(frozen=True)
class _Subject:
    """What is to be measured, and how: `residual` and `ranges` are as of `make_plan`.

    `pipe` is the program, `None` for a checkpoint whose components come one by one.
    """

    pipe: Any
    name: str
    pipeline: str
    fingerprint: str
    stored: Mapping[str, Mapping[str, int]]
    device: Device
    residual: str
    ranges: str
    progress: Progress | None


def measure_plan(
    pipe_or_source: Any,
    *,
    prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    residual: str | None = None,
    ranges: str | None = None,
    request: Request | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    run: Callable[[], Any] | None = None,
) -> Plan:
    """Find how each component of a checkpoint runs in fp16, by running it in fp32.

    Args:
        prompts: what to measure, one run each: a text or several, or arguments of the pipeline's call.
        residual: as of `make_plan`; `native` is the default for a program that is no pipeline.
        ranges: `measured`, or bounds besides: `auto` where they cost nothing, `bound` wherever it can.
        request: sizes, steps, guidance and further arguments of the runs.
        device: where a source is measured.
        run: runs a program that is no pipeline once.

    Each component's exponents are tried before they are believed: bit for bit the same in fp32, and run
    once in fp16 as planned. The next strategy is taken if that fails: without an fp32 residual stream,
    as far as hooks show that fp16 does, bf16 or fp32; `reasons` say why, and `trial` how near it was. The
    first, middle and last of `STEPS` steps are measured, unless the request names others. If no size is
    asked for, the configs' own is taken if the default is far beyond it, and a smaller one if a run in
    fp32 would not fit into memory.

    Cost: one run in fp32 for each prompt, and for each component captures of seconds and about as
    many forwards again as were kept.
    """
    started = time.perf_counter()
    check_residual(residual)
    how = (residual or "fp32", check_ranges(ranges), progress)
    given = check_request("make_plan", request) or Request()
    prompts, device = list_prompts("make_plan", prompts), name_device("make_plan", device)
    steps = STEPS if given.steps is None else given.steps
    if steps < 1:
        raise OptionError(f"steps={steps} is less than 1.", remedy="Use steps=1 or more.")
    given = dataclasses.replace(given, steps=steps)
    requests: list[Request] = []
    target = pipe_or_source
    if isinstance(target, (str, Path, Source)):
        source = target
        if not isinstance(source, Source):
            source = resolve_source(source)
            verify_source(source)
        target = select_class(complete_source(source), given)
    opened = _open(target, device, how)
    if runs_by_call(opened.pipe):
        requests = list_requests(opened.pipe, prompts, given)
        requests, resized = _fit_size(opened.pipe, opened.device, requests)
        components = _plan_pipeline(opened, requests, resized)
    else:  # whoever calls a module may look at the dtype of its parameters and outputs
        opened = dataclasses.replace(opened, residual=residual or "native")
        components = _plan_program(opened, run or _play(opened, prompts))
    return _seal_measured(opened, requests, components, steps, started)


def _seal_measured(
    opened: _Subject,
    requests: Sequence[Request],
    components: tuple[ComponentPlan, ...],
    steps: int,
    started: float,
) -> Plan:
    known = opened.name, opened.fingerprint, opened.pipeline
    prompts = tuple(r.prompt for r in requests if r.prompt is not None)
    return seal_made(known, components, started, opened.device, prompts=prompts, steps=steps)


def seal_made(
    known: tuple[str, str, str],
    components: Sequence[ComponentPlan],
    started: float,
    device: Device,
    **measured: Any,
) -> Plan:
    """Return the sealed plan with this name, fingerprint and class of pipeline."""
    made = Plan(
        *known,
        precision=FP16.name,
        versions=read_class_versions(),
        components=tuple(components),
        device=str(device),
        elapsed_s=round(time.perf_counter() - started, 3),
        **measured,
    )
    return seal_plan(made)


def _choose_room(device: Device, needed_bytes: float) -> Device:
    """Return the device if it has room for these bytes, else the CPU."""
    has_room = device.type == "cpu" or needed_bytes <= device.memory_bytes
    return device if has_room else choose_device("cpu")


def _plan_pipeline(
    opened: _Subject, requests: Sequence[Request], resized: str
) -> tuple[ComponentPlan, ...]:
    """Run the requests in fp32, record the calls of each component, and plan every component from them."""
    with Patches() as patches:
        _widen(opened.pipe, patches)
        recorded = record_calls(opened.pipe, requests, opened.progress)
        planned = _plan_components(opened, find_components(opened.pipe), recorded)
    runs = len(requests)
    components = [dataclasses.replace(x, prompts=runs if x.calls else 0) for x in planned]
    if resized:
        components = [_add_reason(entry, recorded, resized) for entry in components]
    return tuple(components)


def _plan_program(opened: _Subject, run: Callable[[], Any] | None) -> tuple[ComponentPlan, ...]:
    """Plan the components that a run of a program calls; the program is no pipeline."""
    if run is None:
        raise explain_run(
            f"A {opened.name} is not a pipeline, so it is not known how to run it.", "make_plan"
        )
    with Patches() as patches:
        _widen(opened.pipe, patches)
        recorded = {name: calls for name, calls in record_run(opened.pipe, run).items() if calls}
        found = {name: find_component(opened.pipe, name) for name in recorded}
        modules = {name: module for name, module in found.items() if module is not None}
        if not modules:
            raise explain_run(f"The run called no module of the {opened.name}.", "make_plan")
        return _plan_components(opened, modules, recorded)


def _play(opened: _Subject, given: Sequence[str | Mapping[str, Any]]) -> Callable[[], None] | None:
    """Return a function that makes the given calls of a file's components; None if this is no file."""
    if not opened.fingerprint:
        return None
    if not given:
        held = " and ".join(list_part_calls(opened.pipe))
        raise OptionError(
            f"The file {opened.name} holds only {held}, not a whole pipeline.",
            expected="To measure values, Stopdown needs recorded calls of it.",
            remedy="Compute bounds from the weights: make_plan(FILE). Or give the arguments of a call.",
        )
    return functools.partial(play_calls, opened.pipe, given)


def _open(given: Any, device: str | None, how: tuple[str, str, Progress | None]) -> _Subject:
    if not isinstance(given, Source):
        stored = {name: _count_bytes(module) for name, module in find_components(given).items()}
        where = choose_device(find_device(given))
        name = type(given).__name__
        return _Subject(given, name, name, "", stored, where, *how)
    source = given
    stored = {name: dict(counts) for name, counts in read_stored_dtypes(source).items()}
    pipe = load_program(source, torch_dtypes=torch.float32, progress=how[-1])
    where = choose_device(device or "auto")
    if device is None:  # the best one that holds the pipeline in fp32 with half to spare
        parts = find_components(pipe).values()
        where = _choose_room(where, 1.5 * sum(sum(_count_bytes(m).values()) for m in parts))
    known = source.name, type(pipe).__name__, fingerprint(source)
    return _Subject(move_program(pipe, where), *known, stored, where, *how)


def _count_bytes(module: torch.nn.Module) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tensor in module.parameters():
        name = name_dtype(tensor.dtype)
        counts[name] = counts.get(name, 0) + tensor.nbytes
    return counts


def list_requests(
    pipe: Any,
    prompts: Sequence[str | Mapping[str, Any]],
    given: Request,
) -> list[Request]:
    """Return one request for each prompt, with a drawn picture, mask or video if one is needed."""
    needed = list_needed_fields(type(pipe))
    base = draw_inputs(pipe, given)
    has_prompt = "prompt" in needed and not given.arguments.keys() & {"prompt", "prompt_embeds"}
    if not has_prompt and all(isinstance(one, str) for one in prompts):
        return [dataclasses.replace(base, prompt=None)]
    named = [given.prompt] if given.prompt else []
    return [
        dataclasses.replace(base, prompt=one, seed=given.seed + number)
        if isinstance(one, str)
        else dataclasses.replace(
            base, seed=given.seed + number, arguments={**given.arguments, **one}
        )
        for number, one in enumerate(prompts or (*named, *PROMPTS))
    ]


def _fit_size(
    pipe: Any, where: Device, requests: list[Request], *, has_weights: bool = True
) -> tuple[list[Request], str]:
    """Set the requests' sizes to suit the model and fit into memory, except for requested ones."""
    sizes, why = choose_size(
        pipe,
        build_arguments(pipe, requests[0], chooses_sides=False),
        memory_bytes=where.memory_bytes,
        on_cpu=where.type == "cpu",
        has_weights=has_weights,
    )
    return [dataclasses.replace(x, arguments={**sizes, **x.arguments}) for x in requests], why


def _add_reason(
    entry: ComponentPlan, recorded: Mapping[str, Sequence[ComponentCall]], why: str
) -> ComponentPlan:
    """Add the reason for the measured size to the entry of a denoiser."""
    if any(call.callee.stage == "denoise" for call in recorded.get(entry.component, ())):
        return dataclasses.replace(entry, reasons=(*entry.reasons, why))
    return entry


def _widen(pipe: Any, patches: Patches) -> None:
    """Cast weights to fp32 unless they are quantised; set evaluation mode, without a progress bar."""
    if runs_by_call(pipe):
        bar = {**getattr(pipe, "_progress_bar_config", {}), "disable": True}
        patches.set_attribute(pipe, "_progress_bar_config", bar)
    for module in find_components(pipe).values():
        if not find_quantised(module) and set(read_precisions(module)) - {torch.float32}:
            patches.defer(cast_(module, torch.float32).undo)


def _plan_components(
    opened: _Subject,
    modules: Mapping[str, torch.nn.Module],
    recorded: Mapping[str, Sequence[ComponentCall]],
) -> tuple[ComponentPlan, ...]:
    planned = []
    for number, (name, module) in enumerate(modules.items()):
        if opened.progress is not None:
            opened.progress("measure", name, number, len(modules))
        planned.append(_plan_component(opened, name, module, recorded.get(name, ())))
    return tuple(planned)


def _plan_component(
    opened: _Subject,
    name: str,
    module: torch.nn.Module,
    calls: Sequence[ComponentCall],
    *,
    verify: bool = True,
) -> ComponentPlan:
    weights, code = sample_weights(module), list_foreign_code(module)
    bare = ComponentPlan(name, type(module).__name__, weights, "fp32", code=code)
    if method := find_quantised(module):
        why = f"Its weights are quantised ({method}); they are left alone."
        return dataclasses.replace(bare, precision="as loaded", reasons=(why,))
    if not any(not call.made_up for call in calls):
        why = "The pipeline did not call it while it was measured."
        return fall_back(bare, opened.stored, why, opened.device, _REFERENCE)
    try:
        scaling, notes = scale_component(
            module, calls, opened.residual, opened.ranges, verify=verify
        )
    except Exception as error:  # whatever a model's code does: it falls back, and the plan says why
        why = describe_unscaled(error)
        return fall_back(bare, opened.stored, why, opened.device, _REFERENCE)
    return describe_scaling(bare, scaling, FP16.name, len(calls), notes)


_REFERENCE = "fp32 is the reference."


def fall_back(
    bare: ComponentPlan,
    stored: Mapping[str, Mapping[str, int]],
    why: str,
    device: Device | None,
    otherwise: str = "",
) -> ComponentPlan:
    """Return the component's entry in bf16 if its weights are stored so, else in fp32.

    It is in fp32 too if the device computes slowly in bf16.
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
    """Return a component's entry with its exponents, and their meaning in sentences."""
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
        reasons.append(
            f"{basis}: no {which} activation comes within a factor of {factor} of fp16's limit "
            f"({scaling.headroom_bits:.1f} bits of headroom). Closest: {scaling.tightest}."
        )
    if scaling.exponents:
        reasons.append(f"For this, {count_folds(scaling)}.")
    else:
        reasons.append("No weight had to be scaled.")
    if scaling.fp32_modules:
        share = f"{100 * scaling.fp32_flops:.1f} % of the matmul work"
        reasons.append(
            f"{', '.join(scaling.fp32_modules)} cannot be scaled and stay in fp32: {share}."
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
    """Describe the number of scaled tensors: `41 tensors are scaled by exponents -6..3`."""
    if not scaling.exponents:
        return "no tensor is scaled"
    tensors = {name.partition("[")[0] for name in scaling.exponents}
    low, high = min(scaling.exponents.values()), max(scaling.exponents.values())
    noun = "tensor is" if len(tensors) == 1 else "tensors are"
    return f"{len(tensors)} {noun} scaled by exponents {low}..{high}"
