"""Something is put around every component call, and comes off again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from models.snapshots import assert_untouched
from stopdown.component_calls.component_interception import intercept_components
from stopdown.interception.patches import Patches
from stopdown.module_calls.callee import Callee
from stopdown.scaling import ComponentCall, Rank, intercept


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layer(value)


def watch(program: Any, patches: Patches) -> list[str]:
    """List the calls that are made from now on."""
    seen = list[str]()

    def put(callee: Callee, layers: Patches) -> None:
        def note(call: ComponentCall) -> Any:
            seen.append(callee.name)
            return call.proceed()

        intercept(callee, note, layers, Rank.PLAN)

    intercept_components(program, put, patches)
    return seen


def test_each_component_call_is_seen_once() -> None:
    """Calls of parts inside a component are not; all of it is gone when it is undone."""
    program = SimpleNamespace(components={"first": Part(), "second": Part()})
    parts, value = list(program.components.values()), torch.ones(1, 2)
    with assert_untouched(parts[0]), Patches() as patches:
        seen = watch(program, patches)
        parts[1](parts[0](value))
        assert seen == ["first", "second"]
        parts[0].layer(value)
        assert seen == ["first", "second"]
    parts[0](value)
    assert seen == ["first", "second"]


def test_a_component_that_another_calls_is_seen_as_well() -> None:
    """Both are components of the program."""
    inner = Part()

    class Outer(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return inner(value)

    program = SimpleNamespace(components={"outer": Outer(), "inner": inner})
    with Patches() as patches:
        seen = watch(program, patches)
        program.components["outer"](torch.ones(1, 2))
    assert seen == ["outer", "inner"]
