"""Gradients of calls that a script's guard repaired: from a backward pass that comes when it is off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from stopdown.interception.patches import Patches
from stopdown.numerics import relative_l2
from stopdown.runtime.later_gradients import graft_gradients
from stopdown.runtime.scripts import ScriptGuard

SCALE = 1024.0
"""What the loss is multiplied with, as always in fp16."""


class Adapted(nn.Module):
    """Two linears and a low-rank adapter; the first product goes beyond fp16."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.mid = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.lora_a, self.lora_b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(64, 8)
        self.up.weight.data.mul_(2e4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, 32]` to `[N, 8]`."""
        h = self.up(x) * 8
        h = h + self.mid(self.norm(h)) + self.lora_b(self.lora_a(self.norm(h)))
        found: torch.Tensor = self.out(self.dropout(self.norm(h)))
        return found


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 32), torch.randn(16, 8)


def differentiate(
    module: nn.Module, dtype: torch.dtype, asked: str, seed: int = 0
) -> dict[str, torch.Tensor]:
    """The output, and the gradients of what the text names: parts of parameters' names, or `input`."""
    x, wanted = draw()
    module = module.to(dtype).eval() if seed == 0 else module.to(dtype)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(word in name for word in asked.split()))
        parameter.grad = None
    given = x.clone().to(dtype).requires_grad_("input" in asked)
    torch.manual_seed(seed)
    output = module(given)
    torch.manual_seed(seed + 1)  # a script draws other numbers meanwhile
    (SCALE * ((output.float() - wanted) ** 2).mean()).backward()
    found = {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
    if given.requires_grad:
        found["input"] = given.grad
    assert all(x is not None for x in found.values())
    return {"output": output.detach(), **{n: x.float() for n, x in found.items() if x is not None}}


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What is said of a script whose calls are guarded."""
    found: list[str] = []
    with Patches() as patches:
        ScriptGuard(found.append).put_on(patches)
        yield found


@pytest.mark.parametrize("asked", ["lora", "out", "mid norm", "input", "lora out input"])
@pytest.mark.parametrize("is_known", [False, True], ids=["first call", "later call"])
def test_gradients_of_a_repaired_call_are_those_of_fp32(
    asked: str, is_known: bool, told: list[str]
) -> None:
    """They were those of scaled weights, 88 % off, or the backward pass ended in an error."""
    wanted = differentiate(Adapted(), torch.float32, asked)
    plain = differentiate(Adapted(), torch.bfloat16, asked)
    assert not told
    module = Adapted().half()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    if is_known:
        with torch.no_grad():
            module.eval()(draw()[0].half())
        assert len(told) == 1
    found = differentiate(module, torch.float16, asked)
    assert "Rescaled" in told[0]
    assert {*found} == {*wanted}
    for name, value in found.items():
        assert relative_l2(value, wanted[name]) < relative_l2(plain[name], wanted[name])
    assert all(map(torch.equal, before.values(), module.state_dict().values()))


def test_random_numbers_are_those_of_the_call(told: list[str]) -> None:
    """Dropout in a backward pass leaves out what it left out in the call."""
    module = Adapted(dropout=0.5)
    wanted = differentiate(Adapted(dropout=0.5), torch.float32, "out", seed=3)
    found = differentiate(module, torch.float16, "out", seed=3)
    assert relative_l2(found["out.weight"], wanted["out.weight"]) < 0.01


def test_what_a_script_does_with_outputs_goes_on(told: list[str]) -> None:
    """`autograd.grad` writes no parameter's gradient, outputs may be written to, a graph may be kept."""
    module, x = Adapted().half().eval(), draw()[0].half().requires_grad_()
    output = module(x)
    output *= 2
    loss = (SCALE * output.float()).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_call_without_a_fault_keeps_its_own_graph(told: list[str]) -> None:
    """Its gradients are bit for bit those without a guard."""
    module = nn.Linear(4, 4).half()
    output = module(torch.ones(2, 4).half())
    assert type(output.grad_fn).__name__ == "AddmmBackward0"
    assert not told


class Several(nn.Module):
    """Returns a nested output, of which one tensor has no gradient; counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def encode(self, x: torch.Tensor, *, factor: float) -> dict[str, Any]:
        """`[N, 4]` to two of its shape, and a number."""
        self.calls += 1
        made = self.linear(x) * factor
        return {"twice": (made, made.exp()), "fixed": made.detach(), "number": 3}


def test_outputs_methods_and_buffers() -> None:
    """Any structure and method; the second run leaves buffers as the first left them."""
    module, x = Several(), torch.ones(2, 4)
    restore: Callable[[], None] = lambda: None  # noqa: E731
    output = module.encode(x, factor=0.5)
    grafted = graft_gradients(module, "encode", ((x,), {"factor": 0.5}), output, restore)
    assert grafted["number"] == 3
    assert not grafted["fixed"].requires_grad
    (wanted,) = torch.autograd.grad(output["twice"][1].sum(), module.linear.bias)
    (found,) = torch.autograd.grad(grafted["twice"][1].sum(), module.linear.bias)
    assert torch.equal(wanted, found)
    assert module.calls == 1
