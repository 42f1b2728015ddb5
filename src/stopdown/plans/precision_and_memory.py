"""Choose precision and memory strategy together: the fastest combination that fits under a limit.

The candidates are plans: the choice of `auto`, fp16 with rescaled weights, a given plan with its fp32
modules, and fp32. The memory of each is predicted by a dry run without weights, and its time by the
device's rates. Of two plans that take the same time, the one closer to fp32 is chosen.

Not covered: the error of a plan, which needs weights; `stopdown compare` measures it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stopdown.component_call_names import name_component
from stopdown.devices.format_support import Support
from stopdown.memory.forecast import (
    Fit,
    choose_prediction,
    estimate_time,
    make_rows,
)
from stopdown.memory.speed import Speed
from stopdown.memory.strategies import Prediction, Strategy
from stopdown.number_formats import FORMATS
from stopdown.pipelines.skeletons import build_skeleton
from stopdown.plans.applier import apply_without_weights, check_source
from stopdown.plans.planned_loader import (
    decide,
    describe_entry,
    gather_facts,
    widest_by_component,
)
from stopdown.plans.precision import ComponentFacts, explain_plan, parse_request
from stopdown.records import ComponentPlan, MemoryRow, Plan, Scaling
from stopdown.sources.source import Source, list_weight_files


def find_ways(
    source: Source, supports: Mapping[str, Support], asked: str, plan: Plan | None = None
) -> list[Plan]:
    if plan is not None:
        check_source(plan, source, with_weights=all(list_weight_files(source).values()))
    return list_ways(gather_facts(source), supports, asked, plan)


def list_ways(
    facts: Sequence[ComponentFacts],
    supports: Mapping[str, Support],
    asked: str,
    plan: Plan | None = None,
) -> list[Plan]:
    """List the plans whose memory and speed are compared, the requested one (or `auto`'s choice) first.

    Args:
        asked: a `--precision`. `auto` and a plan are compared with alternatives; others are listed alone.
        plan: the plan that `asked` names, if it is a path.
    """
    names = [fact.name for fact in facts]
    fp32 = _make_plan("fp32", "fp32", dict.fromkeys(names, "fp32"))
    if plan is not None:
        return [dataclasses.replace(plan, precision=asked, chosen=f"by {asked}"), fp32]
    why = explain_plan(facts, supports)
    makes_plan = bool(why)  # generate's auto makes one by itself then
    request = parse_request(asked)
    is_auto = request.get("") == "auto"
    flag = "auto" if makes_plan and is_auto else "fp16"
    reason = (
        "Its exponents come from a certificate of its weights, with the residual stream in fp32, because "
        f"{why if flag == 'auto' else 'you asked for fp16'}."
    )
    rescaled = _make_plan("fp16 with a plan", flag, dict.fromkeys(names, "fp16"), Scaling(), reason)
    if request.get("") == "fp16":
        return [rescaled]
    decided = decide(list(facts), supports, asked)
    found = widest_by_component(decided)
    own = Plan(
        "", precision=asked, chosen=" and ".join(dict.fromkeys(found.values())), components=decided
    )
    if not is_auto:
        return [own]
    ways = [own]
    if supports["fp16"].native and supports["fp16"].works:
        ways = [rescaled, own] if makes_plan else [own, rescaled]
    return [*ways, fp32] if {*found.values()} != {"fp32"} else ways


def _make_plan(
    name: str,
    flag: str,
    formats: Mapping[str, str],
    scaling: Scaling | None = None,
    reason: str = "fp32 is the reference.",
) -> Plan:
    """Return a plan without weights or calls, whose memory and speed are only to be predicted and compared.

    Args:
        name: that the table of plans shows.
        flag: `--precision` that selects it.
        formats: component → precision.
        scaling: an empty scaling for rescaled weights; None for plain ones.
    """
    entries = (
        ComponentPlan(x, precision=y, scaling=scaling, reasons=(reason,))
        for x, y in formats.items()
    )
    return Plan("", precision=flag, chosen=name, components=tuple(entries))


def read_formats(plan: Plan) -> dict[str, str]:
    """Map each component of a plan to its format, the widest of its calls."""
    return widest_by_component(tuple(x for x in plan.components if x.precision in FORMATS))


def describe_choices(plan: Plan) -> tuple[ComponentPlan, ...]:
    """Return a plan's entries for a record of the choice: precisions and reasons, without exponents."""
    return tuple(
        ComponentPlan(
            entry.component,
            precision=entry.precision,
            stored=entry.stored,
            reasons=entry.reasons
            if entry.scaling is None or not plan.seal
            else (describe_entry(entry, plan.precision),),
        )
        for entry in plan.components
    )


def count_significant_bits(plan: Plan) -> int:
    """Return the significant bits of a plan's coarsest format."""
    return min(FORMATS[name].significant_bits for name in read_formats(plan).values())


def find_fp32_share(plan: Plan) -> float:
    """Return the share of the matmul FLOPs that run in fp32, of the component with the largest share."""
    return max((entry.in_force.fp32_flops for entry in plan.components), default=0.0)


def describe_remark(plan: Plan) -> str:
    """Describe, for a table of plans, what a plan does beside its formats: fp32 modules and streams,
    second copies.

    Return "" for none.
    """
    if plan.is_bare:
        formats = read_formats(plan)
        by_call = {x.component: x.precision for x in plan.components}
        twice = {name_component(x) for x, y in by_call.items() if y != formats[name_component(x)]}
        names = ", ".join(name for name in formats if name in twice)
        said = f"{names}: a second copy of the weights, for the other method, comes on top."
        return said if twice else ""
    entries = [entry.in_force for entry in plan.components]
    count = sum(len(x.fp32_modules) for x in entries)
    share = find_fp32_share(plan)
    streams = sum(x.stream is not None for x in entries)
    remark = f"{count} fp32 module{'s' * (count != 1)} in fp32, {share:.1%} of the matmul work."
    if streams:
        remark += f" {streams} fp32 residual stream{'s' * (streams != 1)}."
    return remark


def build_way(source: Source, plan: Plan) -> Any:
    """Build a source's pipeline without weights as a plan would run it, to predict its memory by a dry
    run.
    """
    if plan.is_bare:
        dtypes = {name: FORMATS[x].torch_dtype for name, x in read_formats(plan).items()}
        keeps_fp32 = all(entry.scaling is None for entry in plan.components)
        return build_skeleton(source, dtypes, keep_fp32=keeps_fp32)
    pipe = build_skeleton(source, {}, keep_fp32=False)
    apply_without_weights(pipe, plan)
    return pipe


def weigh_speed(plan: Plan, narrow: Speed | None, wide: Speed | None) -> Speed | None:
    """Return a device's average speed under a plan, with the work of fp32 modules at the fp32 rate.

    Args:
        narrow: the device's speed in the plan's formats.
        wide: its speed in fp32.
    """
    share = find_fp32_share(plan)
    if narrow is None or wide is None or not share:
        return narrow
    rate = 1 / ((1 - share) / narrow.flops_per_s + share / wide.flops_per_s)
    return dataclasses.replace(narrow, flops_per_s=rate)


def choose_way(found: Sequence[Fit], limit_bytes: int) -> tuple[Plan, Prediction] | None:
    """Return the fastest plan that fits, with its prediction; None if none fits.

    If a speed is unknown, return the first that fits.

    Args:
        found: predictions of each plan, the requested plan first.
    """
    fitting = [
        (one.plan, prediction, estimate_time(prediction, one.speed))
        for one in found
        if (prediction := choose_prediction(one, limit_bytes)) is not None
    ]
    if all(one.speed is not None for one in found):
        fitting.sort(key=lambda one: (round(one[2], 9), -count_significant_bits(one[0])))
    return fitting[0][:2] if fitting else None


def list_rows(found: Sequence[Fit]) -> tuple[MemoryRow, ...]:
    """Return the table rows of all plans, with times relative to the first plan with resident weights."""
    first = found[0]
    resident = (one for one in first.predictions if one.strategy == Strategy())
    unit_s = estimate_time(next(resident, first.predictions[0]), first.speed)
    return tuple(
        dataclasses.replace(row, precision=one.plan.chosen)
        for one in found
        for row in make_rows(one, unit_s)
    )
