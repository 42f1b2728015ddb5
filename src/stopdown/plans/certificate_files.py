"""`write_certificate`: write the proof of a plan's bounds to a file that `stopdown-verify` can check.

The graphs that the plan was made for are translated into the few rules of `stopdown_verify`
(`scaling/certificate_graphs`), which then derives each bound by itself.

Not covered: single files, models with LoRAs, and classes that rename their weights.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import stopdown_verify
from stopdown.errors import SourceError
from stopdown.files.outputs import written_beside
from stopdown.mapped_weights import Load
from stopdown.pipelines.loader import complete_source
from stopdown.plans.certified import find_tied_names as find_tied
from stopdown.plans.certified import open_component
from stopdown.records import ComponentPlan, Plan, describe_other
from stopdown.scaling import TracedCalls
from stopdown.sources.hub import Progress
from stopdown.sources.source import Source, list_weight_files

KIND = "certificate"


def write_certificate(
    plan: Plan, source: Source, path: Path, traced: Mapping[str, TracedCalls],
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the proof of a plan's bounds to a JSON file that `stopdown-verify` can check; return its
    content.

    Args:
        plan: made from this source's weights alone.
        source: a folder with a whole pipeline.
        path: of the JSON file.
        traced: component → its calls, as `certify_plan` captured them.

    Cost: a check of the file: some passes over the weights. A component whose plan was cached is captured.
    """
    whole = complete_source(source)
    if source.kind not in ("folder", "hub", "bundled") or source.loras:
        raise SourceError(
            f"A certificate is of a folder as Diffusers saves it, and {source.name} is none.",
            expected="It names the files of weights by component, without LoRAs.",
            remedy="Save the pipeline with save_pretrained, and plan that folder.",
        )
    components, left = [], {}
    for entry in plan.components:
        scaling = entry.in_force
        if not scaling.values or "" in scaling.fp32_modules:
            left[entry.component] = f"it runs in {entry.precision}, or has no bounds"
            continue
        try:
            components.append(_export_component(whole, entry, traced[entry.component], progress))
        except stopdown_verify.Refused as error:
            left[entry.component] = f"no rule of the certificate shows it: {error}"
    made = {"kind": KIND, "plan": plan.seal, "components": components, "left": left}
    made["seal"] = stopdown_verify.seal(made)
    replaces = functools.partial(describe_other, KIND)
    with written_beside(path, option="for the certificate", replaces=replaces) as part:
        part.write_text(json.dumps(made), encoding="utf-8")
    return made


def _export_component(
    source: Source, entry: ComponentPlan, traced: TracedCalls, progress: Progress | None
) -> dict[str, Any]:
    name, module = entry.component, traced.module
    files = [path.name for path in list_weight_files(source)[name]]
    if progress is not None:
        progress("certificate", name, 0, len(files))
    with open_component(source, name, module) as load:
        made = export_calls(traced, entry, source.path, files, load)
    stopdown_verify.check_component(made, source.path, write=True)
    return made


def export_calls(
    traced: TracedCalls,
    entry: ComponentPlan,
    folder: Path,
    files: Sequence[str],
    load: Load,
) -> dict[str, Any]:
    """Return a component's entry in a certificate, with rules for its bounds but not yet the bounds.

    Args:
        files: names of the component's weight files.
        load: returns a tensor by its name.
    """
    tensors = stopdown_verify.open_weights(folder / entry.component, files, {})
    made = traced.export(entry.in_force, tensors, find_tied(traced.module), load)
    return {
        "component": entry.component,
        "class": entry.class_name,
        "files": list(files),
        **made,
        "fp32_modules": list(entry.in_force.fp32_modules),
    }
