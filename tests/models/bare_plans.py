"""Plans without exponents, as a user may write them."""

from __future__ import annotations

from pathlib import Path

import torch

from stopdown.component_calls.components import find_components
from stopdown.devices.format_support import Support
from stopdown.pipelines.loader import load_pipeline
from stopdown.plans import plan_files as files
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


ENTRY = ComponentPlan(
    component="transformer",
    class_name="Linear",
    weights="aa",
    precision="fp16",
    scaling=Scaling(
        exponents={"weight": -6, "bias[0:2]": 3, "bias[2:4]": 2},
        headroom_bits=3.25,
        tightest="Linear: (linear)",
        pinned={"special_bessel_j0": ("Linear:",)},
    ),
    calls=4,
    reasons=("A reason.",),
)


PLAN = files.seal_plan(
    Plan(
        source="owner/name",
        fingerprint="f" * 64,
        pipeline="CogVideoXPipeline",
        precision="fp16",
        versions=files.read_class_versions(),
        components=(ENTRY,),
        device="cpu",
        elapsed_s=1.5,
    )
)


GOOD, MISSING = Support(True, True, 0.2, "Native."), Support(False, True, 4.0, "Emulated.")
