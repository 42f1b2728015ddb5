"""What is done at a fault: stop, go on, or repair and make the same call again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models.pipeline_calls import quiet
from models.snapshots import assert_untouched
from stopdown.errors import NonFiniteError
from stopdown.numerics import relative_l2
from stopdown.runtime import repairs
from stopdown.runtime.guard import guard


class Block(nn.Module):
    """A stream that leaves fp16 in the second of its sums."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Drawing(Block):
    """Draws noise, which a replay has to draw again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn(x.shape, dtype=x.dtype) / 8


def make(kind: type[Block] = Block) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return a module in fp16, an input, and what it gives in fp32."""
    torch.manual_seed(0)
    module = nn.Sequential(kind(), kind(), nn.LayerNorm(16), nn.Linear(16, 16))
    module.requires_grad_(False).eval()
    module[0].inner.weight.mul_(1e5)
    x = torch.randn(4, 16)
    torch.manual_seed(1)
    wanted = module(x)
    return module.half(), x.half(), wanted


@pytest.fixture(autouse=True)
def _without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row depends on what this processor computes in."""
    monkeypatch.setattr(repairs, "computes_bf16", lambda *_: False)


@pytest.mark.thorough
def test_a_fault_is_repaired_and_the_call_made_again() -> None:
    """Its output is near fp32's; the next call needs no repair, and nothing stays behind."""
    module, x, wanted = make()
    with assert_untouched(module), guard(module, announce=quiet) as handle:
        first = module(x)
        assert len(handle.repairs) == 1
        assert torch.equal(module(x), first)
        assert len(handle.repairs) == 1
    (repair,) = handle.repairs
    assert (repair.kind, repair.action) == ("range", "rescaled")
    assert relative_l2(first.float(), wanted) < 4e-3
    assert (handle.record.calls[0].calls, handle.record.calls[0].non_finite) == (2, 1)


def test_raise_stops_with_the_culprit_and_changes_nothing() -> None:
    """The module that gave Inf is named."""
    module, x, _ = make()
    with (
        assert_untouched(module), guard(module, on_fault="raise") as handle,
        pytest.raises(NonFiniteError, match=r"0"),
    ):  # fmt: skip
        module(x)
    assert handle.repairs == ()


def test_warn_goes_on_with_what_the_model_gave() -> None:
    """Each time with the same value, and it is told of once."""
    module, x, _ = make()
    plain, told = module(x), list[str]()
    with guard(module, on_fault="warn", announce=told.append) as handle:
        found = [module(x) for _ in range(3)]
    assert all(torch.allclose(y, plain, rtol=0, atol=0, equal_nan=True) for y in found)
    assert len(told) == 1
    assert handle.repairs[0].action == "none"
    assert handle.record.calls[0].non_finite == 3


def test_what_is_being_trained_is_left_alone() -> None:
    """An optimizer holds its parameters: it is told how to allow the repair."""
    module, x, _ = make()
    module.float().requires_grad_(True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    module.half()
    with guard(module, announce=quiet) as handle:
        output = module(x)
    assert optimizer.param_groups
    assert not output.isfinite().all()
    assert handle.repairs == ()
    assert any("It is being trained" in text for text in handle.record.unwatched)


@pytest.mark.thorough
def test_a_replay_draws_the_same_noise() -> None:
    """The random numbers behind the call are those of a run without a fault."""
    module, x, wanted = make(Drawing)
    torch.manual_seed(1)
    with guard(module, announce=quiet):
        found = module(x)
    after = torch.rand(1)
    torch.manual_seed(1)
    for _ in range(2):
        torch.randn(x.shape, dtype=x.dtype)
    assert torch.equal(after, torch.rand(1))
    assert found.isfinite().all()
    assert wanted.isfinite().all()


def test_a_generator_that_is_given_by_place_draws_the_same_noise() -> None:
    """Where each repeat drew other noise, no result could be compared, and the generator went on."""

    class Sampling(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            made: torch.Tensor = self.block(x)
            return made + torch.randn(made.shape, generator=generator).to(made.dtype)

    block, x, wanted = make()
    module, generator = Sampling(block), torch.Generator().manual_seed(1)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    with guard(module, announce=quiet) as handle:
        found = module(x, generator)
    assert [x.action for x in handle.repairs] == ["rescaled"]
    assert torch.allclose(found.float(), wanted + noise, atol=0.02)
    once = torch.Generator().manual_seed(1)
    torch.randn(x.shape, generator=once)
    assert torch.equal(generator.get_state(), once.get_state())


def test_an_argument_that_is_not_finite_is_no_fault_of_the_module() -> None:
    """No repair makes it finite: the run ends, and the argument is named."""
    module, x, _ = make()
    x[0, 0] = torch.inf
    with guard(module, announce=quiet) as handle, pytest.raises(NonFiniteError, match="input"):
        module(x)
    (repair,) = handle.repairs
    assert (repair.kind, repair.action) == ("input", "none")


def test_a_call_that_wrote_to_its_arguments_is_not_made_again() -> None:
    """Its input is not there any more."""

    class Writing(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.mul_(1e5)

    with (
        guard(Writing(), announce=quiet) as handle,
        pytest.raises(NonFiniteError, match=r"wr(ote|itten)"),
    ):  # fmt: skip
        handle.pipe(torch.ones(4).half())
