"""Operators that run code of their own on parts of a tensor: `vmap`, `flex_attention`, `cond`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from stopdown.errors import CaptureError
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.graph import (
    capture,
    range_measurement,
)
from stopdown.scaling.rescale import rescale_

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

SIZE = 16


class Base(nn.Module):
    """A stream beyond fp16 around something."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, SIZE), nn.LayerNorm(SIZE)
        self.query, self.key, self.value, self.back = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.last_norm, self.last = nn.LayerNorm(SIZE), nn.Linear(SIZE, 4)
        self.bias = nn.Parameter(torch.randn(8))
        self.eval().requires_grad_(False)
        for layer in (self.first, self.value):
            layer.weight.mul_(2.0**20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.last_norm(x + self.back(self.change(self.norm(x)))))  # type: ignore[no-any-return]

    def change(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Flexible(Base):
    """Attention with a bias of the module's own, and a mask that is made in the call."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias

        def score(
            s: torch.Tensor, b: int, h: int, i: torch.Tensor, j: torch.Tensor
        ) -> torch.Tensor:
            return s + bias[j].to(s.dtype)

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu")
        q, k, v = (layer(x)[:, None] for layer in (self.query, self.key, self.value))
        return flex_attention(q, k, v, score_mod=score, block_mask=mask)[:, 0]  # type: ignore[index,return-value]


class Mapped(Base):
    """A function of one row, for all rows."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row * row.sum().sigmoid())(self.value(x))


class MappedAlong(Base):
    """A function of one row whose results are joined along the last dimension."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.vmap(lambda row: row * row.sum().sigmoid(), in_dims=1, out_dims=-1)
        return rows(self.value(x)).transpose(1, 2)


class Without(Base):
    """A score of the module's own inside of a region without gradients."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            q, k, v = (layer(x)[:, None] for layer in (self.query, self.key, self.value))
            found = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j))
        return found[:, 0]  # type: ignore[index,return-value]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Flexible, Mapped, MappedAlong, Without])
def test_what_runs_code_of_its_own_is_rescaled(kind: type[Base]) -> None:
    """Exact in fp32, for later inputs as well, finite in fp16; it was a raw error of PyTorch."""
    module, x = kind(), torch.randn(2, 8, 4)
    given = [x, torch.randn(2, 8, 4), x * 1e-6, x * 100]
    before = [module(one) for one in given]
    rescaling = rescale_(module, (x,))
    assert all(map(torch.equal, map(module, given), before))
    cast_(module, torch.float16, rescaling)
    low = module(x.half())
    assert float((low.float() - before[0]).norm() / before[0].norm()) < 0.01


def test_a_failure_inside_of_vmap_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a measurement there leaves no region of `vmap` open: later code drew no random numbers."""
    level = torch._C._functorch.maybe_current_level

    def fail(value: torch.Tensor) -> tuple[float, float, float, int]:
        if level():
            raise MemoryError
        return 1.0, 1.0, 1.0, 0

    monkeypatch.setattr(range_measurement, "summarise_magnitudes", fail)
    with pytest.raises(MemoryError):
        rescale_(Mapped(), (torch.randn(2, 8, 4),))
    assert level() is None


def test_a_graph_that_lost_its_vmap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.6.0 gives values of such a region as constants; hooks do what exponents cannot."""
    leaked, read = list[torch.Tensor](), capture._read_program

    def lose(*given: Any) -> Any:
        graph, parameters, constants, inputs = read(*given)
        return graph, parameters, {**constants, "lost": leaked[0]}, inputs

    torch.vmap(lambda row: leaked.append(row) or row)(torch.ones(2, 3))
    monkeypatch.setattr(capture, "_read_program", lose)
    module, x = Mapped(), torch.randn(2, 8, 4)
    before = module(x)
    rescaling = rescale_(module, (x,))
    assert not rescaling.exponents
    assert "its code calls vmap" in rescaling.scaling.note
    assert torch.equal(module(x), before)


class Placed(Flexible):
    """The same with a table of positions, whose module is called again at other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, SIZE), requires_grad=False)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return super().change(x + self.table)


def test_flex_attention_is_compiled_once_for_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls at other sizes aren't compiled: for AnyFlow they took two thirds of a repair's time."""
    compiled, compile_frame = list[str](), convert_frame._compile

    def note(code: Any, *rest: Any, **options: Any) -> Any:
        compiled.append(code.co_name)
        return compile_frame(code, *rest, **options)

    monkeypatch.setattr(convert_frame, "_compile", note)
    found = capture.capture_call(
        nn.Sequential(Placed()), (torch.randn(2, 8, 4),), dtype=torch.float16
    )
    assert "0.table" not in found.replaceable
    assert compiled == ["_flex_attention_hop_wrapper"]


KEPT: dict[str, torch.Tensor] = {}
"""What `Keeping` makes once."""


class Keeping(Base):
    """A tensor that the first call makes, kept in a global."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        if "made" not in KEPT:
            KEPT["made"] = torch.full((SIZE,), 3.0)
        return self.value(x) * KEPT["made"]


def test_a_tensor_that_was_made_without_values_is_refused() -> None:
    """A global that a trace filled has no values; it was a raw error of PyTorch about `Eq(u0, 1)`."""
    KEPT.clear()
    with pytest.raises(CaptureError) as refused:
        capture.capture_call(Keeping(), (torch.randn(2, 8, 4),), dtype=torch.float16)
    assert str(refused.value) == (
        f"Keeping can't be captured as a graph: its code keeps tensors in {__name__}.KEPT, outside of the "
        "module. Another call would read them there, with other exponents or none. Make them in each call, "
        "or keep them as buffers of the module."
    )
    assert not KEPT
