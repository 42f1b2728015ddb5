"""Explain a call that fails because a component was cast by other means after its plan was put on.

`pipe.unet.float()` under a plan leaves hooks, boundaries and the other components as they were. The next
call then ends in PyTorch's error about two dtypes, often in another component. When a call fails so, the
dtypes of all components are compared with those that the plan left, and the error names the cast.

**Catches** `.float()`, `.half()`, `.to(dtype)` of components and of the whole pipeline, if a call fails.
**Does not catch** a cast after which every call still runs: the component then computes in its new dtype;
what a guard watches: it explains or repairs such calls itself.
"""

from __future__ import annotations

from typing import Any

import torch

from stopdown.component_calls.call import ComponentCall
from stopdown.component_calls.call_interception import (
    UNPLANNED,
    Rank,
    find_slot,
    has_layer,
    intercept,
    intercept_components,
)
from stopdown.component_calls.components import Callee, find_components
from stopdown.diagnosis import REFUSALS, is_refusal
from stopdown.errors import PlanError
from stopdown.graph.capture import name_parameters
from stopdown.interception.patches import Patches
from stopdown.number_formats import name_dtype
from stopdown.records import Plan


def explain_foreign_casts(pipe: Any, plan: Plan, patches: Patches) -> None:
    """Explain failing calls of a planned pipeline by casts that happened since."""
    entries = {entry.component for entry in plan.components}
    modules = {name: x for name, x in find_components(pipe).items() if name in entries}
    known = {name: _read_dtypes(module) for name, module in modules.items()}

    def put(callee: Callee, layers: Patches) -> None:
        def explain(call: ComponentCall) -> Any:
            try:
                return call.proceed()
            except REFUSALS as error:
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
    modules: dict[str, torch.nn.Module], known: dict[str, dict[str, torch.dtype]]
) -> str:
    """Return the first component that has other dtypes than its plan left, in words; "" for none."""
    for name, module in modules.items():
        now = {} if vars(module).get(UNPLANNED, False) else _read_dtypes(module)
        for key, dtype in now.items():
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
