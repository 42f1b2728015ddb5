"""A module whose attributes and code are changed between its calls, with exponents in it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from stopdown.errors import StopdownWarning
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.runtime.guard import guard
from stopdown.scaling.rescale import rescale_

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))


class Stream(nn.Module):
    """A stream beyond fp16, whose parts count alike; an attribute leads it elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down, self.last = (nn.Linear(16, 16) for _ in range(4))
        self.norm, self.table = nn.RMSNorm(16, eps=1e-6), nn.Parameter(torch.randn(16))
        self.mode, self.calls, self.shares = "", 0, [0.0]
        self.eval().requires_grad_(False)
        for layer in (self.embed, self.down):
            layer.weight.mul_(2.0**17)

    def forward(self, x: torch.Tensor, store: Any = None) -> torch.Tensor:
        """`[N, 16]`, the same again; a container gets the stream."""
        self.calls += 1
        h = self.embed(x)
        h = h + self.down(self.up(self.norm(h)))
        if self.mode == "added":
            h = h + self.table * 1e5
        if self.mode == "gated" or self.shares[0] != 0:
            h = h * torch.sigmoid(h * 1e-5)
        if isinstance(store, list):
            store.append(h)
        if isinstance(store, dict):
            store["h"] = h
        made: torch.Tensor = self.last(self.norm(h))
        return made


def call(module: nn.Module, dtype: torch.dtype = torch.float16, store: Any = None) -> torch.Tensor:
    made: torch.Tensor = module(X.to(dtype), **({} if store is None else {"store": store}))
    return made


@contextlib.contextmanager
def planned(module: Stream, said: list[str]) -> Iterator[torch.dtype]:
    plan = measure_plan({"part": module}, run=lambda: call(module, torch.float32))
    with warnings.catch_warnings(record=True) as caught, apply_plan({"part": module}, plan):
        warnings.simplefilter("always", StopdownWarning)
        yield torch.float16
    said += [str(x.message) for x in caught]


@contextlib.contextmanager
def repaired(module: Stream, said: list[str]) -> Iterator[torch.dtype]:
    module.half()
    with guard(module, announce=said.append) as handle:
        call(module)
        assert [x.action for x in handle.repairs] == ["rescaled"]
        said.clear()
        yield torch.float16


@contextlib.contextmanager
def rescaled(module: Stream, said: list[str]) -> Iterator[torch.dtype]:
    rescaling = rescale_(module, (X,))
    yield torch.float32
    rescaling.undo()


WAYS = [planned, repaired, rescaled]
