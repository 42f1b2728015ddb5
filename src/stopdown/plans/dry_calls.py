"""Find the calls that a pipeline makes of its components by a dry run: without values, or with random ones.

Random values suffice to measure the effect of a changed eps, but not the ranges that a plan needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stopdown.component_call_names import name_call
from stopdown.component_calls.components import find_callees, find_components
from stopdown.errors import SourceError, take_first_line
from stopdown.interception.module_paths import ModulePaths
from stopdown.interception.patches import Patches
from stopdown.module_calls.call_inputs import find_largest_step
from stopdown.module_calls.call_interception import drop_upcast
from stopdown.numerics import iterate_tensors
from stopdown.pipelines.allowed_sizes import find_grid, find_own_sides, read_pipe_configs
from stopdown.pipelines.dry_run import (
    ComponentFailed,
    DryCall,
    Listener,
    dry_run,
    make_arguments,
)
from stopdown.pipelines.requests import Request, find_frames, find_pipeline_argument
from stopdown.pipelines.skeletons import build_skeleton, copy_skeleton
from stopdown.plans.call_recorder import MOST_FRAMES
from stopdown.scaling import ComponentCall, put_cast
from stopdown.sources.source import Source

SMALL = {"height": 256, "width": 256, "frames": 9}
"""Sizes of a call that measures the effect of a changed eps, which is the same in a small picture."""


def shrink_run(pipe: Any, request: Request) -> Request:
    """Return a request with smaller sizes (at most `SMALL`), so that a measurement takes less time.

    Requested sizes stay, and so do those of a model that supports no others.
    """
    own, grid = find_own_sides(pipe), find_grid(read_pipe_configs(pipe))
    taken = inspect.signature(type(pipe).__call__).parameters
    if request.height or request.width or grid.only or own is None or "height" not in taken:
        return request
    most = max(1, SMALL["height"] // grid.side) * grid.side
    if max(own) > most:
        request = dataclasses.replace(request, height=min(own[0], most), width=min(own[1], most))
    if request.frames is None and find_frames(pipe, {}) > SMALL["frames"]:
        few = (SMALL["frames"] - 1) // grid.frames * grid.frames + 1
        request = dataclasses.replace(request, frames=few)
    return request


def list_source_calls(
    source: Source, sizes: Mapping[str, int | None] | None = None
) -> tuple[dict[str, list[ComponentCall]], str]:
    """Return the calls that a source's pipeline makes in a dry run, one of each kind for each component.

    Args:
        sizes: `height`, `width` and `frames`; None for the pipeline's defaults.

    Returns:
        Component → its calls, and the reason why the dry run ended early ("" if it didn't).
    """
    if not source.pipeline_class:
        raise SourceError(
            f"The configuration {source.described} is that of a component, and doesn't say "
            "how a pipeline calls it.",
            expected="Calls come from the pipeline's own code, which its configurations describe.",
            remedy="Give the folder of the whole pipeline as config (its weights aren't read).",
        )
    dtypes = dict.fromkeys(source.components, torch.float16)
    skeleton = build_skeleton(source, dtypes, keep_fp32=False)
    targets = {
        find_pipeline_argument(name, type(skeleton)): size for name, size in (sizes or {}).items()
    }
    return _list_calls(skeleton, {name: size for name, size in targets.items() if name and size})


def list_pipeline_calls(
    pipe: Any, arguments: Mapping[str, Any]
) -> tuple[dict[str, list[ComponentCall]], str]:
    """Return the calls that a loaded pipeline makes in a dry run, one of each kind for each component.

    The pipeline isn't changed. Returns as `list_source_calls`.

    Args:
        arguments: of the pipeline call; others have their defaults.
    """
    dtypes = dict.fromkeys(find_components(pipe), torch.float16)
    skeleton = copy_skeleton(pipe, dtypes)
    skeleton.set_progress_bar_config(disable=True)
    return _list_calls(skeleton, arguments)


def _list_calls(
    skeleton: Any, arguments: Mapping[str, Any]
) -> tuple[dict[str, list[ComponentCall]], str]:
    arguments = {**make_arguments(skeleton), **arguments}
    listener = CallListener()
    patches = Patches()  # never undone: the skeleton is thrown away
    for callee in find_callees(skeleton):
        put_cast(callee, torch.float16, patches)
        drop_upcast(callee.owner, patches)
    try:
        dry_run(skeleton, arguments, [listener])
    except Exception as error:  # whatever code raises without values: what was seen before counts
        why = take_first_line(error.error if isinstance(error, ComponentFailed) else error)[:200]
        return listener.calls, f"The pipeline couldn't be run dry to its end: {why}"
    return listener.calls, ""


class CallListener(Listener):
    """Keeps one call of each kind for each component during a dry run: the one with the largest timestep.

    Z-Image's timesteps go from 0 to 1, and a timestep of 0 doesn't show in which unit the others are.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[ComponentCall]] = {}

    def inside(self, run: DryCall, paths: ModulePaths) -> contextlib.AbstractContextManager[object]:
        """Store a component call that the dry run is about to execute, as the first call of its kind."""
        self.calls.setdefault(run.call.callee.component_name, []).append(
            dataclasses.replace(run.call, below=None)
        )
        return contextlib.nullcontext()

    def end(self, run: DryCall) -> None:
        """Replace the stored call of a finished call's kind if the finished one has a larger timestep.

        If a pipeline only decodes, a few frames of the output also become the argument of a made-up
        `encode`, because a plan holds for both directions.
        """
        callee = run.call.callee
        made = self.calls.get(callee.component_name, [])
        for at, known in enumerate(made):
            if known.key == run.call.key and _read_step(run.call) > _read_step(known):
                made[at] = dataclasses.replace(run.call, below=None)
        if callee.method != "decode" or any(x.callee.method == "encode" for x in made):
            return
        picture = next(iterate_tensors(run.returned), None)
        if picture is None:
            return
        shape = list(picture.shape)
        if len(shape) == 5:
            shape[2] = min(shape[2], MOST_FRAMES)
        if len(shape) == 5 or "num_frames" not in made[-1].kwargs:
            encode = dataclasses.replace(
                callee, name=name_call(callee.component_name, "encode"), method="encode"
            )
            picture = torch.zeros(shape, dtype=torch.float16)
            made.append(ComponentCall(encode, (picture,), {}, made_up=True))


def _read_step(call: ComponentCall) -> float:
    return find_largest_step(call.args, call.kwargs, call.callee.argument_names)


def draw_calls(source: Source, request: Request) -> dict[str, list[ComponentCall]]:
    """Return the calls that a pipeline makes, one of each kind for each component, with random fp32 values.

    Args:
        request: its sizes are used; `SMALL` if it has none.
    """
    asked = {name: getattr(request, name) for name in SMALL}
    sizes = asked if any(asked.values()) else SMALL
    calls, unseen = list_source_calls(source, sizes)
    if unseen:
        calls, _ = list_source_calls(source)
    return {name: [_draw(call) for call in listed] for name, listed in calls.items()}


def _draw(call: ComponentCall) -> ComponentCall:
    generator = torch.Generator().manual_seed(0)

    def fill(path: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _fill(str(path[-1]), tuple(value.shape), value.dtype, generator)

    args, kwargs = pytree.tree_map_with_path(fill, (call.args, call.kwargs))
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def _fill(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Draw plausible values for an argument of this name, shape and dtype."""
    if dtype == torch.bool or "mask" in name:
        return torch.ones(shape, dtype=torch.float32 if dtype.is_floating_point else dtype)
    if "timestep" in name or "sigma" in name:
        return torch.full(shape, 500.0 if dtype.is_floating_point else 500).to(dtype).float()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator)
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 32).reshape(shape).to(dtype)
