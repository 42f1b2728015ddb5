"""Weights with folded exponents: what was written, replaced or cast is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from stopdown.errors import ScalingError
from stopdown.interception.patches import Patches
from stopdown.scaling.watch.folded_weights import FoldedWeights
from stopdown.scaling_records import Scaling

Call = Callable[[torch.Tensor], torch.Tensor]
SCALING = Scaling(exponents={"0.weight": -2, "1.weight[0:4]": 1, "1.weight[4:8]": 2})


def make(*, casts: bool = False, grad: bool = False) -> tuple[nn.Sequential, FoldedWeights]:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    module.requires_grad_(grad)
    known = FoldedWeights(module, SCALING, "transformer", casts=casts)
    known.note()
    return module, known


def test_weights_that_stay_are_right() -> None:
    """So are writes to weights without exponents, and a write of the same values."""
    module, known = make()
    known.check()
    module[2].weight.mul_(2)
    module[0].weight.mul_(1)
    known.check()
    assert not known.has_half


@pytest.mark.parametrize("place", [0, 1])
def test_a_weight_that_was_rewritten_is_refused(place: int) -> None:
    """By name, also where single blocks of it have exponents."""
    module, known = make()
    module[place].weight.mul_(2)
    with pytest.raises(ScalingError, match=rf"1 weights of transformer were .*: {place}\.weight"):
        known.check()


def test_a_weight_that_was_replaced_is_compared_by_value() -> None:
    """A copy on another device is the same weight; another one is not."""
    module, known = make()
    module[0].weight = nn.Parameter(module[0].weight.clone(), requires_grad=False)
    known.check()
    module[0].weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    with pytest.raises(ScalingError, match=r"0\.weight"):
        known.check()


def test_a_table_that_tokens_are_added_to_is_refused() -> None:
    """Transformers resizes it through `.data`: a token without exponents came among scaled ones."""
    module, known = make()
    module[0].weight.data = torch.cat([module[0].weight.data, torch.randn(1, 8)])
    with pytest.raises(ScalingError, match=r"1 weights of transformer were rewritten .*0\.weight"):
        known.check()


def test_weights_that_a_caller_gives_in_a_transform_are_refused() -> None:
    """The gradient was that of the scaled weight; what has no exponents may be given."""
    module, known = make()
    module.register_forward_pre_hook(lambda *_: known.check())
    x, given = torch.randn(2, 8), {x: y.detach() for x, y in module.named_parameters()}
    plain = {"1.bias": given["1.bias"]}

    def call(tensors: dict[str, torch.Tensor], x: torch.Tensor = x) -> torch.Tensor:
        return torch.func.functional_call(module, tensors, x).sum()

    assert torch.func.grad(call, argnums=1)(given, x).shape == x.shape
    assert torch.func.grad(call)(plain).keys() == plain.keys()
    with pytest.raises(ScalingError, match=r"2 weights of transformer were given .*0\.weight"):
        torch.func.grad(call)(given)
    with pytest.raises(ScalingError, match=r"given by a caller in a torch.func transform"):
        torch.vmap(call)({"0.weight": torch.randn(2, 8, 8)}, x)


def test_a_cast_to_fp16_is_the_same_weight() -> None:
    """Values are compared in the narrower format."""
    module, known = make()
    module[:2].half()
    known.check()
    assert known.has_half


def test_a_cast_of_what_stays_in_fp32_is_refused() -> None:
    """After a cast of ours, whatever is in fp32 is meant to be."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)).requires_grad_(False)
    module[:2].half()
    known = FoldedWeights(module, SCALING, "transformer", casts=True)
    known.note()
    known.check()
    module.half()
    with pytest.raises(ScalingError) as caught:
        known.check()
    assert caught.value.what == (
        "transformer was cast since its exponents were folded in: 2.weight is fp16, and was fp32, as "
        "were 1 more."
    )


def test_a_cast_to_8_bits_is_refused() -> None:
    """Weights with exponents vanish there."""
    module, known = make()
    module[0].weight.data = module[0].weight.to(torch.float8_e4m3fn)
    with pytest.raises(ScalingError, match=r"0\.weight is fp8-e4m3\.") as caught:
        known.check()
    assert "many weights would vanish" in caught.value.expected


def test_weights_that_arrive_late_are_known() -> None:
    """A quantizer loads them after the exponents were put on."""
    module, known = make()
    module[0].weight.mul_(2)
    known.note()
    known.check()


def test_gradients_of_folded_weights_are_refused_until_it_is_undone() -> None:
    """Those of others flow."""
    module, known = make(grad=True)
    with Patches() as patches:
        known.refuse_gradients(patches)
        with pytest.raises(ScalingError, match=r"A gradient of 0\.weight of transformer"):
            module[0](torch.ones(1, 8)).sum().backward()
        module[2](torch.ones(1, 8)).sum().backward()
    module[0](torch.ones(1, 8)).sum().backward()
    assert module[0].weight.grad is not None


def test_gradients_of_a_weight_that_takes_the_place_of_another_are_refused() -> None:
    """A copy of equal values is known for the same weight; only the first tensor of a name was refused."""
    module, known = make(grad=True)
    known.refuse_gradients(Patches())
    for _ in range(2):
        module[0].weight = nn.Parameter(module[0].weight.detach().clone())
        known.check()
        with Patches() as patches:
            known.refuse_gradients(patches)
            with pytest.raises(ScalingError, match=r"A gradient of 0\.weight of transformer"):
                module[0](torch.ones(1, 8)).sum().backward()


def call_in_jvp(call: Call, weight: torch.Tensor) -> Any:
    return torch.func.jvp(call, (weight,), (torch.ones_like(weight),))


def call_with_tangent(call: Call, weight: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(weight, torch.ones_like(weight)))


@pytest.mark.parametrize("differentiate", [call_in_jvp, call_with_tangent])
def test_scaled_weights_are_not_differentiated_by_forward(differentiate: Any) -> None:
    """The tangent was that of another weight."""
    module, known = make()
    weights = {name: x.detach() for name, x in module.named_parameters()}

    def call(weight: torch.Tensor) -> torch.Tensor:
        given = {**weights, "0.weight": weight}
        return torch.func.functional_call(module, given, (torch.ones(1, 8),))

    module.register_forward_pre_hook(lambda *_: known.check())
    call(weights["0.weight"])
    with pytest.raises(ScalingError, match=r"1 weights .* to differentiate by: 0\.weight\."):
        differentiate(call, weights["0.weight"])
