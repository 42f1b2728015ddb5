"""`mend`: repair on a live pipeline what `check` finds; undoing restores every bit.

If parameters are cast, the original tensors are kept until the repair is undone. Arguments of a component
are cast in a layer around its calls, inputs inside a component by hooks on the module that refuses them.

**Catches** several dtypes in one component, fp32 modules that were cast, components that disagree, fp32
outputs of modules kept in fp32, modules that cast their input to fp32 but have narrower parameters,
overriding autocast, `force_upcast` that no code reads, and narrow tables of a scheduler.
**Does not catch** damaged weights, positions computed in 16 bits, and models that need another precision;
these are listed in `remaining`. Bits that a cast has lost are not restored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stopdown.component_call_names import name_module_path, split_module_path
from stopdown.component_calls.components import find_components
from stopdown.devices.device_choice import name_device
from stopdown.dtype_rules.check import CheckResult, inspect_pipeline, validate_call
from stopdown.dtype_rules.findings import generalise
from stopdown.dtype_rules.parameters import (
    find_kept_parameters,
    find_widening,
    list_computing,
)
from stopdown.interception.autocast import without_autocast
from stopdown.interception.patches import Patches
from stopdown.module_calls.callee import Callee
from stopdown.module_calls.mixed_dtypes import cast_parameters, cast_to_weights
from stopdown.number_formats import name_dtype
from stopdown.records import Finding, Operands
from stopdown.scaling import ComponentCall, Rank, intercept, put_cast

ROUNDS = 8
"""Maximum number of rounds; a check follows each, as a repair can reveal or resolve other findings."""

_ORDER = (
    ("mixed-parameters", "several-dtypes", "fp32-module-lost", "sigmas-collapse"),
    ("force-upcast-unread", "autocast-overrides"),
    ("widens-itself", "fp32-module-not-cast-back", "mixed-operands"),
    ("boundary",),
)
"""Kinds of findings in the order of repair, causes before their possible consequences."""


@dataclass(frozen=True)
class _Case:
    """Finding to repair, with its place.

    Attributes:
        name: component of the finding.
        path: path of the module in the component.
        callees: calls of the component.
        widening: module paths of modules that cast their own input to fp32.
        done: sentences about earlier repairs.
    """

    pipe: Any
    name: str
    path: str
    callees: tuple[Callee, ...]
    widening: Collection[str]
    done: Collection[str]
    patches: Patches

    @property
    def module(self) -> torch.nn.Module:
        return self.callees[0].owner


class Mending:
    """Repairs on a pipeline; `undo` removes them and restores every bit.

    Attributes:
        done: a sentence for each repair.
        remaining: findings after the repairs, worst first.
    """

    def __init__(self, done: tuple[str, ...], remaining: list[Finding], patches: Patches) -> None:
        self.done, self.remaining, self._patches = done, remaining, patches

    def __repr__(self) -> str:
        return f"Mending({len(self.done)} done, {len(self.remaining)} remaining)"

    def undo(self) -> None:
        """Restore the pipeline bit for bit. A second call does nothing."""
        self._patches.undo()

    def __enter__(self) -> Mending:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def mend(
    pipe: Any,
    *,
    device: str | torch.device | None = None,
    arguments: Mapping[str, Any] | None = None,
    run: Callable[[], Any] | None = None,
) -> Mending:
    """Repair in place the faults that `check` finds in a live pipeline or program.

    Args:
        pipe: a Diffusers pipeline with its weights, or another program as for `guard`.
        device, arguments, run: as for `check`.

    Returns:
        A handle with `.done`, `.remaining` and `.undo()`, also a context manager.

    Raises:
        InputError: `pipe` has no modules; or it is not a pipeline, and `run` is missing or calls none of
            its modules.

    Examples:
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 4).half(), torch.nn.LayerNorm(4))
        >>> x = torch.ones(1, 4).half()
        >>> mending = stopdown.mend({"denoiser": module}, device="v100", run=lambda: module(x))
        >>> mending.done
        ('denoiser: 2 parameters cast to fp16, as the rest.',)
        >>> mending.undo()
        >>> module[1].weight.dtype
        torch.float32
    """
    find_components(pipe)  # refuses a name of a pipeline
    validate_call("mend", arguments, run)
    device = name_device("mend", device)
    patches, done = Patches(), list[str]()
    look = partial(inspect_pipeline, pipe, device=device, arguments=arguments, run=run)
    checked = look()
    try:
        for _ in range(ROUNDS):
            said = _mend_roots(pipe, checked, done, patches)
            if not said:
                break
            done += said
            checked = look()
    except BaseException:
        patches.undo()
        raise
    return Mending(tuple(done), checked.findings, patches)


def _mend_roots(pipe: Any, checked: CheckResult, done: list[str], patches: Patches) -> list[str]:
    """Repair one group of findings, causes before consequences (`_ORDER`); return a sentence for each.

    The other groups wait for the next round, because a repair may resolve them.
    """
    for kinds in _ORDER:
        chosen = [finding for finding in checked.findings if finding.kind in kinds]
        said = [_mend_one(pipe, finding, checked, done, patches) for finding in chosen]
        fresh = [text for text in dict.fromkeys(said) if text and text not in done]
        if fresh:
            return fresh
    return []


def _mend_one(
    pipe: Any, finding: Finding, checked: CheckResult, done: Collection[str], patches: Patches
) -> str:
    """Repair one finding, and return a sentence about the repair; "" if there is none for it."""
    name, path = split_module_path(finding.module_path)
    remedy = _REMEDIES.get(finding.kind)
    callees = tuple(x for x in checked.callees if x.component_name == name)
    if remedy is None or (not callees and finding.kind != "sigmas-collapse"):
        return ""
    return remedy(_Case(pipe, name, path, callees, checked.seen.widening, done, patches))


def _unify(case: _Case) -> str:
    main = list_computing(case.module)[0]
    kept_fp32 = find_kept_parameters(case.module, name_dtype(main))
    wide = find_widening(case.module, case.name, case.widening)
    names = [
        key
        for key, tensor in case.module.named_parameters()
        if tensor.is_floating_point()
        and tensor.element_size() > 1
        and tensor.dtype != main
        and key not in kept_fp32
        and not (tensor.dtype == torch.float32 and key.rpartition(".")[0] in wide)
    ]
    cast_parameters(case.module, names, main, case.patches)
    return (
        f"{case.name}: {len(names)} parameters cast to {name_dtype(main)}, as the rest."
        if names
        else ""
    )


def _restore_kept(case: _Case) -> str:
    kept_fp32 = find_kept_parameters(case.module, name_dtype(list_computing(case.module)[0]))
    parameters = dict(case.module.named_parameters())
    names = sorted(key for key in kept_fp32 if parameters[key].dtype != torch.float32)
    cast_parameters(case.module, names, torch.float32, case.patches)
    if not names:
        return ""
    return (
        f"{case.name}: {len(names)} parameters that the model's authors keep in fp32 are fp32 again. The "
        "bits that the cast removed are still lost."
    )


def _widen_parameters(case: _Case) -> str:
    """Cast the parameters of all modules that, by their class, cast their own input to fp32."""
    parts = find_widening(case.module, case.name, [name_module_path(case.name, case.path)])
    names = [
        f"{path}.{key}".removeprefix(".")
        for path, part in parts.items()
        for key, tensor in part.named_parameters(recurse=False)
        if tensor.is_floating_point() and tensor.dtype != torch.float32
    ]
    cast_parameters(case.module, names, torch.float32, case.patches)
    if not names:
        return ""
    kind = type(parts[case.path]).__name__
    return (
        f"{case.name}: {len(parts)} {kind} cast their input to fp32 themselves: {len(names)} parameters "
        "of theirs are fp32; the bits that a cast took aren't back."
    )


def _cast_arguments(case: _Case) -> str:
    main = list_computing(case.module)[0]
    said = (
        f"{case.name}: its arguments are cast to {name_dtype(main)} at each call, its outputs back."
    )
    if said in case.done:  # a time or position, which is not cast at the call
        return _cast_at_module(case)
    for callee in case.callees:
        put_cast(callee, main, case.patches)
    return said


def _cast_at_module(case: _Case) -> str:
    """Hook a module, and its counterparts in other blocks, to cast inputs to the weights' dtype."""
    own = [
        part
        for place, part in case.module.named_modules()
        if generalise(place) == generalise(case.path) and list(part.parameters(recurse=False))
    ]
    for part in own:
        cast_to_weights(part, Operands(("",)), case.patches)
    if not own:
        return ""
    return f"{case.name}: {case.path} and {len(own) - 1} of its kind cast their input to their own dtype."


def _stop_autocast(case: _Case) -> str:
    def call_plain(call: ComponentCall) -> Any:
        with without_autocast():
            return call.proceed()

    for callee in case.callees:
        intercept(callee, call_plain, case.patches, Rank.PLAN)
    return f"{case.name}: autocast is off inside of its calls."


def _upcast(case: _Case) -> str:
    module = case.module
    names = [key for key, tensor in module.named_parameters() if tensor.is_floating_point()]
    cast_parameters(module, names, torch.float32, case.patches)
    for callee in case.callees:
        put_cast(callee, torch.float32, case.patches)
    return f"{case.name}: cast to fp32, as its config says, and its arguments with it."


def _renew_scheduler(case: _Case) -> str:
    kind = type(case.pipe.scheduler)
    case.patches.set_attribute(case.pipe, "scheduler", kind.from_config(case.pipe.scheduler.config))
    return f"scheduler: created again from its config, with its tables in fp32 ({kind.__name__})."


_REMEDIES: dict[str, Callable[[_Case], str]] = {
    "mixed-parameters": _unify,
    "several-dtypes": _unify,
    "fp32-module-lost": _restore_kept,
    "boundary": _cast_arguments,
    "fp32-module-not-cast-back": _cast_at_module,
    "mixed-operands": _cast_at_module,
    "widens-itself": _widen_parameters,
    "autocast-overrides": _stop_autocast,
    "force-upcast-unread": _upcast,
    "sigmas-collapse": _renew_scheduler,
}
"""Function that repairs each kind of finding."""
