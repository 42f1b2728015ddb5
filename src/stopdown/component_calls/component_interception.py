"""Interception of every component call of a program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stopdown.component_calls.components import find_adapter
from stopdown.interception.patches import Patches
from stopdown.module_calls.callee import GENERAL_KEEPS, Callee
from stopdown.module_calls.outermost_calls import entered, listen
from stopdown.scaling import ComponentCall, Rank, intercept


def intercept_components(
    program: Any, put: Callable[[Callee, Patches], object], patches: Patches
) -> None:
    """Put functions (layers) around every component call of a program, until `patches` is undone.

    Args:
        put: called with the target of a component call and a `Patches`, to add layers to it. For modules
            whose calls are discovered only as they happen, it's called at each call, and its changes last
            until the call ends.
    """
    adapter = find_adapter(program)
    for callee in adapter.find_callees(program):
        put(callee, patches)
        if adapter.find_scheduled(program) is None:
            intercept(callee, _enter_call, patches, Rank.JOURNAL)
    names = {id(module): name for name, module in adapter.name_modules(program).items()}

    @contextlib.contextmanager
    def meet(module: torch.nn.Module, method: str) -> Iterator[None]:
        with Patches() as layers:
            if method == "forward" and id(module) in names:
                put(Callee(names[id(module)], module, method, "call", GENERAL_KEEPS), layers)
            yield

    if names:
        listen(meet, patches)


def _enter_call(call: ComponentCall) -> Any:
    """Make a component call, marked so that module calls inside it aren't intercepted."""
    with entered(call.callee.owner, call.callee.method):
        return call.proceed()
