"""Step caches of Diffusers' hooks: kept, put back, cleared and gone around."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stopdown.module_calls.step_caches import (
    clear_caches,
    find_processors,
    in_full,
    is_spread,
    iterate_hooks,
    save_caches,
)


class State:
    """Of one hook, in one context."""

    def __init__(self) -> None:
        self.step, self.seen = 0, list[int]()

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


class Manager:
    """Keeps states by context, as Diffusers' `StateManager` does."""

    def __init__(self) -> None:
        self._state_cache = {"cond": State()}


class Skipping:
    """A hook that answers every second call with the output of the one before."""

    _is_stateful = True

    def __init__(self, module: nn.Module) -> None:
        self.states, self.own = Manager(), State()
        self.fn_ref = SimpleNamespace(
            original_forward=module.forward, pre_forward=None, post_forward=None, forward=None
        )


class Offloading:
    """A hook of another kind."""

    _is_stateful = False

    def __init__(self) -> None:
        self.kept = State()


def make() -> tuple[nn.Module, Skipping]:
    module = nn.Linear(2, 2)
    module.is_cache_enabled = True  # type: ignore[assignment]
    hook = Skipping(module)
    vars(module)["_diffusers_hook"] = SimpleNamespace(hooks={"skip": hook, "wait": Offloading()})
    return module, hook


def count(hook: Skipping) -> None:
    for state in (hook.states._state_cache["cond"], hook.own):
        state.step += 1
        state.seen.append(state.step)


def read(hook: Skipping) -> list[Any]:
    states = [*hook.states._state_cache.values(), hook.own]
    return [(state.step, state.seen) for state in states]


def test_a_state_is_put_back_as_often_as_needed() -> None:
    """Lists as they were, and contexts that a call began are gone."""
    module, hook = make()
    count(hook)
    restore = save_caches(module)
    for _ in range(2):
        count(hook)
        hook.states._state_cache["uncond"] = State()
        restore()
        assert read(hook) == [(1, [1]), (1, [1])]


def test_caches_are_cleared_as_at_the_start() -> None:
    """What other hooks keep stays."""
    module, hook = make()
    count(hook)
    other = vars(module)["_diffusers_hook"].hooks["wait"]
    other.kept.step = 5
    clear_caches(module)
    assert hook.states._state_cache == {}
    assert hook.own.step == 0
    assert other.kept.step == 5


def test_without_a_cache_nothing_is_kept() -> None:
    """Hooks are there, and none counts."""
    module, hook = make()
    module.is_cache_enabled = False  # type: ignore[assignment]
    restore = save_caches(module)
    count(hook)
    restore()
    assert read(hook)[0] == (1, [1])
    assert len(list(iterate_hooks(module))) == 2


def test_calls_run_in_full_inside() -> None:
    """The hook that skips hands everything on, and is itself again behind the block."""
    module, hook = make()
    with in_full(module):
        assert hook.fn_ref.pre_forward(module, 1, a=2) == ((1,), {"a": 2})
        assert hook.fn_ref.post_forward(module, "output") == "output"
        assert hook.fn_ref.forward == hook.fn_ref.original_forward
    assert hook.fn_ref.pre_forward is None
    assert hook.fn_ref.forward is None


def test_context_parallelism_is_gone_inside() -> None:
    """Of the module and of its attention processors, each of which is found once."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    processor = SimpleNamespace(_parallel_config="spread")
    vars(module[0])["processor"] = vars(module[1])["processor"] = processor
    assert find_processors(module) == [processor]
    assert not is_spread(module)
    vars(module)["_parallel_config"] = SimpleNamespace(context_parallel_config=object())
    assert is_spread(module)
    with in_full(module):
        assert not is_spread(module)
        assert processor._parallel_config is None
    assert is_spread(module)
    assert processor._parallel_config == "spread"
    assert torch.equal(module(torch.zeros(1, 2)), module(torch.zeros(1, 2)))
