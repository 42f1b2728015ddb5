"""`load`: a source as a Diffusers pipeline in the right precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stopdown.environment import choose_device, probe_formats
from stopdown.pipelines.default_sizes import read_configs
from stopdown.pipelines.library_messages import quiet_libraries
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.sources import resolve_source, verify_source
from stopdown.plans.choice import choose_loader
from stopdown.plans.loader import gather_facts


def load(
    source: str | Path,
    *,
    precision: str = "auto",
    device: str = "auto",
    config: str | Path | None = None,
) -> Any:
    """A Diffusers pipeline, each component in a precision that fits the device and the checkpoint.

    The pipeline is an ordinary one; `pipe.stopdown_decisions` holds the decisions with their
    reasons.

    Args:
        source: Hub id, Diffusers folder, single safetensors file or bundled model.
        precision: `auto`, a precision, by component: `transformer=bf16,vae=fp32`, or the path of a
            plan: `plan.json`.
        device: `auto`, `cuda`, `cuda:1`, `mps` or `cpu`.
        config: for a single file, a Diffusers folder or Hub id with its configs.

    Raises:
        SourceError: the model is missing, damaged or refused.
        OptionError: the precision or device is unknown or does not work here.
        PlanError: the plan is damaged or belongs to another checkpoint.
    """
    target = choose_device(device)
    found = resolve_source(source)
    verify_source(found)
    with quiet_libraries():
        found, described = complete_source(found, config=config)
        facts = gather_facts(found, read_configs(described))
        supports = probe_formats(target)
        loader = choose_loader(found, precision, facts, supports, target, config=described)
        loaded = loader(config=described)
    loaded.pipe.stopdown_decisions = loaded.decisions
    return loaded.pipe
