"""rescale_: what it leaves alone, what it refuses, and that it is taken back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from models.branch_networks import Network, copy_state, make_overflowing
from models.snapshots import compare_snapshot, take_snapshot
from stopdown.errors import InputError, ScalingError
from stopdown.scaling.exponents import exponent_rules as rules
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.rescale import rescale_


def test_undoing_after_a_cast_takes_both_back() -> None:
    """One `undo` of the rescaling restores dtypes, weights, eps and hooks; a second is harmless."""
    module, x = make_overflowing("attention")
    before, reference = copy_state(module), module(x)
    rescaling = rescale_(module, (x,))
    cast_(module, torch.float16, rescaling)
    assert module.out.weight.dtype == torch.float16
    for _ in range(2):
        rescaling.undo()
    after = copy_state(module)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(module(x), reference)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_a_module_that_is_in_range_is_left_alone() -> None:
    """Nothing is folded into a network that fp16 holds as it is."""
    torch.manual_seed(0)
    module, x = Network("gated").eval(), torch.randn(2, 5, 4)
    rescaling = rescale_(module, (x,))
    assert (rescaling.exponents, rescaling.multiplies, rescaling.fp32_modules) == ({}, {}, ())
    assert rescaling.certified is False


def test_weights_and_inputs_that_are_zero_are_left_alone() -> None:
    """A range of zero asks for nothing: a last linear that begins at zero, an input of zeros."""
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    module.eval().requires_grad_(False)
    module[0].weight.mul_(2.0**18)
    for parameter in module[2].parameters():
        parameter.zero_()
    rescaling = rescale_(module, (torch.randn(3, 4),))
    assert rescaling.exponents["0.weight"] < 0
    assert not any(name.startswith("2.") for name in rescaling.exponents)
    cast_(module, torch.float16, rescaling)
    assert torch.equal(module(torch.randn(3, 4).half()), torch.zeros(3, 4).half())
    module = nn.Sequential(nn.Linear(4, 4)).eval().requires_grad_(False)
    module[0].weight.zero_(), module[0].bias.zero_()
    assert rescale_(module, (torch.zeros(3, 4),)).exponents == {}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_input_without_a_range_is_refused(value: float) -> None:
    """NaN and Inf in what the call is given are named, and nothing was changed."""
    module = nn.Sequential(nn.Linear(4, 4)).eval().requires_grad_(False)
    before, x = module[0].weight.clone(), torch.zeros(2, 4)
    x[1, 2] = value
    with pytest.raises(
        ScalingError, match=r"The input \w+ holds 1 values that are NaN or Inf in fp32"
    ):
        rescale_(module, (x,))
    assert torch.equal(module[0].weight, before)


def test_an_output_without_a_range_is_refused() -> None:
    """A model that overflows fp32 itself has no exponents; the error says where and what to check."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval().requires_grad_(False)
    module[0].weight.fill_(1e30), module[1].weight.fill_(1e30)
    with pytest.raises(
        ScalingError, match=r"Sequential:1 \(linear\) holds .* Check the weights on d"
    ):
        rescale_(module, (torch.ones(2, 4),))


def test_a_wrong_rule_is_found_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gelu that is said to scale with its input changes bits: refused, and every bit is restored."""
    torch.manual_seed(0)
    read_rule = rules.read_rule
    monkeypatch.setattr(
        rules, "read_rule", lambda cell: read_rule("same" if cell == "pinned" else cell)
    )
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    module.eval().requires_grad_(False)
    module[0].weight.mul_(2.0**18)
    module[0].bias.zero_()
    before, x = take_snapshot(module), torch.randn(3, 4)
    x[0] *= 2.0**-18  # where a gelu bends
    with pytest.raises(
        ScalingError, match=r"isn't bit for bit what it was\. .* a rule of an operation"
    ):
        rescale_(module, (x,))
    assert compare_snapshot(before, module) == []


def test_parameters_that_lie_in_the_same_memory_are_named() -> None:
    """An exponent that is written into one changes the other: refused, and every bit is restored."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    memory = torch.randn(24) * 2.0**17
    for number, start in ((0, 0), (2, 8)):
        module[number].weight = nn.Parameter(memory[start : start + 16].view(4, 4))
    module.eval().requires_grad_(False)
    before, x = take_snapshot(module), torch.randn(3, 4)
    with pytest.raises(
        ScalingError,
        match=r"0\.weight and 2\.weight of Sequential lie in the same memory in part\. .*"
        r"module\.get_parameter\('0\.weight'\)\.clone\(\)",
    ):
        rescale_(module, (x,))
    assert compare_snapshot(before, module) == []


def test_torchscript_and_complex_weights_are_refused_by_name() -> None:
    """One sentence says what was given, with the name that the module has for it."""

    class Complex(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = torch.nn.Parameter(torch.eye(8, dtype=torch.complex64))
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.linear((x.to(torch.complex64) @ self.turn).real)
            return made

    x = (torch.full((2, 8), 6e4),)
    with pytest.raises(
        ScalingError, match=r"The weight turn of Complex is complex \(torch.complex64\)"
    ):
        rescale_(Complex().eval(), x)
    with pytest.raises(InputError, match=r"^rescale_ was given a TorchScript module\."):
        rescale_(torch.jit.trace(torch.nn.Linear(8, 8).eval(), x), x)


class Cached(nn.Module):
    """Puts its keys into an object among its arguments, as `WanAnimate2Transformer3DModel` does."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.norm = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.keys.append(self.key(x))
        return self.norm(cache.keys[-1])  # type: ignore[no-any-return]


class Cache:
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


@pytest.mark.parametrize("factor", [1.0, 1e5])
def test_a_call_that_fills_its_arguments_is_refused_if_that_would_be_scaled(factor: float) -> None:
    """Each call would be refused later, also the example; the cache is left as it was."""
    module, cache, x = Cached().requires_grad_(False), Cache(), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    module.key.weight.copy_(factor * torch.eye(4))
    if factor == 1.0:
        assert not rescale_(module, (x, cache)).exponents
    else:
        with pytest.raises(ScalingError, match="puts tensors into its arguments, such as a cache"):
            rescale_(module, (x, cache))
        assert torch.equal(module.key.weight, factor * torch.eye(4))
    assert not cache.keys
    module(x, cache)
    assert len(cache.keys) == 1
