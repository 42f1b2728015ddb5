"""Calls of other sizes than those that exponents were found for: what is folded is read as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from models.rescaling_models import WAYS, scale_weights
from models.size_cases import CASES
from stopdown.numerics import iterate_tensors
from stopdown.scaling.folding.folds import fold_scaling
from stopdown.scaling.graph.capture import read_call
from stopdown.scaling.rescale import rescale_

QUICK = ("CogVideoX learned, as configured", "CogVideoX learned, otherwise")


def run(module: nn.Module, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(iterate_tensors(module(**copy.deepcopy(kwargs))))


def count_branches(module: nn.Module, calls: list[dict[str, Any]]) -> int:
    """How many ways of reading what the module holds the calls take; 0 where values are asked for."""
    found = [read_call(module, (), x, torch.float32) for x in calls]
    assert len({x is None for x in found}) == 1
    return 0 if found[0] is None else len({*found})


@pytest.mark.filterwarnings("ignore:.*CPU autocast")
@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_every_branch_that_sizes_take_is_right(name: str) -> None:
    """In fp32 every bit is what it was, under the watch and, as in a converted folder, without it."""
    case = CASES[name]
    module, calls = case.make(), [case.kwargs(*sizes) for sizes in case.sizes]
    assert scale_weights(module, WAYS["residual"], 14)
    assert count_branches(module, calls) == case.branches
    wanted = [run(copy.deepcopy(module), x) for x in calls]
    plain = copy.deepcopy(module)
    rescaling = rescale_(module, (), calls[0])
    assert any(rescaling.scaling.exponents.values())
    fold_scaling(plain, rescaling.scaling)
    for tried in (module, plain):
        for kwargs, right in zip(calls, wanted, strict=True):
            assert all(map(torch.equal, run(tried, kwargs), right))


def test_a_table_that_a_call_does_not_read_keeps_its_values() -> None:
    """Beyond fp16 with headroom, and not read at this number of frames: another number reads it."""
    case = CASES["CogVideoX learned, otherwise"]
    module, calls = case.make(), [case.kwargs(*sizes) for sizes in case.sizes]
    assert scale_weights(module, WAYS["residual"], 14)
    patch_embed: Any = module.patch_embed
    patch_embed.pos_embedding.fill_(2.0**17)
    wanted = [run(module, x) for x in calls]
    rescaling = rescale_(module, (), calls[0], ranges="bound")
    assert not any("pos_embedding" in name for name in rescaling.scaling.exponents)
    for kwargs, right in zip(calls, wanted, strict=True):
        assert all(map(torch.equal, run(module, kwargs), right))
