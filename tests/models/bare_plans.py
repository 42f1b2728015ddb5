"""Plans without exponents, as a user may write them."""

from __future__ import annotations

from pathlib import Path

import torch

from stopdown.component_calls.components import find_components
from stopdown.pipelines.loader import load_pipeline
from stopdown.plans.plan_files import read_class_versions, seal_plan, write_plan
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.sources.sources import resolve_source


def write_bare_plan(folder: Path, path: Path) -> None:
    """Write a plan that puts every component of a pipeline folder in fp16 as it is."""
    pipe = load_pipeline(resolve_source(str(folder)), torch_dtypes=torch.float32)
    entries = tuple(
        ComponentPlan(
            name, type(module).__name__, sample_weights(module), "fp16", scaling=Scaling()
        )
        for name, module in find_components(pipe).items()
    )
    kind, versions = type(pipe).__name__, read_class_versions()
    plan = Plan(str(folder), "", kind, "fp16", versions, entries, "cpu", 0.0)
    write_plan(seal_plan(plan), path)
