"""Modules without a graph: fp32 modules found by hooks, tried in fp16, or refused with why."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from models.snapshots import compare_snapshot, take_snapshot
from stopdown.errors import CaptureError
from stopdown.numerics import relative_l2
from stopdown.runtime.guard import guard
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.trials import fallback


class Leaving(nn.Module):
    """A residual network beyond fp16 whose values leave PyTorch on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(4, 16), nn.LayerNorm(16)
        self.wide, self.back, self.out = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = torch.from_numpy(x.numpy().copy())
        x = x + self.back(torch.relu(self.wide(self.norm(x)))) * 1e5
        return self.out(self.norm(x))


def make_leaving(kind: type[nn.Module] = Leaving) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    module = kind().eval().requires_grad_(False)
    return module, torch.randn(3, 4)


def test_what_fits_runs_in_fp16_and_the_rest_in_fp32() -> None:
    """Finite and near in fp16, its sums in fp32; the line at fault is named; undo restores all."""
    module, x = make_leaving()
    module.wide.weight *= 2.0**20
    module.back.weight *= 2.0**-20
    reference, before = module(x), take_snapshot(module)
    rescaling = rescale_(module, (x,))
    assert torch.equal(module(x), reference)
    note = rescaling.scaling.note
    assert "Leaving can't be captured as a graph" in note
    assert "x.numpy().copy()" in note
    assert "2 of 4 matrices run in fp16" in note
    assert "Beyond fp16: wide, back." in note
    cast_(module, torch.float16, rescaling)
    low = module(x.half())
    assert low.dtype == torch.float16
    assert relative_l2(low, reference) < 0.005
    assert module.embed.weight.dtype == torch.float16
    assert module.norm.weight.dtype == torch.float32
    rescaling.undo()
    assert compare_snapshot(before, module) == []


def test_a_counter_that_refuses_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of torch 2.6.0 refuses flex attention: the work of the matrices is counted."""

    class Counter(FlopCounterMode):
        def __exit__(self, *given: Any) -> None:
            super().__exit__(*given)
            raise NotImplementedError("flex_attention")

    module, x = make_leaving()
    expected = rescale_(module, (x,))
    expected.undo()
    monkeypatch.setattr(fallback, "FlopCounterMode", Counter)
    found = rescale_(module, (x,))
    assert found.scaling.fp32_modules == expected.scaling.fp32_modules
    assert "matrices run in fp16" in found.scaling.note


def test_share_of_the_work_is_counted() -> None:
    """With every matrix in fp16 nothing of the matmul work is left in fp32."""
    module, x = make_leaving()
    rescaling = rescale_(module, (x,))
    assert rescaling.scaling.fp32_flops == 0
    assert "4 of 4 matrices run in fp16" in rescaling.scaling.note


class Choosing(nn.Module):
    """Picks a branch for each row, in code that PyTorch compiles by itself and nothing traces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def choose(row: torch.Tensor) -> Any:
            return torch.cond(row.sum() > 0, torch.sin, torch.cos, (row,))

        return torch.vmap(choose)(self.inner(x)) * 2


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of what it compiles
def test_code_that_compiles_itself_returns_later_what_it_did() -> None:
    """What fits is found, and neither the measurement nor a later call gets other containers."""
    torch.manual_seed(0)
    module, x = Choosing().eval().requires_grad_(False), torch.randn(3, 4)
    before = module(x)
    rescaling = rescale_(module, (x,))
    assert "1 of 1 matrices run in fp16" in rescaling.scaling.note
    assert rescaling.trial
    rescaling.undo()
    assert torch.equal(module(x), before)


class Stubborn(Leaving):
    """Multiplies by itself, in the dtype of another module's weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.from_numpy(self.embed(x).numpy().copy()).to(self.out.weight.dtype)
        return self.out(x @ torch.diag(self.norm.weight))


def test_a_fall_back_that_does_not_run_is_refused() -> None:
    """It is tried before it is believed: the error says what happened then."""
    module, x = make_leaving(Stubborn)
    with pytest.raises(CaptureError, match=r"hooks don't do either: in fp16 with casts it raises"):
        rescale_(module, (x,))


class Overflowing(Leaving):
    """Brings its stream to 16 bits by itself, beyond their range."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.from_numpy(self.embed(x).numpy().copy()) * 1e6
        return self.out(self.norm(x.to(self.out.weight.dtype).float()))


def test_a_fall_back_that_is_not_right_is_refused() -> None:
    """NaN, or another output than that of fp32: no precision is claimed that is not there."""
    module, x = make_leaving(Overflowing)
    with pytest.raises(CaptureError, match=r"in fp16 with casts its output isn't that of fp32"):
        rescale_(module, (x,))


class Reading(Leaving):
    """Reads which rows a mask keeps, as Qwen-Image 2.1 does: how many there are depends on values."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.embed(x)
        rows = torch.arange(len(x))[mask].tolist()
        for row in rows:
            x[row] = x[row] + self.back(torch.relu(self.wide(self.norm(x[row])))) * 1e5
        return self.out(self.norm(x))


def test_a_guard_repairs_what_has_no_graph() -> None:
    """Code that reads values is nearer to fp32 than bf16 is under the guard, whatever values come next."""
    module, x = make_leaving(Reading)
    masks = [torch.tensor(one) for one in ([True, False, True], [False, True, True], [True] * 3)]
    wanted = [module(x, mask) for mask in masks]
    bf16 = copy.deepcopy(module).bfloat16()
    errors = [relative_l2(bf16(x.bfloat16(), m), y) for m, y in zip(masks, wanted, strict=True)]
    told: list[str] = []
    with guard(module.half(), announce=told.append) as handle:
        for mask, right, error in zip(masks, wanted, errors, strict=True):
            assert relative_l2(module(x.half(), mask), right) < error / 2
        assert module.embed.weight.dtype == torch.float16
    assert [(one.action, one.tried) for one in handle.repairs] == [("rescaled", ())]
    assert "matrices run in fp16 between casts, and all else in fp32" in told[0]
    assert module.norm.weight.dtype == torch.float16
