"""Whether a component is still what its plan was put on: adapters that were loaded, fused or tuned.

A plan scales weights; a LoRA that is loaded afterwards adds to what is scaled by another power of
two, and the picture is wrong without being black. So at each call of a planned component its
modules are compared with those of the moment when the plan was put on: which classes stand there,
which adapters each layer has, which of them are active, merged, and how strong. No weight is read.

**Catches** a LoRA or IP-Adapter that was loaded since, fused with the pipeline's `fuse_lora` (also
when it was unloaded again), taken out, switched or given another strength; any layer replaced.
**Does not catch** weights rewritten in place: an adapter that was loaded, fused and unloaded on the
component itself between two calls, without the pipeline's own methods.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stopdown.errors import PlanError, StopdownWarning
from stopdown.patches import Patches
from stopdown.pipelines.call_interception import Call, Rank, intercept, intercept_components
from stopdown.pipelines.components import Callee, find_component
from stopdown.records import ComponentPlan, Plan

_REMEDY = (
    "Take the plan off (`applied.undo()`, or load the model again), load the adapter, and then make "
    "the plan: make_plan(pipe)."
)


@dataclass(frozen=True)
class Adapter:
    """One adapter in a component, over all layers that have it.

    Attributes:
        layers: how many have it.
        active, merged: in how many of them it is used, or merged into the weight.
        strengths: its scales, sorted.
    """

    layers: int
    active: int
    merged: int
    strengths: tuple[float, ...]


@dataclass(frozen=True)
class Structure:
    """What a component is made of.

    Attributes:
        classes: of all its modules, in their order.
        adapters: by name.
        fused: names of the adapters that the pipeline has fused.
    """

    classes: tuple[type, ...]
    adapters: Mapping[str, Adapter]
    fused: frozenset[str]


def read_structure(module: torch.nn.Module, pipe: Any) -> Structure:
    """What a component is made of now; adapter layers are known by their attributes."""
    modules = tuple(module.modules())
    layers = [layer for layer in modules if hasattr(layer, "merged_adapters")]
    found: dict[str, list[Any]] = {}
    for layer in layers:
        for name in _list_names(layer):
            found.setdefault(name, []).append(layer)
    adapters = {name: _read_adapter(name, held) for name, held in found.items()}
    fused = frozenset(getattr(pipe, "_merged_adapters", ()))
    return Structure(tuple(map(type, modules)), adapters, fused)


def _list_names(layer: Any) -> set[str]:
    kinds = getattr(layer, "adapter_layer_names", ())
    return {name for kind in kinds for name in getattr(layer, kind, {})}


def _read_adapter(name: str, layers: list[Any]) -> Adapter:
    active = [x for x in layers if name in x.active_adapters and not x.disable_adapters]
    merged = [x for x in layers if name in x.merged_adapters]
    scales = {float(x.scaling[name]) for x in layers if name in getattr(x, "scaling", {})}
    return Adapter(len(layers), len(active), len(merged), tuple(sorted(scales)))


def list_new(before: Structure, after: Structure) -> Iterator[str]:
    """What was added that the exponents do not fit."""
    for name, adapter in after.adapters.items():
        if name not in before.adapters:
            yield f"the adapter {name!r} was loaded into {adapter.layers} of its layers"
    for name in sorted(after.fused - before.fused - before.adapters.keys()):
        yield f"the adapter {name!r} was fused into the pipeline's weights"
    bare = before.classes, before.adapters.keys()
    if (after.classes, after.adapters.keys()) != bare and not _explains(before, after):
        yield f"its modules are others ({len(before.classes)} then, {len(after.classes)} now)"


def _explains(before: Structure, after: Structure) -> bool:
    """True when adapters that came or went account for modules that came or went."""
    return after.adapters.keys() != before.adapters.keys()


def list_tuned(before: Structure, after: Structure) -> Iterator[str]:
    """What was changed of adapters that the exponents were found with."""
    for name, then in before.adapters.items():
        now = after.adapters.get(name)
        if now is None:
            yield f"the adapter {name!r} was taken out"
        elif now.strengths != then.strengths:
            yield f"the adapter {name!r} has the strength {_show(now)}, it was {_show(then)}"
        elif (now.active, now.merged) != (then.active, then.merged):
            yield f"the adapter {name!r} was switched, merged or unmerged"


def _show(adapter: Adapter) -> str:
    return ", ".join(f"{x:g}" for x in adapter.strengths) or "none"


def watch_adapters(pipe: Any, plan: Plan, patches: Patches) -> None:
    """Compare the planned components with what they are now, at each call of them.

    Raises, at that call:
        PlanError: something was added that the exponents do not fit.

    Cost: one walk over the modules for each call; no device is asked.
    """
    entries = {x.component: x for x in plan.components if x.precision == "fp16"}
    posts = {name: _Post(pipe, entry) for name, entry in entries.items()}

    def put(callee: Callee, layers: Patches) -> None:
        if callee.component_name in posts:
            intercept(callee, posts[callee.component_name], layers, Rank.PLAN)

    intercept_components(pipe, put, patches)


class _Post:
    """Intercepts one component call; knows what the component was when it was put there."""

    def __init__(self, pipe: Any, entry: ComponentPlan) -> None:
        self.pipe, self.entry = pipe, entry
        found = find_component(pipe, entry.component)
        self.known = read_structure(torch.nn.Module() if found is None else found, pipe)

    def __call__(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = find_component(self.pipe, self.entry.component)
        if module is not None:
            self._compare(read_structure(module, self.pipe))
        return call(*args, **kwargs)

    def _compare(self, now: Structure) -> None:
        if now == self.known:
            return
        name, added = self.entry.component, list(list_new(self.known, now))
        scaling = self.entry.scaling
        scaled = scaling.exponents or scaling.multiplies
        if added and scaled:
            raise PlanError(
                f"{name} is not what its plan was put on: {'; '.join(added)}.",
                expected="Its weights are scaled by powers of two that an adapter must share.",
                remedy=_REMEDY,
            )
        changes = [*added, *list_tuned(self.known, now)]
        if changes:
            warnings.warn(
                f"{name} is not quite what its plan was made for: {'; '.join(changes)}. What it "
                f"computes is right, but its range was not measured so. {_REMEDY}",
                StopdownWarning,
                stacklevel=2,
            )
        self.known = now
