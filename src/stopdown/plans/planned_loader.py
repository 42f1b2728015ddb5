"""Load a pipeline onto a device, each component in the precision that its plan states."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from stopdown.component_call_names import QUANT_METHOD, name_component
from stopdown.component_calls.components import (
    cast_component_,
    find_callees,
    find_components,
    find_kept_fp32,
    list_call_names,
)
from stopdown.devices.device_choice import Device
from stopdown.devices.format_support import Support
from stopdown.fake_tensors.fake_modules import detach_derived
from stopdown.interception.patches import Patches
from stopdown.mapped_weights import put_, wait_
from stopdown.number_formats import FORMATS, PRECISIONS, format_figure
from stopdown.pipelines.allowed_sizes import read_configs
from stopdown.pipelines.loader import load_pipeline, move_program
from stopdown.pipelines.loras_and_schedulers import put_loras
from stopdown.plans.applier import (
    AppliedPlan,
    check_source,
    compare_components,
    leaves_loras,
    load_entry,
    put_boundaries,
    put_plan,
    refuse_differences,
)
from stopdown.plans.precision import (
    ComponentFacts,
    decide_precisions,
    parse_request,
    resolve_words,
)
from stopdown.records import ComponentPlan, Plan
from stopdown.scaling_records import describe_count
from stopdown.sources.component_classes import find_class
from stopdown.sources.hub import Progress
from stopdown.sources.source import Source
from stopdown.sources.sources import read_stored_dtypes


def gather_facts(source: Source) -> list[ComponentFacts]:
    """Return, for each component, the facts that decide its precision, from configs and weight headers
    alone.

    For a single file, each component has the stored formats of the whole file.
    """
    stored, configs = read_stored_dtypes(source), read_configs(source.described)
    held = {part.name for part in source.parts} or source.components.keys()
    return [
        _gather_component(source, name, stored.get(name, stored.get("checkpoint", {})), configs)
        for name in source.components
        if name in held and source.has_weights(name) and (name in stored or name in configs)
    ]


def _gather_component(
    source: Source,
    name: str,
    stored: Mapping[str, int],
    configs: Mapping[str, Mapping[str, Any]],
) -> ComponentFacts:
    module_class = find_class(*source.components[name])
    calls = list_call_names(name, module_class)
    config = configs.get(name, {})
    kept = {precision: find_kept_fp32(module_class, precision) for precision in PRECISIONS}
    force_upcast = bool(config.get("force_upcast", False)) and len(calls) == 2
    method = config.get("quantization_config")
    carries_plan = isinstance(method, Mapping) and method.get("quant_method") == QUANT_METHOD
    return ComponentFacts(name, calls, stored, kept, force_upcast, carries_plan)


def decide(
    facts: list[ComponentFacts], supports: Mapping[str, Support], precision: str
) -> tuple[ComponentPlan, ...]:
    """Return the precision of each call in a run without exponents, as the user or the device asks.

    Args:
        supports: format → how the device supports it.
        precision: text of a `--precision`.
    """
    calls = {entry.name: entry.calls for entry in facts}
    return decide_precisions(facts, supports, resolve_words(parse_request(precision), calls))


def load_plan(
    source: Source,
    plan: Plan,
    device: Device,
    *,
    progress: Progress | None = None,
) -> AppliedPlan:
    """Load a pipeline by its plan, with scaled and cast weights, and move it to a device.

    If `Plan.memory` is set, the weights stay in the checkpoint's files until a memory strategy is applied.
    """
    load = _load_bare if plan.is_bare else _load_scaled
    return load(source, plan, device, progress, plan.memory is None)


def _load_bare(
    source: Source, plan: Plan, device: Device, progress: Progress | None, move: bool
) -> AppliedPlan:
    """Load a pipeline by a plan without exponents, in the precisions of its calls.

    If an autoencoder's two directions differ, it is loaded in the wider format, and the other direction
    uses a cast copy, so that weights aren't cast back and forth during a run. Arguments are cast between
    components in different precisions.

    Args:
        move: False leaves weights in the checkpoint's files, with one copy of each.
    """
    decisions = plan.components
    formats = widest_by_component(decisions)
    if not move:
        decisions = tuple(
            _share_weights(x, formats[name_component(x.component)]) for x in decisions
        )
    widest = {name: FORMATS[precision].torch_dtype for name, precision in formats.items()}
    waits = not (move or source.loras)
    pipe = load_pipeline(source, torch_dtypes=None if waits else widest, progress=progress)
    for name, module in find_components(pipe).items() if waits else ():
        if name in widest:
            cast_component_(module, widest[name], wait_)
    decisions = tuple(d for d in decisions if name_component(d.component) in find_components(pipe))
    wanted = {d.component: FORMATS[d.precision].torch_dtype for d in decisions}
    patches = Patches()
    for callee in find_callees(pipe):
        name = callee.component_name
        if callee.name in wanted and wanted[callee.name] != widest[name]:
            narrow = cast_component_(
                copy.deepcopy(callee.owner, detach_derived(callee.owner)), wanted[callee.name]
            )
            move_program(narrow, device)
            patches.set_attribute(callee.owner, callee.method, getattr(narrow, callee.method))
    if move:
        move_program(pipe, device)
    if len(set(wanted.values())) > 1:
        calls = dataclasses.replace(plan, components=decisions)
        put_boundaries(pipe, calls, patches, keeps_upcast=True)
    return AppliedPlan(pipe, plan, decisions, patches)


def _load_scaled(
    source: Source, plan: Plan, device: Device, progress: Progress | None, move: bool
) -> AppliedPlan:
    """Load a checkpoint with the exponents of its plan.

    Weights are scaled and cast one tensor at a time, from their stored format. LoRAs that the plan was made
    without are loaded afterwards. If the plan was made with the LoRAs, the model is loaded in fp32.
    """
    check_source(plan, source)
    loras = source.loras if leaves_loras(plan, source) else ()
    first = dataclasses.replace(source, loras=()) if loras else source
    dtypes = torch.float32 if first.loras else None
    pipe = load_pipeline(first, torch_dtypes=dtypes, progress=progress)
    refuse_differences(plan, list(compare_components(pipe, plan)))
    waits = not source.loras and (not move or device.type != "cpu")
    put = functools.partial(load_entry, put=wait_ if waits else put_)
    applied = put_plan(pipe, plan, put)
    put_loras(pipe, loras)
    if move:
        move_program(pipe, device)
    decisions = tuple(describe_calls(plan, gather_facts(source)))
    return dataclasses.replace(applied, decisions=decisions)


def describe_calls(plan: Plan, facts: Iterable[ComponentFacts]) -> Iterator[ComponentPlan]:
    """Yield an entry for the record of a run for each call of the planned components, without exponents.

    Its reason describes in a sentence how the component runs by the plan.
    """
    planned = {entry.component: entry for entry in plan.components}
    for fact in (fact for fact in facts if fact.name in planned):
        entry = planned[fact.name]
        for call in fact.calls:
            yield ComponentPlan(
                call,
                precision=entry.precision,
                reasons=(describe_entry(entry, plan.chosen or "the plan"),),
                stored=fact.stored_mostly,
                kept_fp32=entry.in_force.fp32_modules,
            )


def _describe_basis(entry: ComponentPlan) -> str:
    """Describe what protects a component from overflow: bounds, measured calls, or some of each."""
    scaling = entry.in_force
    if scaling.certified:
        return "proven not to overflow"
    if not scaling.bounded:
        return f"measured in {entry.calls} calls" if entry.calls else "estimated, and watched"
    share = describe_count(scaling.values, scaling.bounded)
    rest = "measured" if entry.calls else "estimated"
    return f"{share} proven not to overflow, the rest {rest} and watched"


def describe_entry(entry: ComponentPlan, name: str) -> str:
    """Describe in a sentence how a component runs by a plan.

    For fp16 with exponents the sentence has the headroom, the fp32 modules and the measured error, else
    the precision and its reasons.

    Args:
        name: of the plan, for the sentence.
    """
    if entry.precision != "fp16" or entry.scaling is None:
        return f"{entry.precision} by {name}. {entry.reason}"
    scaling = entry.in_force
    parts = [_describe_basis(entry)]
    if scaling.headroom_bits is not None:
        parts.append(f"{scaling.headroom_bits:.1f} bits of headroom")
    if count := len(scaling.fp32_modules):
        parts.append(f"{count} module{'s' * (count != 1)} in fp32")
    if scaling.stream is not None and scaling.stream.cast_output_down:
        parts.append(f"fp32 sums in {', '.join(scaling.stream.cast_output_down)}")
    if scaling.trial is not None and scaling.trial.rel_err is not None:
        parts.append(
            f"an error of {format_figure(100 * scaling.trial.rel_err)} % against fp32 when it was tried"
        )
    return f"fp16 with {name}: {'; '.join(parts)}."


def _share_weights(decision: ComponentPlan, widest: str) -> ComponentPlan:
    """Return a call's entry in the widest precision of its component, so that all calls share weights."""
    if decision.precision == widest:
        return decision
    reason = f"Under a memory limit its weights are there once, in {widest}."
    return dataclasses.replace(decision, precision=widest, reasons=(*decision.reasons, reason))


def widest_by_component(decisions: tuple[ComponentPlan, ...]) -> dict[str, str]:
    """Map each component to the widest format of its calls, in which it is loaded.

    For calls in fp16 and bf16, that is fp32.
    """
    widest: dict[str, str] = {}
    for decision in decisions:
        name = name_component(decision.component)
        before = widest.get(name, decision.precision)
        widest[name] = max(before, decision.precision, key=lambda p: FORMATS[p].significant_bits)
        if {before, decision.precision} == {"fp16", "bf16"}:
            widest[name] = "fp32"  # neither holds the other's values
    return widest
