"""Precision and memory decided together: each way to compute, with each strategy, under one limit.

A way is a format for every component: what `auto` would choose, fp16 with rescaled weights, a plan with
its fp32 modules, fp32. Each is run dry
without weights; their times are compared by the device's rates. The one that takes the least time
among those that fit is taken, the nearer to fp32 of two alike.

**Catches** what fp32 modules and wider formats take, in the pipeline's own code.
**Does not catch** the error of a way: that needs weights, and `stopdown compare` measures it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stopdown.devices.environment import Support
from stopdown.memory.forecast import (
    USABLE_SHARE,
    Fit,
    estimate_time,
    make_rows,
)
from stopdown.memory.speed import Speed
from stopdown.memory.strategies import Prediction, Strategy
from stopdown.number_formats import FORMATS
from stopdown.pipelines.skeletons import build_skeleton
from stopdown.plans.applier import apply_without_weights, check_source
from stopdown.plans.planned_loader import decide, gather_facts, widest_by_component
from stopdown.plans.precision import ComponentFacts, explain_plan, parse_request
from stopdown.records import MemoryRow, Plan
from stopdown.sources.sources import Source


@dataclass(frozen=True)
class Way:
    """One way to compute.

    Attributes:
        name: `fp16 rescaled`, `fp16 with fp32 modules`, `fp32`.
        precisions: component → format of most of it.
        flag: what `--precision` has to say for it.
        keeps_fp32: whether parts that a class keeps in fp32 stay there.
        plan: whose fp32 modules and residual streams it has; None for none.
        remark: what else is to be said, a sentence or nothing.
    """

    name: str
    precisions: Mapping[str, str]
    flag: str
    keeps_fp32: bool = True
    plan: Plan | None = field(default=None, repr=False)
    remark: str = ""

    @property
    def bits(self) -> int:
        """Significant bits of the coarsest format."""
        return min(FORMATS[name].significant_bits for name in self.precisions.values())

    @property
    def fp32_share(self) -> float:
        """Share of the matmul work that a plan does in fp32, the largest of its components."""
        entries = self.plan.components if self.plan is not None else ()
        return max((entry.in_force.fp32_flops for entry in entries), default=0.0)


@dataclass(frozen=True)
class Budgeted:
    """A way with what every strategy of it takes."""

    way: Way
    fit: Fit
    speed: Speed | None


def find_ways(
    source: Source, supports: Mapping[str, Support], asked: str, plan: Plan | None = None
) -> list[Way]:
    """Return the ways to compute a source, as `list_ways` does.

    Raises:
        PlanError: the plan belongs to another model.
    """
    if plan is not None:
        check_source(plan, source)
    return list_ways(gather_facts(source), supports, asked, plan)


def list_ways(
    facts: Sequence[ComponentFacts],
    supports: Mapping[str, Support],
    asked: str,
    plan: Plan | None = None,
) -> list[Way]:
    """The ways that are compared, the one that was asked for (or `auto` takes) first.

    Args:
        asked: a `--precision`: `auto` and a plan's path are compared with others, the rest is alone.
        plan: what a path led to.

    Raises:
        OptionError: the precision is unknown or does not work there.
    """
    names = [fact.name for fact in facts]
    fp32 = Way("fp32", dict.fromkeys(names, "fp32"), "fp32")
    if plan is not None:
        return [_describe_plan(plan, asked), fp32]
    makes_plan = bool(explain_plan(facts, supports))  # generate's auto makes one by itself then
    request = parse_request(asked)
    is_auto = request.get("") == "auto"
    flag = "auto" if makes_plan and is_auto else "fp16"
    rescaled = Way("fp16 rescaled", dict.fromkeys(names, "fp16"), flag, keeps_fp32=False)
    if request.get("") == "fp16":
        return [rescaled]
    decisions = decide(list(facts), supports, asked)
    found = widest_by_component(decisions)
    own = Way(" and ".join(dict.fromkeys(found.values())), found, asked)
    by_call = {decision.component: decision.precision for decision in decisions}
    twice = [x.name for x in facts if len({by_call[call] for call in x.calls}) > 1]
    if twice:
        copies = (
            f"{', '.join(twice)}: a second copy of the weights, for the other method, comes on top."
        )
        own = dataclasses.replace(own, remark=copies)
    if not is_auto:
        return [own]
    ways = [own]
    if supports["fp16"].native and supports["fp16"].works:
        ways = [rescaled, own] if makes_plan else [own, rescaled]
    return [*ways, fp32] if fp32.precisions != found else ways


def _describe_plan(plan: Plan, path: str) -> Way:
    entries = plan.components
    count = sum(len(entry.in_force.fp32_modules) for entry in entries)
    share = max((entry.in_force.fp32_flops for entry in entries), default=0.0)
    streams = sum(entry.in_force.stream is not None for entry in entries)
    remark = f"{count} fp32 module{'s' * (count != 1)} in fp32, {share:.1%} of the matmul work."
    if streams:
        remark += f" {streams} fp32 residual stream{'s' * (streams != 1)}."
    precisions = {e.component: e.precision for e in entries if e.precision in FORMATS}
    return Way(f"by {path}", precisions, path, keeps_fp32=False, plan=plan, remark=remark)


def build_way(source: Source, way: Way) -> Any:
    """A source's pipeline without weights, as a way has it: fp32 modules and residual streams, too."""
    if way.plan is None:
        dtypes = {name: FORMATS[entry].torch_dtype for name, entry in way.precisions.items()}
        return build_skeleton(source, dtypes, keep_fp32=way.keeps_fp32)
    pipe = build_skeleton(source, {}, keep_fp32=False)
    apply_without_weights(pipe, way.plan)
    return pipe


def weigh_speed(way: Way, narrow: Speed | None, wide: Speed | None) -> Speed | None:
    """The speed of a way whose fp32 modules run in fp32: each share of the work at its own rate.

    Args:
        narrow: in the formats of the way.
        wide: in fp32.
    """
    share = way.fp32_share
    if narrow is None or wide is None or not share:
        return narrow
    rate = 1 / ((1 - share) / narrow.flops_per_s + share / wide.flops_per_s)
    return dataclasses.replace(narrow, flops_per_s=rate)


def choose_way(found: Sequence[Budgeted], limit_bytes: int) -> tuple[Way, Prediction] | None:
    """What takes the least time among all that fits; without known speeds the first way that fits.

    Args:
        found: the way that was asked for first.
    """
    fitting = [
        (one.way, prediction, estimate_time(prediction, one.speed))
        for one in found
        for prediction in one.fit.predictions
        if prediction.peak_bytes <= limit_bytes * USABLE_SHARE
    ]
    if not fitting:
        return None
    if all(one.speed is not None for one in found):
        fitting.sort(key=lambda one: (round(one[2], 9), -one[0].bits))
    return fitting[0][:2]


def list_rows(found: Sequence[Budgeted]) -> tuple[MemoryRow, ...]:
    """The rows of all ways; times are ratios to everything resident in the first of them."""
    first = found[0]
    known = first.fit.predictions
    resident = next((one for one in known if one.strategy == Strategy()), known[0])
    unit_s = estimate_time(resident, first.speed)
    return tuple(
        dataclasses.replace(row, precision=one.way.name)
        for one in found
        for row in make_rows(one.fit, one.speed, unit_s)
    )
