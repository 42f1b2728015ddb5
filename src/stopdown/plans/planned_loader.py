"""From a source to a pipeline on a device, each component in the precision that was decided for it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stopdown.component_call_names import name_component
from stopdown.component_calls.call_interception import put_cast
from stopdown.component_calls.components import (
    cast_component_,
    find_callees,
    find_components,
    find_kept_fp32,
    list_calls,
)
from stopdown.devices.environment import Device, Support
from stopdown.interception.patches import Patches
from stopdown.mapped_weights import wait_
from stopdown.number_formats import FORMATS, PRECISIONS
from stopdown.pipelines.allowed_sizes import read_configs
from stopdown.pipelines.loader import load_pipeline, move_program
from stopdown.plans.precision import (
    ComponentFacts,
    decide_precisions,
    parse_request,
    resolve_request,
)
from stopdown.records import Decision, Plan
from stopdown.sources.component_classes import find_class
from stopdown.sources.hub import Progress
from stopdown.sources.sources import Source, has_weights, read_stored_dtypes


@dataclass(frozen=True)
class LoadedPlan:
    """A plan that was put on while loading.

    Attributes:
        plan: it.
        off: component to what takes its entry off: the weights are in fp32 then.
    """

    plan: Plan
    off: Mapping[str, Patches]


@dataclass(frozen=True)
class Loaded:
    """A pipeline in memory.

    Attributes:
        pipe: a Diffusers pipeline on its device.
        decisions: precision of each call, with its reason.
        patches: what was put on the pipeline while loading: casts at the component calls of components that
            differ, and the second copy of an autoencoder whose directions differ.
        standing: the plan that it was loaded by; None without one.
    """

    pipe: Any
    decisions: tuple[Decision, ...]
    patches: Patches
    loaded_plan: LoadedPlan | None = None


def gather_facts(source: Source) -> list[ComponentFacts]:
    """What is known of each component that has weights, before anything is loaded.

    The weights of a single file count for every component that it holds.
    """
    stored, configs = read_stored_dtypes(source), read_configs(source.described)
    held = {part.name for part in source.parts} or source.components.keys()
    return [
        _gather_component(source, name, stored.get(name, stored.get("checkpoint", {})), configs)
        for name, (_, class_name) in source.components.items()
        if name in held and has_weights(class_name) and (name in stored or name in configs)
    ]


def _gather_component(
    source: Source,
    name: str,
    stored: Mapping[str, int],
    configs: Mapping[str, Mapping[str, Any]],
) -> ComponentFacts:
    module_class = find_class(*source.components[name])
    calls = list_calls(name, module_class)
    kept = {precision: find_kept_fp32(module_class, precision) for precision in PRECISIONS}
    force_upcast = bool(configs.get(name, {}).get("force_upcast", False)) and len(calls) == 2
    return ComponentFacts(name, calls, stored, kept, force_upcast)


def decide(
    facts: list[ComponentFacts], supports: Mapping[str, Support], precision: str
) -> tuple[Decision, ...]:
    """One decision for each call, from a `--precision` text.

    Raises:
        OptionError: the text names an unknown precision or component, or one that does not work.
    """
    calls = {entry.name: entry.calls for entry in facts}
    return decide_precisions(facts, supports, resolve_request(parse_request(precision), calls))


def load_decided(
    source: Source,
    decisions: tuple[Decision, ...],
    device: Device,
    *,
    progress: Progress | None = None,
    move: bool = True,
) -> Loaded:
    """Load a pipeline as decided and move it to a device.

    An autoencoder whose two directions differ is loaded in the wider format; the other direction
    gets a copy of its own, so that nothing is cast to and fro during a run. Where components differ,
    arguments are cast at their component calls.

    Args:
        move: False leaves the weights in the checkpoint's files, for a `WeightStore` to read: then there
            is one copy of each.

    Raises:
        SourceError: the weights do not fit their model.
    """
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
            narrow = cast_component_(copy.deepcopy(callee.owner), wanted[callee.name])
            move_program(narrow, device)
            patches.set_attribute(callee.owner, callee.method, getattr(narrow, callee.method))
    if move:
        move_program(pipe, device)
    if len(set(wanted.values())) > 1:
        for callee in find_callees(pipe):
            if callee.name in wanted:
                put_cast(callee, wanted[callee.name], patches)
    return Loaded(pipe, decisions, patches)


def _share_weights(decision: Decision, widest: str) -> Decision:
    """What is decided of a call where one copy of the weights serves all calls of its component."""
    if decision.precision == widest:
        return decision
    reason = f"{decision.reason} Under a memory limit its weights are there once, in {widest}."
    return dataclasses.replace(decision, precision=widest, reason=reason)


def widest_by_component(decisions: tuple[Decision, ...]) -> dict[str, str]:
    """Component → the format that it is loaded in: the widest of its calls, fp32 for fp16 and bf16."""
    widest: dict[str, str] = {}
    for decision in decisions:
        name = name_component(decision.component)
        before = widest.get(name, decision.precision)
        widest[name] = max(before, decision.precision, key=lambda p: FORMATS[p].significant_bits)
        if {before, decision.precision} == {"fp16", "bf16"}:
            widest[name] = "fp32"  # neither holds the other's values
    return widest
