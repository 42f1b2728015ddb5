"""`apply_plan`: apply a plan to a pipeline after checking that it belongs there, and undo it exactly.

If a call fails because a component was cast after its plan was put on (`pipe.unet.float()`), the dtypes
of all components are compared with those that the plan left, and the error names the cast.

**Catches** another checkpoint, other classes, other versions of them, adapters that were loaded since,
components that are missing or new: every difference in one message; exponents with which a weight
leaves the format that it is cast to, or vanishes in it; `.float()`, `.half()`, `.to(dtype)` of
components and of the whole pipeline, if a call fails.

**Does not catch** weights that differ only between the sampled values; hooks that were put on or taken
off since a plan was made; a cast after which every call still runs: the component then computes in its
new dtype; what a guard watches: it explains or repairs such calls itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from stopdown.component_call_names import name_component
from stopdown.component_calls.attribute_walk import find_parts
from stopdown.component_calls.component_interception import intercept_components
from stopdown.component_calls.components import (
    cast_component_,
    find_adapter,
    find_component,
    find_components,
    find_stage,
    put_precision,
    read_precisions,
)
from stopdown.component_calls.stated_dtypes import state_dtypes
from stopdown.diagnosis.texts import is_refusal
from stopdown.errors import PlanError, ScalingError, warn_user
from stopdown.fold_names import RESCALED, name_parameters
from stopdown.interception.component_locks import find_lock
from stopdown.interception.module_paths import casts_weights
from stopdown.interception.patches import Patches, SameInCopies
from stopdown.mapped_weights import put_, widen_
from stopdown.memory.offloader import Offloader
from stopdown.module_calls.adapter_layers import is_read_by_libraries
from stopdown.module_calls.call_interception import drop_upcast, find_slot, has_layer
from stopdown.module_calls.callee import Callee
from stopdown.module_calls.module_code import list_foreign_code
from stopdown.number_formats import FORMATS, list_some, name_dtype
from stopdown.numerics import is_away
from stopdown.plans.adapter_check import watch_adapters
from stopdown.plans.plan_files import read_class_versions, take_plan
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.scaling import (
    CallWatch,
    ComponentCall,
    Rank,
    StoredWeight,
    WatchOptions,
    cast_,
    fold_scaling,
    has_more_than_folds,
    intercept,
    list_misfits,
    load_scaled,
    put_cast,
)
from stopdown.sources.source import Source
from stopdown.sources.sources import fingerprint
from stopdown.weight_checks import find_quantised

PLANNED = "stopdown_planned"
"""Attribute that a module has while a plan or a repair is applied to it, even one without exponents."""

_REMEDY = "Load the checkpoint in fp32 without adapters, or make a plan: stopdown plan SOURCE."


class AppliedEntry(SameInCopies):
    """A plan's entry for a component, as it is applied to the component's module.

    A guard finds it on the module. It removes the entry for a repair, and applies it again afterwards.

    Attributes:
        plan: the plan with the entry.
        patches: changes to the module: the entry, or a guard's repairs in its place.
        is_over: the entry was removed for good.
        help: options of the watch on the module's calls while no guard is active.
    """

    def __init__(
        self, module: torch.nn.Module, entry: ComponentPlan, put: Callable[[Patches], None]
    ) -> None:
        """Prepare to apply an entry; `put_on` does it.

        Args:
            put: applies the entry to the module; called again after a repair.
        """
        self.module, self.entry, self._put = module, entry, put
        self.plan, self.patches, self.is_over = Plan(""), Patches(), False
        self.help = WatchOptions(entry.component)

    def put_on(self) -> AppliedEntry:
        """Put a plan's entry (exponents, casts) on its module after other threads' calls; return `self`."""
        if self.is_over:
            return self
        with find_lock(self.module).changing():
            self.patches.set_attribute(self.module, PLANNED, self)
            try:
                self._put(self.patches)
            except BaseException:
                self.patches.undo()
                raise
        return self

    def undo(self) -> None:
        """Remove the entry, or the repairs in its place, from the module for good."""
        self.is_over = True
        if self.patches:
            with find_lock(self.module).changing():
                self.patches.undo()


def find_applied(module: torch.nn.Module) -> AppliedEntry | None:
    """Return the plan entry applied to a module; None if there is none, or while a repair replaces it."""
    found = vars(module).get(PLANNED)
    return found if isinstance(found, AppliedEntry) and found.module is module else None


def join_plans(plans: Sequence[Plan]) -> Plan | None:
    """Merge the plans of a program's components into one plan; return None if they are of different
    checkpoints.
    """
    if len({(x.source, x.fingerprint) for x in plans}) != 1:
        return None
    if all(plan is plans[0] for plan in plans):
        return plans[0]
    components = {entry.component: entry for plan in plans for entry in plan.components}
    return dataclasses.replace(plans[0], components=tuple(components.values()), seal="")


@dataclass(eq=False, repr=False)
class AppliedPlan:
    """A plan that is applied to a pipeline or another program; `undo` removes it.

    Attributes:
        decisions: how each component call runs, as written to records.
        patches: casts and checks around the component calls, and the second copy of an autoencoder whose
            two directions run in different precisions.
        entries: component → the entry applied to its module, which holds it: it goes with the module.
        offloader: keeps runs within a memory limit while it is entered; None without a limit.
    """

    pipe: Any
    plan: Plan
    decisions: tuple[ComponentPlan, ...] = ()
    patches: Patches = field(default_factory=Patches)
    entries: WeakValueDictionary[str, AppliedEntry] = field(default_factory=WeakValueDictionary)
    offloader: Offloader | None = None

    def __repr__(self) -> str:
        return (
            f"AppliedPlan({self.plan.source} on a {type(self.pipe).__name__}, .undo() takes it off)"
        )

    def end(self) -> None:
        """Mark the plan's entries as removed for good, so that a guard that ends later leaves them off."""
        for entry in self.entries.values():
            entry.is_over = True

    def undo(self) -> None:
        """Restore the pipeline, bit for bit if its old weights were kept. A second call does nothing."""
        self.patches.undo()
        for entry in reversed(list(self.entries.values())):
            entry.undo()

    def __enter__(self) -> AppliedPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def apply_plan(pipe: Any, plan: Plan | str | Path, *, cast: bool = True) -> AppliedPlan:
    """Apply a plan to a pipeline in place: fold exponents into the weights, and cast components.

    Modules that a class's authors keep in fp32 (T5's `wo`) are cast as well; the exponents make them fit.

    Args:
        pipe: a Diffusers pipeline of the plan's checkpoint, in fp32 or as stored, on any device; or
            another object that `guard` accepts, if the plan was made for it.
        plan: a `Plan`, or the path of its file.
        cast: False only folds: every dtype stays, and in fp32 so does every bit of the outputs.

    Returns:
        A handle with `.undo()`, also a context manager. The old weights stay in memory while the plan is
        applied, for calls that it doesn't cover; `load` doesn't keep them.

    Raises:
        PlanError: the plan doesn't belong to this pipeline; the message lists all differences. Nothing was
            changed.
        InputError: the file isn't a plan, or `pipe` has no modules.

    Examples:
        >>> module = torch.nn.Linear(4, 4)
        >>> program = {"denoiser": module}
        >>> plan = stopdown.make_plan(program, lambda: module(torch.ones(1, 4)))
        >>> with stopdown.apply_plan(program, plan):
        ...     module.weight.dtype
        torch.float16
        >>> module.weight.dtype
        torch.float32
    """
    find_parts(pipe)
    plan = take_plan(plan)
    check_plan(pipe, plan)
    return put_plan(pipe, plan, functools.partial(apply_entry, cast=cast), casts=cast)


def put_plan(
    pipe: Any,
    plan: Plan,
    put: Callable[[torch.nn.Module, ComponentPlan], AppliedEntry],
    *,
    casts: bool = True,
) -> AppliedPlan:
    """Apply a plan's entries to a program's components, then add casts and checks around their calls.

    All ways of loading a pipeline with a plan call this.

    Args:
        put: applies an entry to a module in memory (`apply_entry`), or to its weights as they are read
            (`load_entry`).
        casts: False leaves out the layers around the calls, except for the check of adapters.
    """
    applied = AppliedPlan(pipe, plan)
    try:
        for entry in plan.components:
            if entry.precision != "as loaded":
                found = put(_find(pipe, entry.component), entry)
                applied.entries[entry.component], found.plan = found, plan
        if casts:
            put_boundaries(pipe, plan, applied.patches)
        watch_adapters(pipe, plan, applied.patches)
    except ScalingError as error:
        applied.undo()
        raise _explain_misfit(plan, error) from error
    except BaseException:
        applied.undo()
        raise
    return applied


def _explain_misfit(plan: Plan, error: ScalingError) -> PlanError:
    return PlanError(
        f"The plan for {plan.source} doesn't fit the pipeline: {error.what}", remedy=_REMEDY
    )


def check_plan(pipe: Any, plan: Plan) -> None:
    for entry in plan.components:
        module = find_component(pipe, entry.component)
        away = (
            [name for name, x in module.named_parameters() if is_away(x)]
            if module is not None
            else []
        )
        if away and entry.precision != "as loaded":
            raise PlanError(
                f"{entry.component} has no values in {len(away)} of its weights, {away[0]} is the first: "
                "they are stored elsewhere between calls, or were never loaded.",
                expected="A plan is written into the weights.",
                remedy="Put the plan on first, and offload the pipeline afterwards.",
            )
    refuse_differences(plan, [*compare_versions(plan), *compare_components(pipe, plan)])


def apply_entry(
    module: torch.nn.Module,
    entry: ComponentPlan,
    *,
    cast: bool = True,
    fold: bool = True,
    savers: tuple[str, ...] = (),
) -> AppliedEntry:
    """Apply a plan's entry to its component: scale and cast the weights; return a handle that undoes this.

    Args: as for `apply_precision`.
    """
    put = functools.partial(_put_entry, module, entry, cast, fold, savers)
    return AppliedEntry(module, entry, put).put_on()


def _put_entry(
    module: torch.nn.Module,
    entry: ComponentPlan,
    cast: bool,
    fold: bool,
    savers: tuple[str, ...],
    patches: Patches,
) -> None:
    apply_precision(
        module,
        entry.precision,
        entry.scaling if entry.precision == "fp16" else None,
        patches,
        cast=cast,
        fold=fold,
        watch=WatchOptions(entry.component),
        savers=savers,
    )


def apply_precision(
    module: torch.nn.Module,
    precision: str,
    scaling: Scaling | None,
    patches: Patches,
    *,
    cast: bool = True,
    fold: bool = True,
    watch: WatchOptions | None = None,
    savers: tuple[str, ...] = (),
) -> None:
    """Scale one component's weights by powers of two and cast it; every plan and every repair uses this
    function.

    From then on its calls are watched: those that the exponents don't hold for are refused.

    Args:
        precision: name of the format to cast to.
        scaling: exponents, fp32 layers and streams. None casts the component as if it had been loaded in
            the precision; modules that its authors keep in fp32 stay so.
        patches: undoes all of it.
        cast: False only folds.
        fold: False for a module without weights: exponents are left out.
        watch: options of the watch on its calls.
        savers: packages that may read the scaled weights from its state dict.
    """
    _watch_saving(module, scaling if fold else None, patches, savers)
    if PLANNED not in vars(module):
        patches.set_attribute(module, PLANNED, True)
    put = functools.partial(_put_precision, module, precision, scaling, cast, fold)
    if scaling is not None and fold:
        CallWatch.watch(module, scaling, put, patches, watch, casts=cast)
    else:
        put(patches)


@dataclass(frozen=True)
class Unfit:
    """A method of Diffusers' models that must not be called while weights have exponents.

    Attributes:
        what: the start of the error's first sentence, which the model's class ends.
        why: what the call would do.
        do: what the user does instead, once the exponents are off.
    """

    what: str
    why: str
    do: str

    def refuse(self, class_name: str, *_: object, **__: object) -> None:
        raise PlanError(
            f"{self.what} a {class_name} under a plan or a repair.",
            expected=self.why,
            remedy=f"Take the plan off first (.undo(), or .remove() of the guard), {self.do}, and put a "
            "plan on again: stopdown.fp16(pipe).",
        )


UNFIT = {
    "_load_ip_adapter_weights": Unfit(
        "An IP-Adapter was given to",
        "Its layers add to values that have exponents, and Diffusers casts the model for it.",
        "load the IP-Adapter",
    ),
    "fuse_qkv_projections": Unfit(
        "Projections were to be fused in",
        "The fused layers are copies of weights with exponents, and keep those for good; the casts around "
        "the old layers aren't around them.",
        "fuse them",
    ),
    "enable_layerwise_casting": Unfit(
        "Layerwise casting was requested for",
        "Its weights have exponents for fp16. In fp8, which holds far fewer sizes, many of them would "
        "vanish, and what is kept in fp32 would be cast as well.",
        "enable layerwise casting",
    ),
}
"""Methods that exponents don't allow, by their names."""


_SAVING = (
    "Take the plan off first (.undo()), or write a converted model: stopdown convert. A pipeline that "
    "was loaded with quantization_config=stopdown.quantization(SOURCE) is saved with its plan."
)


def _refuse_saving(class_name: str, *_: object, **__: object) -> None:
    raise PlanError(
        f"{class_name} can't be saved by save_pretrained under a plan or a repair.",
        expected="The files would have the exponents and the dtypes of the plan, without a record of it.",
        remedy=_SAVING,
    )


def _watch_saving(
    module: torch.nn.Module,
    scaling: Scaling | None,
    patches: Patches,
    savers: tuple[str, ...] = (),
) -> None:
    """Keep scaled weights from being saved as if they were the model's: refuse `save_pretrained`, and what
    exponents don't allow.

    Reading the state dict only warns, once; `CallWatch` does so for those of parts.

    Args:
        savers: packages that may read the scaled weights.
    """
    is_changed = scaling is not None and (scaling.exponents or has_more_than_folds(scaling))
    if is_changed and not savers and hasattr(module, "save_pretrained"):
        refuse = functools.partial(_refuse_saving, type(module).__name__)
        patches.set_attribute(module, "save_pretrained", refuse)
    for name, unfit in UNFIT.items() if is_changed and not savers else ():
        if hasattr(module, name):
            refuse = functools.partial(unfit.refuse, type(module).__name__)
            patches.set_attribute(module, name, refuse)
    warned = list[bool]()

    def warn(owner: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        if owner is module and not (prefix or keep_vars or warned or is_read_by_libraries(*savers)):
            warned.append(True)
            warn_user(
                f"{type(owner).__name__} is under a plan or a repair, and its weights are scaled: "
                f"without its exponents they are those of another model. {_SAVING}"
            )

    if scaling is not None and scaling.exponents:
        patches.defer(module.register_state_dict_pre_hook(warn).remove)


def _put_precision(
    module: torch.nn.Module,
    precision: str,
    scaling: Scaling | None,
    cast: bool,
    fold: bool,
    patches: Patches,
) -> None:
    if scaling is not None and fold:
        patches.defer(fold_scaling(module, scaling).undo)
    elif scaling is not None:
        patches.set_attribute(module, RESCALED, True)
    if not cast:
        return
    dtype = FORMATS[precision].torch_dtype
    if scaling is not None:
        patches.defer(cast_(module, dtype, scaling).undo)
    elif not casts_weights(module):  # its arguments alone say what it computes in
        put_precision(module, dtype, patches)


def apply_without_weights(skeleton: Any, plan: Plan) -> None:
    """Apply a plan to a pipeline without weights, for a dry run: fp32 modules, residual streams, casts
    of arguments.

    Args:
        skeleton: from `build_skeleton` or `copy_skeleton`, in fp32; it is changed for good.
    """
    modules = find_components(skeleton)
    known = tuple(x for x in plan.components if x.component in modules)
    put = functools.partial(apply_entry, fold=False)
    put_plan(skeleton, dataclasses.replace(plan, components=known), put)  # it is ours: never undone


def put_boundaries(pipe: Any, plan: Plan, patches: Patches, *, keeps_upcast: bool = False) -> None:
    """Cast the arguments of each component call to the component's precision, unless they would
    overflow in it.

    Plans with and without exponents use this. Entries may be those of single calls, such as `vae.decode`.

    Args:
        keeps_upcast: let a pipeline cast an autoencoder to fp32 if its config has `force_upcast`.
    """
    dtypes = {
        entry.component: FORMATS[entry.precision].torch_dtype
        for entry in plan.components
        if entry.precision in FORMATS
    }
    in_fp16 = [name_component(x) for x, dtype in dtypes.items() if dtype == torch.float16]
    halves = list(dict.fromkeys(in_fp16))
    for name in [x.component for x in plan.components if x.precision == "as loaded"]:
        found = find_component(pipe, name)
        if found is None or find_quantised(found) or casts_weights(found):
            continue
        held = read_precisions(found)
        if len(held) == 1 or PLANNED in vars(found):
            dtypes[name] = held[0]  # of now: its plan may come off before this one
    fixed = [x for x in map(name_component, dtypes) if _refuses_casts(find_component(pipe, x))]
    dropping = () if keeps_upcast else dict.fromkeys((*halves, *fixed))
    upcast = {name for name in dropping if drop_upcast(_find(pipe, name), patches)}
    for name in upcast:
        if (watch := CallWatch.find(_find(pipe, name))) is not None:
            watch.known.settings.note()  # else its first call is traced, as of code that goes elsewhere

    def put(callee: Callee, layers: Patches) -> None:
        dtype = dtypes.get(callee.name, dtypes.get(callee.component_name))
        if dtype is not None:
            put_cast(callee, dtype, layers, is_refusal=is_refusal)

    intercept_components(pipe, put, patches)
    wide = [_find(pipe, name_component(x.component)) for x in plan.components if _returns_wide(x)]
    narrow = [_find(pipe, name) for name in halves]
    state_dtypes(narrow, wide, patches)
    explain_foreign_casts(pipe, plan, patches)


def _refuses_casts(module: torch.nn.Module | None) -> bool:
    """Return whether Diffusers refuses to cast a module, as it was loaded by a `quantization_config`."""
    return bool(getattr(module, "is_quantized", False))


def _returns_wide(entry: ComponentPlan) -> bool:
    """Return whether a component may return values beyond fp16's range.

    Its exponents may allow them, or it is an encoder in another format.
    """
    is_encoder = find_stage(entry.component) == "encode"
    return bool(entry.in_force.outputs) or (is_encoder and entry.precision != "fp16")


def _find(program: Any, name: str) -> torch.nn.Module:
    found = find_component(program, name)
    if found is None:
        raise ScalingError(f"There is no {name} any more.")
    return found


def compare_versions(plan: Plan) -> Iterator[str]:
    """Yield a clause for each package (Diffusers, Transformers) of another version than the plan was
    made with.
    """
    installed = read_class_versions()
    for name in sorted(plan.versions.keys() | installed.keys()):
        then, now = plan.versions.get(name, "none"), installed.get(name, "none")
        if then != now:
            yield f"it was made with {name} {then}, and {now} is installed"


def compare_components(pipe: Any, plan: Plan) -> Iterator[str]:
    """Yield a clause for each way in which a pipeline's components aren't those that a plan was made
    for.
    """
    planned = {entry.component: entry for entry in plan.components}
    found_here = {name: find_component(pipe, name) for name in planned}
    modules = {name: module for name, module in found_here.items() if module is not None}
    for name in find_adapter(pipe).list_required(pipe) - planned.keys():
        yield f"it has no {name}, and the pipeline has one"
    for name, entry in planned.items():
        if name not in modules:
            yield f"it has a {name}, and the pipeline has none"
        elif type(modules[name]).__name__ != entry.class_name:
            found = type(modules[name]).__name__
            yield f"{name} was a {entry.class_name}, and the pipeline has a {found}"
        elif PLANNED in vars(modules[name]) and entry.precision != "as loaded":
            yield f"{name} is under a plan or a repair already, maybe of a pipeline that shares it"
        elif sample_weights(modules[name]) != entry.weights:
            yield f"{name} has weights other than those that were measured, or additional adapters"
        elif entry.precision == "fp16":
            misfits = list_misfits(modules[name], entry.in_force)
            yield from (f"{name} doesn't fit its exponents: {x}" for x in misfits)
            if (code := list_foreign_code(modules[name])) != entry.code:
                more = list_some([x for x in code if x not in entry.code])
                less = list_some([x for x in entry.code if x not in code])
                named = f"with {more}" if more else f"without {less}"
                yield f"{name} runs other code than it was made for, {named}"


def check_source(plan: Plan, source: Source, *, with_weights: bool = True) -> None:
    """Refuse a plan that was made for another checkpoint or other versions, before anything is loaded.

    Args:
        with_weights: False if the source's weights aren't on this machine. Only the components' classes are
            compared then, as for a plan that was made in memory.
    """
    differences = list(compare_versions(plan))
    if not (with_weights and plan.fingerprint):
        differences += _compare_classes(plan, source) if source.components else ()
    elif plan.fingerprint != (found := fingerprint(source)) and not leaves_loras(plan, source):
        differences.insert(
            0,
            f"it was made for {plan.source} with the fingerprint {plan.fingerprint[:12]}, and that "
            f"of {source.name} is {found[:12]}",
        )
    refuse_differences(
        plan, differences, f"Make its plan: stopdown plan {source.name} -o plan.json"
    )


def leaves_loras(plan: Plan, source: Source) -> bool:
    """Return whether a source has LoRAs that its plan was made without; they are scaled when they are
    loaded.
    """
    bare = dataclasses.replace(source, loras=())
    return bool(source.loras) and plan.fingerprint == fingerprint(bare)


def _compare_classes(plan: Plan, source: Source) -> Iterator[str]:
    planned = {entry.component for entry in plan.components}
    for name in source.components:
        if source.has_weights(name) and name not in planned:
            yield f"it has no {name}, and {source.name} has one"
    for entry in plan.components:
        _, found = source.components.get(entry.component, ("", "nothing"))
        if found != entry.class_name:
            yield f"{entry.component} was a {entry.class_name}, and {source.name} has {found}"


def refuse_differences(plan: Plan, differences: list[str], remedy: str = _REMEDY) -> None:
    if differences:
        raise PlanError(
            f"The plan for {plan.source} doesn't belong here: {'; '.join(differences)}.",
            expected="Exponents hold for the weights and the code that they were found for.",
            remedy=remedy,
        )


def load_entry(
    module: torch.nn.Module,
    entry: ComponentPlan,
    put: Callable[[torch.Tensor, StoredWeight], None] = put_,
    savers: tuple[str, ...] = (),
) -> AppliedEntry:
    """Apply a plan's entry while a component's weights are read, so that the unscaled weights aren't kept.

    If the entry is removed and applied again, the weights are in memory, and `apply_precision` does it.

    Args:
        put: receives each parameter and the stored weight that it becomes; by default it is scaled and
            cast at once.
        savers: packages that may read the scaled weights from the state dict.
    """
    first = [put]

    def put_on(patches: Patches) -> None:
        if first:
            _load_precision(module, entry, first.pop(), savers, patches)
        else:
            _put_entry(module, entry, True, True, savers, patches)

    return AppliedEntry(module, entry, put_on).put_on()


def _load_precision(
    module: torch.nn.Module,
    entry: ComponentPlan,
    put: Callable[[torch.Tensor, StoredWeight], None],
    savers: tuple[str, ...],
    patches: Patches,
) -> None:
    dtype = FORMATS[entry.precision].torch_dtype
    if entry.precision != "fp16" or (scaling := entry.scaling) is None:
        cast_component_(module, dtype, put)
        patches.defer(functools.partial(widen_, module))
        return
    first = [put]

    def put_on(layers: Patches) -> None:
        put = first.pop() if first else put_  # later the weights are here, without exponents
        layers.defer(load_scaled(module, dtype, scaling, put).undo)

    _watch_saving(module, scaling, patches, savers)
    CallWatch.watch(module, scaling, put_on, patches, WatchOptions(entry.component))


def explain_foreign_casts(pipe: Any, plan: Plan, patches: Patches) -> None:
    """Name the component that somebody has cast since the plan, if a later call fails on mixed dtypes."""
    entries = {name_component(entry.component) for entry in plan.components}
    modules = WeakValueDictionary(
        {name: x for name, x in find_components(pipe).items() if name in entries}
    )
    known = {name: _read_dtypes(module) for name, module in modules.items()}

    def put(callee: Callee, layers: Patches) -> None:
        def explain(call: ComponentCall) -> Any:
            try:
                return call.proceed()
            except Exception as error:
                is_guarded = has_layer(callee.owner, find_slot(callee), Rank.GUARD)
                changed = "" if is_guarded or not is_refusal(error) else _find_cast(modules, known)
                if not changed:
                    raise
                raise PlanError(
                    f"{callee.name} stopped at operands of two dtypes: {changed}.",
                    expected="A plan casts every component, and the arguments of their calls with them.",
                    remedy="Take the plan off first (.undo()), cast, and make a plan of the result; or "
                    "leave the cast out.",
                ) from error

        if callee.component_name in modules:
            intercept(callee, explain, layers, Rank.EXPONENTS)

    intercept_components(pipe, put, patches)


def _find_cast(
    modules: Mapping[str, torch.nn.Module], known: dict[str, dict[str, torch.dtype]]
) -> str:
    """Describe the first component with a parameter in another dtype than its plan left; return "" for
    none.

    Args:
        known: component → parameter → dtype when the plan was applied.
    """
    for name, module in modules.items():
        for key, dtype in _read_dtypes(module).items():
            if known[name].get(key, dtype) != dtype:
                before = name_dtype(known[name][key])
                return (
                    f"{name} was cast after its plan was put on ({key} is {name_dtype(dtype)}, and was "
                    f"{before})"
                )
    return ""


def _read_dtypes(module: torch.nn.Module) -> dict[str, torch.dtype]:
    named = name_parameters(module).items()
    return {name: tensor.dtype for name, tensor in named if tensor.is_floating_point()}
