"""Check at each call whether somebody loaded, fused or changed adapters on a component after its plan
was applied.

A plan scales weights; adapters that are loaded afterwards take the exponents of those by themselves
(`adapters`). Other modules that add to what is scaled make a picture that is wrong without being
black. So at each call of a planned component its modules are compared with those of the moment when the
plan was put on: which classes are there, which adapters each layer has, which of them are active, merged,
and how strong. No weight is read.

**Catches** an IP-Adapter that was loaded since, any layer replaced, an adapter that nothing scales;
adapters of the plan that were taken out, switched or given another strength, and new ones that add more to
a weight than there is headroom for.

**Does not catch** weights rewritten in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from stopdown.component_calls.component_interception import intercept_components
from stopdown.component_calls.components import find_component
from stopdown.errors import PlanError, warn_user
from stopdown.fold_names import RESCALED
from stopdown.interception.patches import Patches
from stopdown.module_calls.adapter_layers import list_adapter_names
from stopdown.module_calls.callee import Callee
from stopdown.records import ComponentPlan, Plan
from stopdown.scaling import CallWatch, ComponentCall, Rank, intercept, read_headroom
from stopdown.scaling.folding.adapters import list_misfitting, measure_growth

_REMEDY = (
    "Take the plan off (`applied.undo()`, or load the model again), load the adapter, and then make "
    "the plan: make_plan(pipe), or stopdown plan SOURCE --lora FILE."
)


@dataclass(frozen=True)
class ActiveAdapter:
    """One adapter of a component, summarised over all layers that have it.

    Attributes:
        layers: number of layers that have it.
        active, merged: number of these layers that use it, or have it merged into their weight.
        strengths: its distinct scales, sorted.
    """

    layers: int
    active: int
    merged: int
    strengths: tuple[float, ...]


@dataclass(frozen=True)
class Structure:
    """The structure of a component: its modules and adapters, without weights.

    Attributes:
        classes: of all its modules, in order.
        adapters: adapter name → its state.
        fused: names of the LoRAs that the pipeline has fused.
    """

    classes: tuple[type, ...]
    adapters: Mapping[str, ActiveAdapter]
    fused: frozenset[str]


def read_structure(module: torch.nn.Module, pipe: Any) -> Structure:
    """Read which modules and adapters a component has, to compare this later; PEFT isn't imported.

    Wrappers of `torch.compile` are left out.

    Args:
        pipe: the pipeline, which knows the names of fused LoRAs.
    """
    modules = tuple(x for x in module.modules() if "_orig_mod" not in x._modules)
    layers = [layer for layer in modules if hasattr(layer, "merged_adapters")]
    found: dict[str, list[Any]] = {}
    for layer in layers:
        for name in list_adapter_names(layer):
            found.setdefault(name, []).append(layer)
    adapters = {name: _read_adapter(name, held) for name, held in found.items()}
    fused = frozenset(getattr(pipe, "_merged_adapters", ()))
    return Structure(tuple(map(type, modules)), adapters, fused)


def _read_adapter(name: str, layers: list[Any]) -> ActiveAdapter:
    active = [x for x in layers if name in x.active_adapters and not x.disable_adapters]
    merged = [x for x in layers if name in x.merged_adapters]
    scales = {float(x.scaling[name]) for x in layers if name in getattr(x, "scaling", {})}
    return ActiveAdapter(len(layers), len(active), len(merged), tuple(sorted(scales)))


def list_new(before: Structure, after: Structure, module: torch.nn.Module | None) -> Iterator[str]:
    """Yield a clause for each adapter or module that is new since the plan, and that the plan doesn't
    scale.

    Args:
        before, after: structure of the component when the plan was applied, and now.
        module: the component; None if it has no exponents now, so that adapters need none.
    """
    misfitting = {} if module is None else list_misfitting(module)
    for name, why in sorted(misfitting.items()):
        if name not in before.adapters:
            layers = after.adapters[name].layers
            yield f"the adapter {name!r} was loaded into {layers} of its layers: {why.removesuffix('.')}"
    if after.classes != before.classes and after.adapters.keys() == before.adapters.keys():
        yield f"its modules have changed ({len(before.classes)} then, {len(after.classes)} now)"


def list_grown(
    module: torch.nn.Module, names: Collection[str], headroom_bits: float, certified: bool
) -> Iterator[str]:
    """Yield a clause for each new adapter that adds more to a layer's output than the plan's headroom
    allows.

    Args:
        names: adapters that the plan was made without.
        certified: whether the plan rests on bounds; then each other adapter that changes a layer is
            yielded too, as not covered by the certificate.

    Cost: for each layer of the adapters, a few products of its weight with a vector, and a host read.
    """
    for name in sorted(names):
        bits, path = measure_growth(module, name)
        if bits > headroom_bits:
            yield (
                f"the adapter {name!r} may enlarge the output of {path} by up to {bits:.1f} bits, and the "
                f"plan has {headroom_bits:.1f} bits of headroom"
            )
        elif certified and path:
            yield f"the adapter {name!r} isn't covered by its certificate"


def list_tuned(before: Structure, after: Structure, planned: Set[str]) -> Iterator[str]:
    """Yield a clause for each adapter of the plan that was taken out, switched, merged or given another
    strength.

    Args:
        before, after: structure of the component when the plan was applied, and now.
        planned: names of the adapters that the exponents were found with.
    """
    for name in planned & before.adapters.keys():
        then = before.adapters[name]
        now = after.adapters.get(name)
        if now is None:
            yield f"the adapter {name!r} was taken out"
        elif now.strengths != then.strengths:
            yield f"the adapter {name!r} has the strength {_show(now)}, it was {_show(then)}"
        elif (now.active, now.merged) != (then.active, then.merged):
            yield f"the adapter {name!r} was switched, merged or unmerged"


def _show(adapter: ActiveAdapter) -> str:
    return ", ".join(f"{x:g}" for x in adapter.strengths) or "none"


def _has_exponents(module: torch.nn.Module) -> bool:
    """Return whether exponents are on a component now; a copy has them without a watch of its own."""
    inner = getattr(module, "_orig_mod", module)
    return CallWatch.find(inner) is not None or RESCALED in vars(inner)


def watch_adapters(pipe: Any, plan: Plan, patches: Patches) -> None:
    """Check, at each call of a component in fp16, that its modules and adapters are those of the plan.

    Cost: one pass over the modules for each call, without a device synchronisation.
    """
    entries = {x.component: x for x in plan.components if x.precision == "fp16"}
    posts = {name: _Post(pipe, entry) for name, entry in entries.items()}

    def put(callee: Callee, layers: Patches) -> None:
        if callee.component_name in posts:
            intercept(callee, posts[callee.component_name], layers, Rank.PLAN)

    intercept_components(pipe, put, patches)


class _Post:
    """Callable around a component's calls, which checks that modules and adapters are those of its plan."""

    def __init__(self, pipe: Any, entry: ComponentPlan) -> None:
        self.pipe, self.entry = pipe, entry
        found = find_component(pipe, entry.component)
        self.known = read_structure(torch.nn.Module() if found is None else found, pipe)
        self.planned = self.known.adapters.keys()

    def __call__(self, call: ComponentCall) -> Any:
        module = find_component(self.pipe, self.entry.component)
        if module is not None and (now := read_structure(module, self.pipe)) != self.known:
            self._compare(module, now)
        return call.proceed()

    def _compare(self, module: torch.nn.Module, now: Structure) -> None:
        name, scaling = self.entry.component, self.entry.in_force
        is_planned = bool(scaling.exponents or scaling.multiplies)
        is_off = is_planned and not _has_exponents(module)  # a guard took them off
        added = list(list_new(self.known, now, None if is_off else module))
        if added and is_planned:
            raise PlanError(
                f"{name} has changed since its plan was applied: {'; '.join(added)}.",
                expected="Its weights are scaled by powers of two, and whatever is added to them must be "
                "scaled in the same way.",
                remedy=_REMEDY,
            )
        if is_off:
            self.known = now
            return
        others = now.adapters.keys() - self.planned
        changed = [x for x in others if now.adapters[x] != self.known.adapters.get(x)]
        grown = list_grown(module, changed, read_headroom(scaling), scaling.certified)
        changes = [*added, *list_tuned(self.known, now, self.planned), *grown]
        if changes:
            warn_user(
                f"{name} has changed since its plan was made: {'; '.join(changes)}. Its results are "
                f"right, but its range wasn't measured in this state. {_REMEDY}"
            )
        self.known = now
