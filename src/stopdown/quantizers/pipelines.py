"""`quantization`: the `quantization_config` of a whole pipeline."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from diffusers.quantizers import PipelineQuantizationConfig

from stopdown.devices.environment import choose_device
from stopdown.plans.applier import check_source
from stopdown.plans.plan_choice import find_or_certify
from stopdown.plans.plan_files import take_plan
from stopdown.quantizers.config import StopdownConfig
from stopdown.records import Plan
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.sources import resolve_source, verify_source


def quantization(
    source: str | Path,
    *,
    plan: Plan | str | Path | None = None,
    guard: bool = False,
    revision: str | None = None,
    variant: str | None = None,
) -> Any:
    """Return the `quantization_config` with which Diffusers loads a pipeline in fp16.

        pipe = DiffusionPipeline.from_pretrained(
            id, dtype=torch.float16, quantization_config=stopdown.quantization(id)
        )

    Each component with weights has a `StopdownConfig` in `quant_mapping`; another method may take the
    place of one, or it may be left out there.

    Args:
        source: Hub id, folder or bundled model, as `from_pretrained` is given it.
        plan: a plan for it, or the path of its file. None takes the plan that lies beside the model or was
            kept for it, and certifies one from the weights otherwise; it is kept.
        guard: put a guard on each component: `pipe.transformer.stopdown_guard`.
        revision: branch, tag or commit of a Hub id.
        variant: of the weights, where there are several: `"fp16"`.

    Raises:
        SourceError: the model is missing, damaged or refused.
        PlanError: the plan is damaged or belongs to another checkpoint.

    Cost: without a plan, the first time that a checkpoint is met here, one pass over its weights.
    """
    found = resolve_source(source, revision=revision, variant=variant)
    verify_source(found)
    with quiet_libraries():
        if plan is None:
            taken = find_or_certify(found, choose_device("auto"))
        else:
            taken = take_plan(plan)
            check_source(taken, found)
    mapping = {
        entry.component: StopdownConfig(
            dataclasses.replace(taken, components=(entry,)), guard=guard, component=entry.component
        )
        for entry in taken.components
    }
    return PipelineQuantizationConfig(quant_mapping=mapping)


def join_plans(config: PipelineQuantizationConfig) -> Plan:
    """Return the plan of a pipeline, from what `quantization` gave."""
    configs = [x for x in config.quant_mapping.values() if isinstance(x, StopdownConfig)]
    plans = [x.plan for x in configs if x.plan is not None]
    components = tuple(x.components[0] for x in plans)
    return dataclasses.replace(plans[0], components=components)
