"""Repairs that one guard found, for the next guard of the same component."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch
from torch import nn

from models.snapshots import compare_snapshot, take_snapshot
from stopdown.runtime.repair_cache import RepairCache
from stopdown.runtime.repairs import Component, cast_component

REPAIRS = (cast_component("bf16"),)


def keep_repairs(module: nn.Module) -> tuple[RepairCache, Component]:
    """A cache that has the repairs of a guard of a module, which has been removed, and its component."""
    cache, state = RepairCache(), Component(module)
    state.put_on(REPAIRS)
    state.take_off()
    cache.keep(state, REPAIRS)
    return cache, state


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval().requires_grad_(False)


def test_the_next_guard_gets_repairs_and_ranges() -> None:
    """The repairs are on the module again, and with them what its failed calls reached."""
    module = make()
    before = take_snapshot(module)
    cache, known = keep_repairs(module)
    assert compare_snapshot(before, module) == []
    state = Component(module)
    assert cache.put_on(state) == state.applied == REPAIRS
    assert module[0].weight.dtype == torch.bfloat16
    assert state.calibration is known.calibration
    assert cache.outdated == []
    state.take_off()
    assert compare_snapshot(before, module) == []


def test_another_component_gets_none() -> None:
    """A copy with the same weights begins without repairs."""
    cache, _ = keep_repairs(make())
    state = Component(make())
    assert cache.put_on(state) == state.applied == ()
    assert cache.outdated == []


def test_other_weights_or_code_make_repairs_outdated() -> None:
    """A weight that is written, and a `forward` that is replaced: each is told once, nothing is put on."""

    def write(module: nn.Module) -> None:
        module[0].weight[0, 0] += 1.0

    def replace(module: nn.Module) -> None:
        module[0].forward = lambda x: x

    for change in (write, replace):
        module = make()
        cache, _ = keep_repairs(module)
        change(module)
        for _ in range(2):
            state = Component(module)
            assert cache.put_on(state) == state.applied == ()
            assert module[0].weight.dtype == torch.float32
        assert cache.outdated == ["Sequential"]


def test_code_at_the_address_of_what_is_gone_is_other_code() -> None:
    """A hook or function is taken off and freed, and the next one has its `id`: repairs are outdated."""

    def hook(module: nn.Module, factor: float) -> Any:
        handle = module.register_forward_hook(lambda *given: given[2] * factor)
        return handle.remove

    def replace(module: nn.Module, factor: float) -> Any:
        vars(module)["forward"] = types.MethodType(lambda _, x: x * factor, module)
        return lambda: vars(module).pop("forward")

    for put in (hook, replace):
        module = make()
        for _ in range(20):
            put_back = put(module[0], 2.0)
            cache, _ = keep_repairs(module)
            put_back()
            del put_back
            gc.collect()
            put_back = put(module[0], 3.0)
            assert cache.put_on(Component(module)) == ()
            put_back()
            del put_back


def test_weights_that_are_elsewhere_are_not_compared() -> None:
    """Weights on `meta` have no samples: the next guard begins without repairs, and no change is told."""
    module = make()
    cache, state = RepairCache(), Component(module.to("meta"))
    cache.keep(state, REPAIRS)
    assert cache.put_on(Component(module)) == ()
    assert cache.outdated == []


def test_a_component_is_not_kept_alive() -> None:
    """Its repairs go with it."""
    module = make()
    cache, state = keep_repairs(module)
    assert len(cache._kept) == 1
    del module, state
    gc.collect()
    assert len(cache._kept) == 0
