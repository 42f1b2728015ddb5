"""Whether a component is still what its plan was put on: adapters that came, went or changed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stopdown.plans.adapter_check import (
    ActiveAdapter,
    list_grown,
    list_new,
    list_tuned,
    read_structure,
)


class Wrapped(nn.Module):
    """Has what PEFT's layers have, and no PEFT."""

    adapter_layer_names = ("lora_A", "lora_B")
    disable_adapters = False

    def __init__(self, name: str, strength: float = 1.0, size: float = 1.0) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.base_layer.weight)
        self.lora_A = nn.ModuleDict({name: nn.Linear(4, 4, bias=False)})
        self.lora_B = nn.ModuleDict({name: nn.Linear(4, 4, bias=False)})
        nn.init.eye_(self.lora_A[name].weight)
        nn.init.eye_(self.lora_B[name].weight).data.mul_(size)
        self.active_adapters, self.merged_adapters = [name], list[str]()
        self.scaling = {name: strength}

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def get_delta_weight(self, name: str) -> torch.Tensor:
        delta = self.lora_B[name].weight @ self.lora_A[name].weight
        return delta * self.scaling[name]


def read(module: nn.Module, pipe: Any = None) -> Any:
    return read_structure(module, pipe)


def test_adapters_are_read_over_all_layers() -> None:
    """How many have each, use it or have it merged, with which strengths; what a pipeline fused."""
    module = nn.Sequential(Wrapped("a"), Wrapped("a", 0.5), Wrapped("b"))
    module[1].merged_adapters.append("a")
    module[2].disable_adapters = True
    found = read(module, SimpleNamespace(_merged_adapters={"a"}))
    assert found.adapters == {
        "a": ActiveAdapter(2, 2, 1, (0.5, 1.0)),
        "b": ActiveAdapter(1, 0, 0, (1.0,)),
    }
    assert found.fused == {"a"}
    assert found == read(module, SimpleNamespace(_merged_adapters={"a"}))


def test_an_adapter_that_nothing_scales_is_new() -> None:
    """With the number of its layers; one that the plan knew is not."""
    before = read(nn.Sequential(Wrapped("a")))
    module = nn.Sequential(Wrapped("a"), Wrapped("b"), Wrapped("b"))
    assert list(list_new(before, read(module), module)) == [
        "the adapter 'b' was loaded into 2 of its layers: it was loaded past what scales it"
    ]


def test_other_modules_are_new() -> None:
    """Where no adapter explains them."""
    before, module = read(nn.Sequential(nn.Linear(2, 2))), nn.Sequential(nn.GELU(), nn.GELU())
    assert list(list_new(before, read(module), module)) == [
        "its modules have changed (2 then, 3 now)"
    ]


def test_an_adapter_that_outgrows_the_headroom_is_named() -> None:
    """`1 + s |B A| / |W|` is 8 here: three bits."""
    module = nn.Sequential(Wrapped("a", size=7.0))
    (grown,) = list_grown(module, ["a"], 2.5, certified=False)
    assert grown == (
        "the adapter 'a' may enlarge the output of 0 by up to 3.0 bits, and the plan has 2.5 bits of "
        "headroom"
    )
    assert list(list_grown(module, ["a"], 3.5, certified=False)) == []
    assert list(list_grown(module, ["a"], math.inf, certified=True)) == [
        "the adapter 'a' isn't covered by its certificate"
    ]
    module[0].disable_adapters = True
    assert list(list_grown(module, ["a"], 2.5, certified=True)) == []


def test_changes_of_the_plans_own_adapters_are_named() -> None:
    """Taken out, of another strength, or merged; those that stay are not."""
    before = read(nn.Sequential(Wrapped("a"), Wrapped("b"), Wrapped("c"), Wrapped("d")))
    now = nn.Sequential(Wrapped("b", 0.5), Wrapped("c"), Wrapped("d"))
    now[1].merged_adapters.append("c")
    assert sorted(list_tuned(before, read(now), {"a", "b", "c", "d"})) == [
        "the adapter 'a' was taken out",
        "the adapter 'b' has the strength 0.5, it was 1",
        "the adapter 'c' was switched, merged or unmerged",
    ]
    assert list(list_tuned(before, read(now), {"d"})) == []
