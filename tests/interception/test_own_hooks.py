"""Changes of outputs that are part of a module: made once, whatever lies around its `forward`."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stopdown.interception.own_hooks import hook_own_output, hook_part_arguments
from stopdown.interception.patches import Patches
from stopdown.module_calls.call_interception import Rank, bared, put_layer

GIVEN = torch.ones(2)


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def double(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def put(net: Net, patches: Patches, rank: Rank = Rank.GUARD) -> list[torch.Tensor]:
    """A layer, and what it has seen."""
    seen: list[torch.Tensor] = []

    def look(call: Any) -> Any:
        seen.append(call.proceed())
        return seen[-1]

    put_layer(net, "forward", look, patches, rank)
    return seen


def wrap(net: Net, patches: Patches) -> None:
    """A function of somebody else around what is there."""
    before = net.forward
    patches.set_attribute(net, "forward", lambda x: before(x))


PLACES: dict[str, tuple[Callable[[Net, Patches], object], ...]] = {
    "nothing around": (),
    "a layer": (put,),
    "two layers": (put, put),
    "somebody's function": (wrap,),
    "a layer in somebody's function": (put, wrap),
    "two stacks with somebody's function between": (put, wrap, put),
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("around", PLACES.values(), ids=PLACES)
def test_a_hook_changes_the_output_once(around: Any, *, is_first: bool) -> None:
    """Doubles once at every call, whichever came first; and no more when it is taken off."""
    net = Net()
    with Patches() as layers, Patches() as hooks:
        if is_first:
            hook_own_output(net, double, hooks)
        for one in around:
            one(net, layers)
        if not is_first:
            hook_own_output(net, double, hooks)
        assert [net(GIVEN).tolist() for _ in range(3)] == [[4.0, 4.0]] * 3
        with bared(net):
            assert net(GIVEN).tolist() == [4.0, 4.0]
        hooks.undo()
        assert net(GIVEN).tolist() == [2.0, 2.0]
    assert vars(net).keys() == vars(Net()).keys()
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


def test_a_layer_sees_what_the_caller_gets() -> None:
    """Hands a guard the changed output, and a direct call of `forward` gives it as well."""
    net = Net()
    with Patches() as patches:
        seen = put(net, patches)
        hook_own_output(net, double, patches)
        assert torch.equal(net(GIVEN), seen[0])
        assert seen[-1].tolist() == net.forward(GIVEN).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("has_hooks", [True, False])
def test_a_hook_put_on_in_the_middle_of_a_call_holds_for_what_follows(*, has_hooks: bool) -> None:
    """Changes what the layer gets when it goes on once more, and is not made again at the call's end."""
    net, seen = Net(), list[torch.Tensor]()
    with Patches() as patches, Patches() as others:

        def repair(call: Any) -> Any:
            seen.append(call.proceed())
            for _ in range(2):  # put on, off, and on again, as where a repair is compared
                others.undo()
                hook_own_output(net, double, others)
                hook_part_arguments(net, "", lambda x: x.double(), others)
            seen.append(call.proceed())
            return seen[-1]

        if has_hooks:  # without any, a module does not look for those that came meanwhile
            patches.defer(net.register_forward_hook(lambda *_: None).remove)
        put_layer(net, "forward", repair, patches, Rank.GUARD)
        found = net(GIVEN)
    assert [x.tolist() for x in seen] == [[2.0, 2.0], [4.0, 4.0]]
    assert found.tolist() == [4.0, 4.0]
    assert found.dtype == torch.float64


def test_copies_have_the_hooks_for_good() -> None:
    """Keeps them in a deep copy and in what is loaded again, with layers and without."""
    net = Net()
    with Patches() as patches:
        hook_own_output(net, double, patches)
        copied, file = copy.deepcopy(net), io.BytesIO()
        torch.save(net, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert other(GIVEN).tolist() == [4.0, 4.0]
        with Patches() as layers:
            assert put(other, layers) == []
            assert [other(GIVEN).tolist() for _ in range(2)] == [[4.0, 4.0]] * 2
        assert other(GIVEN).tolist() == [4.0, 4.0]
    assert net(GIVEN).tolist() == [2.0, 2.0]


def test_compiled_code_has_the_hooks() -> None:
    """Traces them into one graph, where it goes past the layers."""
    net = Net()
    with Patches() as patches:
        hook_own_output(net, double, patches)
        put(net, patches)
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        assert compiled(GIVEN).tolist() == [4.0, 4.0]
        assert net(GIVEN).tolist() == [4.0, 4.0]
