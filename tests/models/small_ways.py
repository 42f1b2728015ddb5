"""Small modules that leave fp16's range in one way each, opened in every way that takes a module."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import stopdown
from models.ways_in import LEAST_ERROR, Outcome, compare
from stopdown.errors import StopdownError, take_first_line

WIDTH = 32


class Net(nn.Module):
    """Two residual branches whose sum passes fp16's maximum, and an end that takes the sum."""

    def __init__(self, end: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.end = end
        self.first.weight.data.mul_(3e4)
        self.second.weight.data.mul_(3e4)

    def forward(self, x: torch.Tensor) -> Any:
        stream = self.first(x)
        stream = stream + self.second(self.norm(stream))
        return self.end(self, stream)


def _leave_wide(net: Net, stream: torch.Tensor) -> torch.Tensor:
    return net.last(net.norm(stream)) * 2.0**18


def _end(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda net, stream: net.last(net.norm(change(stream)))


def _read(net: Net, stream: torch.Tensor) -> torch.Tensor:
    """Read numbers of a tensor on the host, as code does that splits a batch by lengths."""
    lengths = (torch.ones(3, dtype=torch.long) * 2).tolist()
    return net.last(net.norm(torch.cat([x * 1 for x in stream.split(lengths)])))


ENDS: dict[str, Callable[..., Any]] = {
    "norm": _end(lambda h: h),
    "nan_to_num": _end(lambda h: h.nan_to_num(0, 0, 0)),
    "where": _end(lambda h: torch.where(torch.isfinite(h), h, 0.0)),
    "masked_fill": _end(lambda h: h.masked_fill(~torch.isfinite(h), 0.0)),
    "clamp": _end(lambda h: h.clamp(-65504, 65504)),
    "output beyond": _leave_wide,
    "output beyond twice": lambda net, h: (y := _leave_wide(net, h), y.mean()),
    "output beyond scaled": lambda net, h: (y := _leave_wide(net, h), y * 1e-6),
    "output beyond split": lambda net, h: _leave_wide(net, h).chunk(2, -1),
    "output beyond widened": lambda net, h: _leave_wide(net, h).float(),
    "output beyond in a dict": lambda net, h: {"sample": _leave_wide(net, h)},
    "Inf meant": lambda net, h: net.last(net.norm(h)).masked_fill(
        torch.arange(WIDTH) > 20, -math.inf
    ),
    "list read": _read,
}
"""Ends that take a residual stream beyond fp16's range."""


def draw_calls() -> dict[str, list[torch.Tensor]]:
    """Return sequences of inputs: alike, and growing far beyond what the first showed."""
    made = torch.Generator().manual_seed(3)
    x, y = (torch.randn(6, WIDTH, generator=made) for _ in range(2))
    return {"alike": [x, y, x], "growing": [x, y * 300, x]}


Opened = tuple[nn.Module, AbstractContextManager[Any]]


def _rescale(net: Net, x: torch.Tensor) -> Opened:
    stopdown.rescale_(net, x, cast=True)
    return net, nullcontext()


def _apply_plan(net: Net, x: torch.Tensor) -> Opened:
    return net, stopdown.apply_plan(net, stopdown.make_plan(net, run=lambda: net(x)))


def _guard_with_plan(net: Net, x: torch.Tensor) -> Opened:
    return net, stopdown.guard(net, stopdown.make_plan(net, run=lambda: net(x)))


WAYS: dict[str, Callable[[Net, torch.Tensor], Opened]] = {
    "rescale_": _rescale,
    "apply_plan": _apply_plan,
    "guard": lambda net, x: (net.half(), stopdown.guard(net)),
    "guard + plan": _guard_with_plan,
    "fp16": lambda net, x: (net, stopdown.fp16(net, x)),
}

WATCHED = ("guard", "guard + plan", "fp16")
"""Ways that watch values; the others promise nothing beyond the range that they were shown."""


@dataclass(frozen=True)
class Cell:
    """One small module, opened in one way, and called in one order."""

    end: str
    way: str
    order: str

    def __str__(self) -> str:
        return f"{self.end}-{self.way}-{self.order}"


def list_small_cells() -> list[Cell]:
    """Return each cell; what is not watched is not called beyond its range."""
    orders = draw_calls()
    cells = [Cell(end, way, order) for end in ENDS for way in WAYS for order in orders]
    return [x for x in cells if x.order == "alike" or x.way in WATCHED]


def make_net(end: str) -> Net:
    """Draw a module's weights, the same for all of its cells."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(ENDS[end]).eval().requires_grad_(False)


def _flatten(found: Any) -> list[torch.Tensor]:
    values = found.values() if isinstance(found, dict) else found
    tensors = list(values) if isinstance(values, (tuple, list)) or found is not values else [found]
    limit = torch.tensor(-1e4)  # what is meant to be -inf counts as a number
    return [torch.where(x == -math.inf, limit, x.float()) for x in tensors]


@torch.no_grad()
def fill_small(cell: Cell) -> Outcome:
    """Fill a cell: every call's result, against fp32 and beside bf16."""
    calls = draw_calls()[cell.order]
    plain = make_net(cell.end)
    want = [_flatten(plain(x)) for x in calls]
    half = copy.deepcopy(plain)
    half = (
        half.half() if cell.way == "guard" else half
    ).bfloat16()  # a guard is given fp16's weights
    bf16 = max(compare(_flatten(half(x.bfloat16())), y) for x, y in zip(calls, want, strict=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net, handle = WAYS[cell.way](make_net(cell.end), calls[0])
            with handle as entered:
                found = [_flatten(net(x.half())) for x in calls]
                repairs = getattr(entered, "repairs", ())
    except StopdownError as error:
        return Outcome("refused", reason=take_first_line(error))
    except Exception as error:  # what plain PyTorch runs, and this does not
        return Outcome("wrong", math.inf, bf16, f"{type(error).__name__}: {error}"[:300])
    error = max(compare(x, y) for x, y in zip(found, want, strict=True))
    if error <= max(bf16, LEAST_ERROR):
        return Outcome("repaired" if repairs else "right", error, bf16)
    return Outcome("wrong", error, bf16, f"{error:.3g} off fp32, bf16 {bf16:.3g}")
