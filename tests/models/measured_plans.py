"""Plans that hold for the calls of given prompts: measured, for tests that need more than bounds give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stopdown.component_calls.components import runs_by_call
from stopdown.devices.device_choice import choose_device
from stopdown.pipelines.class_selection import select_class
from stopdown.pipelines.loader import complete_source, load_program
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.plans.calibrated import _plan_component, measure_plan
from stopdown.plans.call_recorder import STEPS, list_requests, play_calls
from stopdown.plans.plan_files import seal_plan
from stopdown.records import ComponentPlan, Plan
from stopdown.scaling import ComponentCall
from stopdown.sources.source import Source
from stopdown.sources.sources import fingerprint, resolve_source


def measure_pipeline(
    given: Any,
    *,
    prompts: Sequence[str | Mapping[str, Any]] = (),
    request: Request | None = None,
    residual: str | None = None,
    ranges: str | None = None,
) -> Plan:
    """Measure a pipeline, or the pipeline or component of a folder or file, in runs of these prompts.

    Args:
        prompts: texts or arguments of the pipeline's call; of a file that holds one component,
            arguments of that component's call.
    """
    source = resolve_source(given) if isinstance(given, (str, Path)) else given
    is_source = isinstance(source, Source)
    if is_source:
        source = select_class(complete_source(source), request or Request())
    pipe = load_program(source, torch_dtypes=torch.float32) if is_source else given
    wanted = dataclasses.replace(
        request or Request(), steps=getattr(request, "steps", None) or STEPS
    )
    is_pipeline = runs_by_call(pipe)
    way = residual or ("fp32" if is_pipeline else "native")
    if is_pipeline:
        pipe.set_progress_bar_config(disable=True)
        run = _play_prompts(pipe, prompts, wanted)
    else:

        def run() -> None:
            play_calls(pipe, prompts)

    made = measure_plan(pipe, run, residual=way, ranges=ranges)
    if is_source:
        known = (source.name, fingerprint(source), type(pipe).__name__)
        named = dict(zip(("source", "fingerprint", "pipeline"), known, strict=True))
        made = seal_plan(dataclasses.replace(made, **named))
    return made


def plan_component(name: str, module: Any, calls: Sequence[ComponentCall]) -> ComponentPlan:
    """Return the entry of a component in fp32 on the CPU, measured in these calls."""
    stored, device = {name: {"fp32": 8}}, choose_device("cpu")
    return _plan_component(name, module, calls, ("native", "measured"), stored, device)


def _play_prompts(
    pipe: Any, prompts: Sequence[str | Mapping[str, Any]], request: Request
) -> Callable[[], None]:
    requests = list_requests(pipe, prompts, request)

    def run() -> None:
        for one in requests:
            pipe(**build_arguments(pipe, one))

    return run
