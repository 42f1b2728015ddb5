"""`load`: load a Diffusers pipeline in suitable precisions, with a guard on it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopdown.argument_types import check_type
from stopdown.devices.device_choice import Device, choose_device, name_device
from stopdown.errors import OptionError, warn_user
from stopdown.number_formats import parse_bytes
from stopdown.pipelines.drawn_inputs import complete_request
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.requests import Request
from stopdown.plans.applier import AppliedPlan
from stopdown.plans.plan_choice import certified_on_arrival, choose_plan
from stopdown.plans.planned_loader import load_plan
from stopdown.plans.precision import parse_request, write_request
from stopdown.records import MemoryPlan, Plan
from stopdown.runtime.guard import Guard, GuardOptions
from stopdown.runtime.memory_limits import ask_memory, fit_run
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.source import OPTIONAL_COMPONENTS, Source
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import is_complete, resolve_source

if TYPE_CHECKING:
    import torch


def load(
    source: str | Path,
    *,
    precision: str | Path | torch.dtype | Mapping[str, Any] | Plan = "auto",
    guard: bool = True,
    device: str | torch.device = "auto",
    memory: str = "auto",
    config: str | Path | None = None,
    revision: str | None = None,
    variant: str | None = None,
    **parts: Any,
) -> Any:
    """Load a Diffusers pipeline, each component in a precision that fits the device and the checkpoint.

    The pipeline is an ordinary one under a guard, which changes no bit of a run without a fault;
    `pipe.stopdown_guard.record` has its findings and repairs. `stopdown.guard(pipe)` replaces this guard as
    long as it is active. `pipe.stopdown_decisions` lists the decisions with their reasons.

    Args:
        source: Hub id, Diffusers folder, single safetensors file or bundled model.
        precision: `"auto"`, a precision (`"fp16"`, `torch.float16`), one for each component
            (`"transformer=bf16,vae=fp32"`, `{"transformer": torch.bfloat16}`), or a plan: a `Plan`,
            or the path of its file.
        guard: False leaves the pipeline unwatched.
        device: `"auto"`, `"cuda"`, `"cuda:1"`, `"mps"`, `"cpu"`, or a `torch.device`.
        memory: limit for runs on the device: `"auto"` for all of its memory; an amount (`"8GiB"`); or
            `"none"`. Weights that don't fit beside a run at the model's own size are offloaded to host
            memory or read from their files. Don't call `.to()` on such a pipeline.
        config: for a single file, a Diffusers folder or Hub id with its configs.
        revision: branch, tag or commit of a Hub id.
        variant: of the weights, if there are several, such as `"fp16"`.
        **parts: replacements of the pipeline's own scheduler, tokenizer or safety checker, as in Diffusers:
            `scheduler=...`, `safety_checker=None`.

    Raises:
        SourceError: the model is missing, damaged or refused.
        OptionError: the precision, the device or a part is unknown or does not work here.
        PlanError: the plan is damaged or belongs to another checkpoint.

    Examples:
        >>> pipe = stopdown.load("shapes", precision="fp32", device="cpu")
        >>> pipe.transformer.dtype
        torch.float32
        >>> [decision.component for decision in pipe.stopdown_decisions]
        ['text_encoder', 'transformer', 'vae.encode', 'vae.decode']
    """
    check_type(
        "load(guard=...)", guard, bool, "It is True or False.", "Use guard=False, or leave it out."
    )
    asked = precision if isinstance(precision, Plan) else write_request(precision)
    target = choose_device(name_device("load", device) or "auto")
    resolve = functools.partial(
        resolve_source, source, revision=revision, config=config, variant=variant
    )
    found = resolve(with_weights=False)
    if found.kind == "hub" and not is_complete(found):
        with certified_on_arrival(found, asked, target):
            found = resolve()
    verify_source(found)
    with quiet_libraries():
        found = complete_source(found)
        _check_parts(parts, found)
        limit = _ask_memory(memory, asked, target)
        plan = (
            dataclasses.replace(asked, memory=limit)
            if isinstance(asked, Plan)
            else choose_plan(found, asked, target, memory=limit)
        )
        loaded = load_plan(found, plan, target)
        loaded.pipe.register_modules(**parts)
        if limit is not None:
            loaded = _place(loaded, found, target)
    pipe = loaded.pipe
    pipe.stopdown_decisions = loaded.decisions
    if guard:
        options = GuardOptions(decisions=loaded.decisions)
        pipe.stopdown_guard = Guard(pipe, options).put_on()
    return pipe


def _ask_memory(memory: str, asked: str | Plan, target: Device) -> MemoryPlan | None:
    """Return the memory limit that a caller of `load` asked for; None for no limit.

    The CPU has one only if an amount is given.
    """
    check_type(
        "load(memory=...)", memory, str, 'It is "auto", an amount or "none".', 'Use memory="8GiB".'
    )
    if memory not in ("auto", "none"):
        parse_bytes(memory)
    if memory == "auto" and target.type == "cpu":
        return None
    targets = () if isinstance(asked, Plan) else parse_request(asked)
    return ask_memory(None if memory == "auto" else memory, targets=targets)


def _place(loaded: AppliedPlan, source: Source, target: Device) -> AppliedPlan:
    """Place a pipeline's weights so that runs at the model's own size fit into memory.

    Weights that have to be offloaded stay so as long as the pipeline exists.
    """
    request = complete_request(loaded.pipe, Request())
    loaded = fit_run(loaded, request, target, warn_user)
    if loaded.offloader is not None:
        loaded.offloader.__enter__()  # the layers on the components hold it
    return loaded


def _check_parts(parts: Mapping[str, Any], source: Source) -> None:
    """Refuse replacements in a call of `load` that the pipeline doesn't have as parts, and those with
    weights.
    """
    words = {"dtype": "precision", "torch_dtype": "precision", "device_map": "device"}
    components = source.components
    for name, part in parts.items():
        if name not in (*components, *OPTIONAL_COMPONENTS):
            raise OptionError(
                f"load() takes no {name!r}.",
                expected=f"The parts of this pipeline are {', '.join(components)}.",
                remedy=f"Write {words[name]}=... instead."
                if name in words
                else "Leave it out, or set it on the pipeline that load() returns.",
            )
        if isinstance(part, (str, int, float)):
            raise OptionError(
                f"load({name}=...) was given {part!r:.60}, a {type(part).__name__}.",
                expected="It takes parts without weights: a scheduler, a tokenizer, or None.",
                remedy=f"Make it with its class, or leave {name} out.",
            )
        is_model = hasattr(part, "parameters") or (name in components and source.has_weights(name))
        if part is not None and is_model:
            raise OptionError(
                f"load() takes no other {name}: it has weights, and its precision would follow "
                "from the weights that it replaces.",
                expected="Parts without weights, and None for a part that is left out.",
                remedy=f"Set it afterwards, in the dtype that it is to run in: pipe.{name} = ...",
            )
