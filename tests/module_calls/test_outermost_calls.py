"""Calls of modules that no other call encloses, heard by listeners of each thread."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from stopdown.interception.patches import Patches
from stopdown.module_calls.outermost_calls import (
    entered,
    find_outermost,
    hides_overflow,
    is_enclosed,
    is_in_training,
    is_plain,
    is_transformed,
    listen,
    silenced,
    wants_gradients,
)


def hear(seen: list[Any]) -> Any:
    """A listener that keeps each module that is called outermost."""

    @contextlib.contextmanager
    def note(module: nn.Module, *_: Any) -> Iterator[None]:
        seen.append(module)
        yield

    return note


def test_a_call_inside_of_another_is_enclosed() -> None:
    """The first that is entered stays the outermost one, also after an error."""
    first, second = nn.Identity(), nn.Identity()
    assert find_outermost() is None
    with entered(first, "forward"):
        assert not is_enclosed(first, "forward")
        assert is_enclosed(first, "decode")
        with contextlib.suppress(ValueError), entered(second, "forward"):
            assert find_outermost() is first
            raise ValueError
        assert find_outermost() is first
        assert is_enclosed(second, "forward")
    assert find_outermost() is None


def test_each_thread_has_an_outermost_call_of_its_own() -> None:
    """Another thread is in no call while this one is."""
    found = list[Any]()
    with entered(nn.Identity(), "forward"):
        thread = threading.Thread(target=lambda: found.append(find_outermost()))
        thread.start()
        thread.join()
    assert found == [None]


def test_listeners_hear_outermost_calls_until_they_are_taken_off() -> None:
    """Submodules' calls aren't heard, calls that are silenced neither; two listeners hear the same."""
    seen, other = list[Any](), list[Any]()
    module, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    heard, heard_too = hear(seen), hear(other)
    with Patches() as patches:
        listen(heard, patches)
        with Patches() as more:
            listen(heard_too, more)
            module(x)
        with silenced():
            module(x)
        module[0](x)
    module(x)
    assert seen == [module, module[0]]
    assert other == [module]


class Handing(nn.Module):
    """Has no weights, and calls the module that it is given."""

    def forward(self, module: nn.Module, x: torch.Tensor) -> Any:
        return module(x)


def test_a_module_that_hands_a_call_on_is_not_outermost() -> None:
    """The module among its arguments is, as under sgm's denoiser."""
    seen, module = list[Any](), nn.Linear(2, 2)
    heard = hear(seen)
    with Patches() as patches:
        listen(heard, patches)
        Handing()(module, torch.ones(1, 2))
    assert seen == [module]


def test_gradients_are_wanted_by_an_optimizer_or_a_gradient() -> None:
    """A parameter that merely requires one is no training; frozen ones and `no_grad` are none either."""
    gc.collect()
    module = nn.Linear(2, 2)
    assert not wants_gradients(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert wants_gradients(module)
    with torch.no_grad():
        assert not wants_gradients(module)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    assert wants_gradients(other)
    assert not wants_gradients(other.requires_grad_(False))
    assert optimizer.param_groups


def test_training_mode_alone_is_no_training() -> None:
    """It is the default of a module; with an optimizer it counts, unless the module is in eval mode."""
    module, trained = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    assert not is_in_training(module)
    assert is_in_training(trained)
    assert not is_in_training(trained.eval())
    assert optimizer.param_groups


def test_values_cannot_be_read_inside_of_transforms_and_traces() -> None:
    """Under `vmap` and `make_fx`; a module in fp16 hides what overflows there."""
    seen = list[tuple[bool, bool, bool, bool]]()
    half, wide = nn.Linear(1, 1).half(), nn.Linear(1, 1)

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((is_plain(), is_transformed(), hides_overflow(half), hides_overflow(wide)))
        return x * 2

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2))
    torch.fx.experimental.proxy_tensor.make_fx(look)(torch.ones(2))
    assert seen == [
        (True, False, False, False),
        (False, True, True, False),
        (False, False, False, False),
    ]


@pytest.mark.parametrize("in_transforms", [False, True])
def test_calls_inside_of_transforms_are_heard_when_asked_for(in_transforms: bool) -> None:
    """A guard can't read values there; a watch on signatures can."""
    seen, module = list[Any](), nn.Linear(2, 2)
    heard = hear(seen)
    with Patches() as patches:
        listen(heard, patches, in_transforms=in_transforms)
        torch.func.vmap(module)(torch.ones(2, 2))
    assert seen == [module] * in_transforms
